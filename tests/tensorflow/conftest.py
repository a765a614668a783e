"""Skips the folder, with the reason, where TensorFlow is not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))  # surroundings.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from surroundings import is_installed

    # Not by importing it: that takes seconds, and the tests' own process does not need it.
    if not is_installed("tensorflow"):
        skip = pytest.mark.skip(reason="tensorflow is not installed (make test-tensorflow installs it)")
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(skip)
