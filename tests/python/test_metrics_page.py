"""docs/metrics.md names every counter that users see."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
CODE = """
import numpy, herring
herring.init(rank=0, size=1)
print("herring.stats()", *herring.stats())
print("herring.server_counters()", *{key for each in herring.server_counters() for key in each})
print("herring.stragglers()", *{key for each in herring.stragglers() for key in each})
"""


def test_every_counter_has_its_row() -> None:
    """A counter without a row is one that nobody can read."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    sections = re.split(r"(?m)^## ", PAGE.read_text())
    for line in done.stdout.splitlines():
        call, *keys = line.split()
        (section,) = (each for each in sections if each.startswith(call + "\n"))
        assert set(re.findall(r"`(\w+)`", section)) >= set(keys), call
        if call == "herring.stats()":
            assert keys, "stats() has counters"
