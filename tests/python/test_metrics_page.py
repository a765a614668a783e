"""docs/metrics.md names every counter that users see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
CODE = """
import numpy, herring
herring.init()
found = {"stats()": herring.stats(), "server_counters()": herring.server_counters()[0]}
found["stragglers()"] = herring.stragglers()[0]
if herring.rank() == 0:
    for call, keys in found.items():
        print("@ herring." + call, *keys)
herring.shutdown()
"""


def test_every_counter_has_its_row() -> None:
    """A counter without a row is one that nobody can read, and a row without a counter promises what is not there."""
    command = [sys.executable, "-m", "herring._launch", "-np", "2", "--servers", "1", sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    sections = re.split(r"(?m)^## ", PAGE.read_text())
    lines = [line for line in done.stdout.splitlines() if line.startswith("@ ")]
    assert len(lines) == 3, done.stdout
    for line in lines:
        _, call, *keys = line.split()
        (section,) = (each for each in sections if each.startswith(call + "\n"))
        rows = {name for row in re.findall(r"(?m)^\| (`.*?) \|", section) for name in re.findall(r"`(\w+)`", row)}
        assert set(keys) == rows, call
