"""The kernels' PTX is checked in: it must be what their sources say, in a language that old drivers read."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "csrc" / "cuda" / "kernels"


def generator():
    spec = importlib.util.spec_from_file_location("generate", KERNELS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_ptx_is_made_from_these_sources():
    text = (KERNELS / "kernels.ptx.inc").read_text()
    assert generator().digest() in text.splitlines()[0], "run csrc/cuda/kernels/generate.py with an nvcc"


def test_the_ptx_is_for_old_drivers_and_rounds_as_the_cpu_does():
    text = (KERNELS / "kernels.ptx.inc").read_text()
    assert re.findall(r"^\.(version|target) (.*)$", text, re.MULTILINE) == [("version", "7.8"), ("target", "sm_80")]
    assert re.findall(r"\.visible \.entry (\w+)\(", text) == ["herring_pack", "herring_sum"]
    assert not re.search(r"\bfma\.|\.ftz\b|\.approx\b", text), "contracted, flushed or approximate arithmetic"
