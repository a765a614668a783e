"""Scripts of examples/ and benchmarks/ that a user starts say what they are, also where a framework is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks")
    for path in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
FRAMEWORKS = ("torch", "tensorflow", "keras", "sklearn", "matplotlib", "mpi4py")


@pytest.fixture(scope="module")
def without_frameworks(tmp_path_factory) -> dict[str, str]:
    """An environment whose Python finds none of them."""
    folder = tmp_path_factory.mktemp("without")
    lines = ["import sys", *[f"sys.modules[{each!r}] = None" for each in FRAMEWORKS]]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_needs_no_framework(script, without_frameworks):
    done = subprocess.run(
        [sys.executable, script, "--help"],
        env=without_frameworks,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(("usage: ", "One worker of "))
