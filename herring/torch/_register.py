"""Makes torch.distributed know the backend "herring", as `import torch` does by itself where Herring is installed."""

from __future__ import annotations

from _herring_autoload import NAME, register

__all__ = ["NAME", "register"]
