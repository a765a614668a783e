"""Jobs of a real Slurm: how they start, what a process's death does to them, and that scancel leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.root

TRAIN = """
import os, sys, time, numpy, herring
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1
herring.init()
for step in range(steps):
    total = float(herring.allreduce(numpy.ones(100_000, numpy.float32), op="sum")[-1])
    if herring.rank() == 0 and step in (0, 9):
        print(f"step {step}", flush=True)
    time.sleep(0.05 if steps > 1 else 0)
where = os.uname().nodename
print(f"{herring.rank()} of {herring.size()} on {where}: {total}", flush=True)
herring.shutdown()
"""
ELASTIC = """
import time, numpy, herring, herring.elastic
herring.init()
state = herring.elastic.State(step=0)
state.sync()
while state.step < 200:
    total = float(herring.allreduce(numpy.ones(1000, numpy.float32), op="sum")[-1])
    if herring.rank() == 0 and state.step % 10 == 0:
        print(f"step {state.step} of {herring.size()}", flush=True)
    time.sleep(0.05)
    state.step += 1
    state.commit()
print("finished", flush=True)
herring.shutdown()
"""
TWO_NODES = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\n"
TWO_AND_TWO = """#!/bin/bash
#SBATCH --partition=gpu --nodes=2 --ntasks-per-node=2
#SBATCH hetjob
#SBATCH --partition=cpu --nodes=2 --ntasks-per-node=1
"""
FOUR = [f"{rank} of 4 on {node}: 4.0" for rank, node in enumerate(["w0", "w0", "w1", "w1"])]


@pytest.fixture(autouse=True)
def scripts(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "elastic.py").write_text(ELASTIC)


def results(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line[:1].isdigit())


def example(name: str) -> str:
    """The script in examples/, for this cluster's size."""
    text = (Path(__file__).parents[2] / "examples" / name).read_text()
    return text.replace("--nodes=4 --ntasks-per-node=8", "--nodes=2 --ntasks-per-node=2").replace("=4 ", "=2 ")


def kill(pids: list[int], count: int) -> None:
    """The first of so many."""
    assert len(pids) == count, pids
    os.kill(pids[0], signal.SIGKILL)


def test_bare_srun(submit):
    job = submit(TWO_NODES + "srun python train.py\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    assert results(job.output) == FOUR
    assert "rank 0 of 4 workers on 2 hosts (SLURM_PROCID and SLURM_NTASKS)" in job.output


def test_the_example_with_servers_of_its_own(submit, tmp_path):
    """As it stands in examples/, but for its partitions' sizes."""
    job = submit(example("slurm_srun.sbatch"))
    assert job.finish() == [("COMPLETED", "0:0")] * 2, job.output
    assert results(job.output) == FOUR
    assert "2 server processes" in job.output


def test_herringrun_takes_the_allocation(submit):
    job = submit(TWO_NODES + "herringrun python train.py\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    assert results(job.output) == FOUR
    assert "rank 0 of 4 workers on 2 hosts" in job.output
    assert "srun:" not in job.output  # Nothing was wrong.


def test_herringrun_example_puts_servers_on_the_other_component(submit):
    job = submit(example("slurm_herringrun.sbatch"))
    assert job.finish() == [("COMPLETED", "0:0")] * 2, job.output
    assert results(job.output) == FOUR
    assert "2 server processes" in job.output


def test_herringrun_from_salloc_outside_of_the_nodes(cluster, tmp_path):
    """stdin, variables and the exit status pass through srun; each rank finds itself as a task."""
    (tmp_path / "script.py").write_text(
        "import os, sys\nnames = 'SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS GREETING'.split()\n"
        "print(os.environ['RANK'], *(os.environ[name] for name in names), repr(sys.stdin.read()), flush=True)\n"
        "sys.exit(7 if os.environ['RANK'] == '3' else 0)\n"
    )
    command = ["salloc", "-Q", "-N2", "--ntasks-per-node=2", "herringrun", "-x", "GREETING=hello you"]
    done = subprocess.run(
        [*command, sys.executable, "script.py"],
        env=cluster.env,
        cwd=tmp_path,
        input="typed\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    typed = [repr("typed\n"), repr(""), repr(""), repr("")]
    expected = [f"{rank} {rank} {rank % 2} {rank // 2} 4 hello you {typed[rank]}" for rank in range(4)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


def test_a_large_output_comes_whole(submit):
    """Through srun's connections: all bytes, whatever they are."""
    code = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4000)"
    job = submit(TWO_NODES + f"herringrun -np 1 python -c '{code}' > bytes; echo rc $?\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    assert (job.folder / "bytes").read_bytes() == bytes(range(256)) * 4000, job.output


def test_hosts_of_the_allocation_by_name(submit):
    script = "#!/bin/bash\n#SBATCH --partition=gpu --nodes=2 --ntasks-per-node=2\n"
    job = submit(script + "herringrun -H w1:2 --server-hosts w0 python train.py; echo rc $?\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    assert results(job.output) == ["0 of 2 on w1: 2.0", "1 of 2 on w1: 2.0"]
    assert "1 server process" in job.output


def test_server_hosts_of_the_allocation_run_no_workers(submit):
    script = "#!/bin/bash\n#SBATCH --partition=gpu --nodes=2 --ntasks-per-node=2\n"
    job = submit(script + "herringrun --server-hosts w1 python train.py\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    assert results(job.output) == ["0 of 2 on w0: 2.0", "1 of 2 on w0: 2.0"]
    assert "1 server process" in job.output


def test_srun_of_herringrun_with_a_number_is_a_job_for_each_task(submit):
    job = submit(TWO_NODES + "srun herringrun -np 2 python train.py\n")
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    expected = [f"{rank} of 2 on {node}: 2.0" for rank in range(2) for node in ("w0", "w0", "w1", "w1")]
    assert results(job.output) == expected


@pytest.mark.parametrize("starts", ["herringrun", "srun"])
def test_a_killed_server_costs_no_step(submit, cluster, starts):
    line = "herringrun python train.py 100\n"
    if starts == "srun":
        line = (
            "export HERRING_SECRET=abc HERRING_SERVERS=2\n"
            "srun --het-group=1 --kill-on-bad-exit=0 herring server --rank auto &\n"
            "srun --het-group=0 --kill-on-bad-exit python train.py 100\nrc=$?; wait; exit $rc\n"
        )
    job = submit(TWO_AND_TWO + line)
    job.await_output("step 9")
    kill(cluster.find("s0", "server", "--rank"), 1)
    assert job.finish() == [("COMPLETED", "0:0")] * 2, job.output
    assert results(job.output) == FOUR


@pytest.mark.parametrize("starts", ["herringrun", "srun"])
def test_a_killed_worker_ends_the_job(submit, cluster, starts):
    job = submit(TWO_NODES + f"{starts} python train.py 100000\n")
    job.await_output("step 9")
    kill(cluster.find("w1", "train.py"), 2)
    assert job.finish() == [("FAILED", "137:0")], job.output
    job.await_nothing_left()


@pytest.mark.parametrize("starts", ["herringrun", "srun"])
def test_scancel_leaves_nothing(submit, cluster, starts):
    job = submit(TWO_NODES + f"{starts} python train.py 100000\n")
    job.await_output("step 9")
    assert cluster.left()
    cluster.user("scancel", job.number)
    job.await_nothing_left()
    assert job.finish()[0][0] == "CANCELLED"


def test_scancel_of_a_job_with_servers_leaves_nothing(submit, cluster):
    job = submit(TWO_AND_TWO + "herringrun python train.py 100000\n")
    job.await_output("step 9")
    cluster.user("scancel", job.number)
    job.await_nothing_left()


def test_a_killed_herringrun_leaves_nothing(submit, cluster):
    """Not even where it has no time to say anything: the agents miss it."""
    job = submit(TWO_NODES + "herringrun python train.py 100000\n")
    job.await_output("step 9")
    for pid in cluster.find("w0", "train.py"):
        if b"herringrun" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
    assert job.finish() == [("FAILED", "137:0")], job.output
    job.await_nothing_left()


def test_one_step_of_both_components_is_refused(submit):
    job = submit(TWO_AND_TWO + "export HERRING_SECRET=abc\nsrun python train.py : python train.py\n")
    assert job.finish()[0][0] == "FAILED", job.output
    assert "spans several components" in job.output


def test_elastic(submit, cluster):
    """A killed worker is started again on its node; the others go on meanwhile."""
    job = submit(TWO_NODES + "herringrun -np 2 --slots-per-host 1 --elastic --restart-workers 1 python elastic.py\n")
    job.await_output("step 10 of 2")
    kill(cluster.find("w1", "elastic.py"), 1)
    assert job.finish() == [("COMPLETED", "0:0")], job.output
    sizes = [line.split()[-1] for line in job.output.splitlines() if line.startswith("step ")]
    assert sizes[0] == sizes[-1] == "2", job.output
    assert job.output.count("finished") == 2


def test_what_is_refused(submit):
    job = submit(
        TWO_NODES + "srun herringrun python train.py; echo rc $?\n"
        "herringrun -np 5 python train.py; echo rc $?\nherringrun --servers 1 --server-hosts s0 python train.py\n"
    )
    job.finish()
    assert "start it once" in job.output
    assert "-np 5: the hosts have 4 slots (w0:2, w1:2)" in job.output
    assert "s0" in job.output
