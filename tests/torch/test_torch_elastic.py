"""Training on fewer ranks when one is lost, and training that torchrun's agent starts again."""

from __future__ import annotations

import sys
from pathlib import Path

from ranks import HERE, clean_environment, run_children


def test_ddp_averages_over_the_survivors() -> None:
    launch = [sys.executable, "-m", "herring._launch", "-np", "3", "--elastic"]
    command = [*launch, sys.executable, str(HERE / "script_elastic.py")]
    output = run_children([(command, clean_environment())], 90)[0]
    assert output.count("the right average in all steps") == 2, output


def test_torchruns_agent_starts_a_job_again(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    command = [*torchrun, "--nproc-per-node", "2", str(HERE / "script_restart.py")]
    output = run_children([(command, clean_environment({"TMPDIR": str(tmp_path)}))], 120)[0]
    assert output.count("in round 1: all is well") == 2, output
    assert "in round 0" not in output
