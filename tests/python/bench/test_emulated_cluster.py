"""The emulated cluster runs the bench as documented, and nothing of it outlives it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import herring

ROOT = Path(__file__).resolve().parents[3]
EMULATE = ROOT / "benchmarks" / "emulate_cluster.py"


def why_not():
    if os.geteuid() != 0:
        return "needs root"
    if not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        return "needs iproute2 and util-linux"
    if not EMULATE.exists():
        return "needs a checkout"
    done = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")]


def start(command, options, folder):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HERRING_", "MASTER_"))}
    env["PYTHONPATH"] = str(Path(herring.__file__).resolve().parents[1])
    env["PYTHONUNBUFFERED"] = ""  # Ranks share one pipe: unbuffered, print() tears a line into its arguments.
    return subprocess.Popen(
        [sys.executable, str(EMULATE), *options, "--timeout", "120", "--", *command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process, timeout=150):
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"not done after {timeout} s\n{process.communicate()[0]}", pytrace=False)


def processes_with(text):
    """Those whose command line has `text` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(int(entry.name))
    return found


def test_bench_learns_the_placement_and_the_rate(tmp_path):
    bench = [sys.executable, "-m", "herring._cli", "bench", "allreduce"]
    options = ["--workers", "2", "--servers", "1", "--rate", "1gbit"]
    process = start([*bench, "--sizes", "8,1MB", "--iters", "2", "--json", "out.json"], options, tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["links"] == {"worker_hosts": 2, "server_hosts": 1, "rate": 1e9, "burst_bytes": 256 << 10}
    if "cubic" in Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split():
        assert content["machine"]["congestion_control"] == "cubic", "runs would differ by what this machine has set"
    small, _, large, _ = content["rows"]
    assert small["bound_us"] is None, "the token bucket lets 8 bytes pass at once"
    assert large["bound_us"] == pytest.approx((1 << 20) * 8 / 1e9 * 1e6)
    assert all(row["wrong"] == 0 for row in content["rows"])


@pytest.mark.parametrize(("ranks", "lanes"), [(2, 1), (1, 2)], ids=["a rank for each link", "a lane for each link"])
def test_several_links_of_a_host_carry_the_same(tmp_path, ranks, lanes):
    bench = ["env", f"HERRING_LANES={lanes}", sys.executable, "-m", "herring._cli", "bench", "allreduce"]
    options = ["--workers", "2", "--ranks-per-host", str(ranks), "--links", "2", "--rate", "1gbit", "--verbose"]
    process = start(
        [*bench, "--buffers", "arena", "--sizes", "8MB", "--iters", "4", "--json", "out.json"], options, tmp_path
    )
    output = finish(process)
    assert process.returncode == 0, output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["links"]["rate"] == 2e9
    assert all(row["wrong"] == 0 for row in content["rows"])
    arrived = [float(megabytes) for megabytes in re.findall(r"worker\d \(eth\d\): ([\d.]+) MB arrived", output)]
    assert len(arrived) == 4, output
    assert min(arrived) > 25, output
    assert max(arrived) < 1.05 * min(arrived), output


def test_a_link_that_is_not_there_is_named(tmp_path):
    command = ["env", "HERRING_INTERFACE=eth0,eth7", sys.executable, "-c", "import herring; herring.init()"]
    process = start(command, ["--workers", "2", "--rate", "none"], tmp_path)
    output = finish(process)
    assert process.returncode != 0
    assert "eth7" in output, output
    assert "Check HERRING_INTERFACE" in output, output


def test_a_congestion_control_that_the_kernel_lacks_is_an_error(tmp_path):
    process = start(["true"], ["--workers", "1", "--congestion", "pigeon"], tmp_path)
    output = finish(process)
    assert process.returncode == 1
    assert "--congestion pigeon: this kernel has" in output


def test_each_host_may_have_cores_of_its_own(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    script = tmp_path / "where.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'is on', sorted(os.sched_getaffinity(0)))")
    ours = {option: set() for option in ("--own-cores", "")}
    for option, said in ours.items():
        options = ["--workers", "2", "--rate", "none", *filter(None, [option])]
        process = start([sys.executable, str(script)], options, tmp_path)
        output = finish(process)
        assert process.returncode == 0, output
        said.update(re.findall(r"rank (\d) is on (\[[\d, ]*\])", output))
    assert ours[""] == {("0", str(cores)), ("1", str(cores))}
    shares = [cores[number::2] or cores for number in range(2)]
    assert ours["--own-cores"] == {(str(number), str(share)) for number, share in enumerate(shares)}
    # As MPI's launchers start their ranks.
    agent = f'exec "{EMULATE.with_name("enter_host.sh")}" 10.77.0.2 {sys.executable} {script}'
    process = start(["sh", "-c", agent], ["--workers", "2", "--rate", "none", "--own-cores"], tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    assert output.count(f"is on {shares[1]}") == 2, output


def test_a_replay_is_held_against_the_bound(tmp_path):
    bench = [sys.executable, "-m", "herring._cli", "bench", "replay", "--model", "resnet50", "--scale", "0.05"]
    options = ["--workers", "2", "--servers", "2", "--rate", "1gbit"]
    process = start([*bench, "--backward-ms", "30", "--iters", "2", "--json", "out.json"], options, tmp_path)
    output = finish(process)
    assert process.returncode == 0, output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["links"]["worker_hosts"] == content["links"]["server_hosts"] == 2
    for row in content["rows"]:
        assert row["wrong"] == 0
        assert row["times_bound"] == pytest.approx(row["communication_ms"] / (row["gradient_bytes"] * 8 / 1e9 * 1e3))


def test_the_exit_code_of_a_rank_that_fails_comes_back(tmp_path):
    process = start(["sh", "-c", "exit $((RANK + 3))"], ["--workers", "1"], tmp_path)
    output = finish(process)
    assert process.returncode == 3, output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_it(tmp_path, number):
    mark = f"mark-{os.getpid()}-{number}"
    # A process in a session of its own, as daemons are, which nobody signals.
    script = f"setsid sleep 600.{os.getpid()}{int(number)} & echo {mark} started; sleep 600"
    process = start(["sh", "-c", script], ["--workers", "2"], tmp_path)
    for _ in range(2):
        assert "started" in process.stdout.readline()
    before = processes_with(f"600.{os.getpid()}{int(number)}")
    assert len(before) >= 2
    process.send_signal(number)
    finish(process)
    deadline = time.monotonic() + 20
    while (left := processes_with(f"600.{os.getpid()}{int(number)}")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
