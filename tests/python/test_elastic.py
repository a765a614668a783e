"""Elastic jobs: a worker that dies costs no step, new ones come in between steps, and servers come back."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import herring
import herring.elastic

STEPS = 24
# One value, one part, and many parts of many chunks.
SIZES = (1, 20_000, 1_500_000)


def launch(env, options, *arguments, settings=(), timeout=40):
    """`herringrun` with this file as the program."""
    extra = [f"--env={setting}" for setting in ("HERRING_INTERFACE=lo", "HERRING_DEAD_AFTER_S=1.5", *settings)]
    command = [sys.executable, "-m", "herring._launch", *options, *extra, sys.executable, str(Path(__file__).resolve())]
    return subprocess.run([*command, *arguments], env=env, capture_output=True, text=True, timeout=timeout, check=False)


def report(done):
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    ("options", "deaths", "settings"),
    [
        pytest.param(["-np", "3"], ["SIGKILL:1:6"], [], id="shared_memory"),
        pytest.param(["-np", "3"], ["SIGKILL:0:6", "SIGKILL:2:14"], [], id="worker_0_and_another"),
        pytest.param(["-np", "3"], ["SIGKILL:1:6"], ["HERRING_INTRA_NODE=off"], id="embedded_servers"),
        pytest.param(["-np", "3", "--servers", "1"], ["SIGKILL:2:6"], [], id="server_process"),
        pytest.param(["-np", "4", "--servers", "2"], ["SIGKILL:1:6", "SIGKILL:3:6"], [], id="two_at_once"),
        pytest.param(["-np", "3"], ["SIGSTOP:1:6"], [], id="stopped"),
    ],
)
def test_survivors_finish_the_step(clean_env, options, deaths, settings):
    done = launch(clean_env, ["--elastic", *options], "gradients", *deaths, settings=settings)
    assert done.returncode == 0, report(done)
    left = int(options[1]) - len(deaths)
    assert done.stdout.count(f"{STEPS} steps, at the end with {left}, all alike") == left, report(done)
    assert "the job goes on with" in done.stderr, report(done)


def test_with_too_few_left_the_job_ends_with_an_error(clean_env):
    done = launch(clean_env, ["--elastic", "-np", "2", "--min-workers", "2"], "gradients", "SIGKILL:1:3")
    assert done.returncode != 0, report(done)
    assert "at least 2 are needed" in done.stderr, report(done)
    assert "worker 1 " in done.stderr, report(done)


@pytest.mark.parametrize("options", [["-np", "3"], ["-np", "2", "--servers", "1"]], ids=["shared_memory", "server"])
def test_a_new_worker_comes_in_between_steps(clean_env, options, tmp_path):
    mark = tmp_path / "killed"
    done = launch(clean_env, ["--elastic", "--restart-workers", "1", *options], "grow", str(mark), options[1])
    assert done.returncode == 0, report(done)
    assert done.stdout.count(f"is whole again with {options[1]}") == int(options[1]), report(done)


def test_servers_come_back_while_training_goes_on(clean_env):
    options = ["-np", "2", "--servers", "2", "--restart-servers", "2"]
    done = launch(clean_env, options, "servers", "0", "1")
    assert done.returncode == 0, report(done)
    assert done.stdout.count("every sum right, with 2 servers again") == 2, report(done)


def test_a_start_with_fewer_workers_than_asked_for_is_said(clean_env, tmp_path):
    """It would train with a smaller batch than its user believes."""
    options = ["--elastic", "-np", "2"]
    done = launch(clean_env, options, "alone", str(tmp_path / "done"), settings=["HERRING_JOIN_TIMEOUT_S=2"])
    assert done.returncode == 0, report(done)
    assert "trained with 1" in done.stdout, report(done)
    (line,) = [line for line in done.stderr.splitlines() if "starting with 1 of 2 workers" in line]
    assert line.startswith("herring[rank 0] warning: "), report(done)


@pytest.mark.parametrize("late", ["0", "1", "none"])
def test_a_call_that_cannot_be_finished_fails_on_all_alike(clean_env, late):
    done = launch(clean_env, ["--elastic", "-np", "3"], "impossible", late)
    assert done.returncode == 0, report(done)
    told = [line for line in done.stdout.splitlines() if "and went on" in line]
    assert len(told) == 2, report(done)
    assert told[0] == told[1], report(done)
    assert "Error" in told[0], report(done)


def test_results_are_kept_within_a_bound(clean_env):
    done = launch(
        clean_env, ["--elastic", "-np", "2"], "gradients", "SIGKILL:1:20", settings=["HERRING_JOURNAL_BYTES=1MB"]
    )
    assert done.returncode == 0, report(done)


def test_by_hand_and_with_another_secret(clean_env):
    port = _free_port()
    env = {**clean_env, "HERRING_RENDEZVOUS": f"127.0.0.1:{port}", "HERRING_SECRET": "right"}
    workers = {**env, "HERRING_ELASTIC": "on"}
    herring_cli = [sys.executable, "-m", "herring._cli"]
    processes = [
        subprocess.Popen([*herring_cli, "rendezvous", "--workers", "2"], env=env),
        *(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "gradients"],
                env={**workers, "RANK": str(rank), "WORLD_SIZE": "2"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ),
    ]
    try:
        stranger = subprocess.run(
            [sys.executable, str(Path(__file__).resolve()), "gradients"],
            env={**workers, "HERRING_SECRET": "wrong", "RANK": "0", "WORLD_SIZE": "2"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert stranger.returncode != 0
        assert "the secret differs" in stranger.stderr
        outputs = [process.communicate(timeout=60)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        assert all("all alike" in output for output in outputs[1:])
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_without_a_rendezvous_elastic_is_an_error(bare_environment):
    with pytest.raises(herring.InvalidArgumentError, match="herringrun --elastic"):
        herring.init(elastic=True)


def test_elsewhere_a_step_is_nothing(single):
    assert herring.elastic.step() is False
    assert not herring.elastic.is_elastic()
    with pytest.raises(herring.InvalidArgumentError, match="not elastic"):
        herring.elastic.waiting()


def _free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# --- What the processes run ------------------------------------------------------------------------------------------


def say(text):
    os.write(1, f"{text}\n".encode())


def gradients(*deaths):
    """Each rank brings a power of ten, so that a sum names who contributed; all survivors must have got the same."""
    changes = []
    herring.on_membership_change(changes.append)
    herring.init()
    name = herring.rank()
    mine = {int(step): kind for kind, rank, step in (death.split(":") for death in deaths) if int(rank) == name}
    for step in range(STEPS):
        arrays = [np.full(size, 10.0**name) for size in SIZES]
        order = range(len(SIZES)) if name % 2 else range(len(SIZES) - 1, -1, -1)
        handles = {}
        for i in order:
            handles[i] = herring.allreduce_(arrays[i], "sum", name=f"gradient {i}", async_op=True)
            if step in mine and len(handles) == 2:
                os.kill(os.getpid(), getattr(signal, mine[step]))
        sums = [handles[i].wait() for i in range(len(SIZES))]
        for values in sums:
            assert (values == values[0]).all(), "one operation has two sets of contributors"
            digits = f"{int(values[0]):d}"
            assert set(digits) <= {"0", "1"}, f"{digits}: somebody counts twice"
            assert digits[len(digits) - 1 - name] == "1", f"{digits}: rank {name}'s own is missing"
        means = np.array([values[0] for values in sums])
        assert np.array_equal(herring.broadcast(means, 0), means), f"step {step}: ranks differ"
        assert herring.allreduce(np.ones(3), "average")[0] == 1.0
    if changes:
        assert changes[-1].size == herring.size()
        assert changes[-1].lost
    assert herring.allgather(np.array([herring.rank()])).tolist() == list(range(herring.size()))
    say(f"rank {name}: {STEPS} steps, at the end with {herring.size()}, all alike")
    herring.shutdown()


def alone(mark):
    """Rank 1 never joins."""
    if os.environ["RANK"] == "1":
        deadline = time.monotonic() + 30
        while not Path(mark).exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return
    herring.init()
    say(f"trained with {herring.size()}")
    herring.shutdown()
    Path(mark).touch()


def grow(mark, size):
    herring.init()
    state = herring.elastic.State(step=0, weights=np.zeros(1000))
    state.sync()
    whole_steps = 0
    deadline = time.monotonic() + 60
    while True:
        if herring.rank() == 1 and state.step == 5 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        state.weights = state.weights + herring.allreduce(np.ones(1000), name="gradient")
        state.step += 1
        assert (state.weights == state.step).all()
        assert time.monotonic() < deadline, "the new worker never came"
        whole_steps += int(Path(mark).exists() and herring.size() == int(size))
        if herring.allreduce(np.array([whole_steps]), "min")[0] >= 5:
            break
        state.commit()  # Last: who comes in begins where the others go on.
    say(f"rank {herring.rank()} is whole again with {herring.size()}")
    herring.shutdown()


def server_pids():
    """The servers that this process's launcher has started, by rank."""
    pids = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # It has ended meanwhile.
        if parent == os.getppid() and b"server" in words and b"--rank" in words:
            pids[int(words[words.index(b"--rank") + 1])] = int(status.parent.name)
    return pids


def servers(*victims):
    """Kills one server after the other, the next when the one before is back; sums without a pause.

    What any rank had called before it was back still goes through the servers that there were then: that is over two
    steps after the one in which rank 0 saw it.
    """
    herring.init()
    rank, size = herring.rank(), herring.size()
    total = sum(10.0**other for other in range(size))
    left = list(victims)
    generation = herring._context.process.current().job.runtime.generation
    deadline = time.monotonic() + 60
    done, step, steps_since = 0, 0, 0
    while done < 5:
        handles = [
            herring.allreduce_(np.full(size, 10.0**rank), "sum", name=f"g{i}" if i % 2 else None, async_op=True)
            for i, size in enumerate((1, 1000, 70_001, 300_000))
        ]
        now = herring._context.process.current().job.runtime.generation
        steps_since += int(now > generation)
        if rank == 0 and left and (step == 3 or steps_since > 2):
            generation, steps_since = now, 0
            os.kill(server_pids()[int(left.pop(0))], signal.SIGKILL)
        for handle in handles:
            assert (handle.wait() == total).all()
        step += 1
        assert time.monotonic() < deadline, "the servers never came back"
        is_whole = rank != 0 or (not left and now > generation)
        done += int(herring.allreduce(np.array([int(is_whole)]), "min")[0])
    assert len(herring.server_counters()) == 2
    say(f"rank {rank}: every sum right, with 2 servers again")
    herring.shutdown()


def impossible(late):
    """A broadcast whose root is lost, and an allgather with a block of it; rank `late` calls them after the loss."""
    herring.init()
    if herring.rank() == 2:
        herring.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    herring.barrier()
    while str(herring.rank()) == late and herring.size() > 2:
        time.sleep(0.01)
    errors = []
    for call in (lambda: herring.broadcast(np.ones(4), 2), lambda: herring.allgather(np.ones(4))):
        try:
            call()
        except (herring.PeerLostError, herring.InvalidArgumentError) as error:
            errors.append(type(error).__name__)
    while herring.size() > 2:
        herring.allreduce(np.ones(1))
    assert herring.allgather(np.array([herring.rank()])).tolist() == [0, 1]
    say(f"told {' '.join(errors) or 'nothing'}, and went on")
    herring.shutdown()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
