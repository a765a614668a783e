"""Skips the folder, with the reason, where torch is not there; the helpers of tests/torch serve here as well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "torch"))
