"""Skips the folder, with the reason, where Herring's native module or torch is not there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed")
