"""Accelerate, the Hugging Face Trainer and Lightning train on backend herring what they train on gloo.

`make ecosystem` installs them (.ci/requirements-ecosystem.txt) and runs this folder; elsewhere it is skipped.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from ranks import clean_environment, run_children

HERE = Path(__file__).resolve().parent
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CI": "1"}


def _train(script: str, backend: str, launcher: list[str], folder: Path) -> list[tuple[str, str, float]]:
    """(backend, digest, sum) of the weights by rank."""
    env = clean_environment({**OFFLINE, "TMPDIR": str(folder)})
    # Backend herring is found by its entry point; a script started from elsewhere imports it from where this test does.
    output = run_children([([*launcher, str(HERE / script), backend, str(folder)], env)], 200)[0]
    found = re.findall(r"@@trained (\d) (\w+) (\w+) ([0-9.]+)", output)
    assert sorted(each[0] for each in found) == ["0", "1"], output[-4000:]
    return [(used, digest, float(total)) for _, used, digest, total in sorted(found)]


@pytest.mark.parametrize(
    ("package", "script"),
    [
        ("accelerate", "script_accelerate.py"),
        ("transformers", "script_trainer.py"),
        ("lightning", "script_lightning.py"),
    ],
)
def test_trains_as_on_gloo(package: str, script: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make ecosystem installs it)")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    herringrun = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable]
    ours = _train(script, "herring", torchrun, tmp_path)
    assert [each[0] for each in ours] == ["herring"] * 2
    assert ours[0][1] == ours[1][1], "the two processes have other weights"
    theirs = _train(script, "gloo", torchrun, tmp_path)
    assert ours[0][2] == pytest.approx(theirs[0][2], rel=1e-5)
    assert _train(script, "herring", herringrun, tmp_path) == ours
