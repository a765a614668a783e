"""hvd.elastic.run: a process is killed, the others go on, another one comes in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import herring

SCRIPT = Path(__file__).with_name("script_elastic.py")


@pytest.mark.parametrize("mode", ["first", "reduce", "gather", "late"])
def test_training_shrinks_and_grows(mode, tmp_path):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HERRING_", "MASTER_"))}
    clean["PYTHONPATH"] = str(Path(herring.__file__).resolve().parents[1])
    options = ["-np", "3", "--elastic", "--restart-workers", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "herring._launch", *options, sys.executable, SCRIPT, tmp_path / "mark", mode],
        env=clean,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert done.stdout.count("the same on 3") == 3, report
