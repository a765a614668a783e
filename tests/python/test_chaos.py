"""A few seeded rounds of benchmarks/chaos.py, and what its plans promise. `make chaos` runs hundreds."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from surroundings import clean_environment

import herring

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import chaos  # noqa: E402  (found in benchmarks/)
import chaos_plan  # noqa: E402  (found in benchmarks/)
from chaos_group import GroupJob, GroupRound  # noqa: E402
from chaos_round import Job, Round  # noqa: E402
from chaos_site import Site  # noqa: E402

SEED = 7
ROUNDS = 10


def test_struck_jobs_end_by_themselves_and_name_the_lost(tmp_path):
    """On emulated hosts as root; else on one host, where no link can be cut (the program says so)."""
    report = tmp_path / "chaos.json"
    size = ["--rounds", str(ROUNDS), "--jobs", "5", "--dead-after", "1.5"]
    command = [sys.executable, str(BENCHMARKS / "chaos.py"), "--seed", str(SEED), *size, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-3000:]
    summary = json.loads(report.read_text())
    assert summary["rounds"] == ROUNDS
    assert summary["detection_s"], "somebody was struck, and others noticed"


def test_a_seed_gives_the_same_round_again_and_another_seed_another():
    plans = [chaos_plan.make_plan(3, number, 6, (5.0, 2.0)) for number in range(200)]
    assert plans == [chaos_plan.make_plan(3, number, 6, (5.0, 2.0)) for number in range(200)]
    assert plans != [chaos_plan.make_plan(4, number, 6, (5.0, 2.0)) for number in range(200)]
    struck = {(strike.kind, strike.phase) for plan in plans for strike in plan.strikes}
    wanted = {(kind, phase) for kind in chaos_plan.LASTING for phase in chaos_plan.PHASES}
    assert wanted - {("half", "start"), ("half", "connect")} <= struck
    assert any(plan.twin for plan in plans)
    assert {plan.group_end.how for plan in plans if plan.group_end} == {"abort", "destroy"}
    assert {deed for plan in plans for deed in plan.deeds} == {"names", "late"}
    assert any(plan.strict for plan in plans)
    assert {plan.provider for plan in plans} == {"auto", "tcp"}
    assert any(len(plan.strikes) == 2 for plan in plans)


def plan_of(*strikes, **changes):
    values = {
        "name": "0/0",
        "workers": 2,
        "servers": 0,
        "hosts": (0, 0),
        "launcher": False,
        "intra_node": "auto",
        "dead_after_s": 1.0,
        "heartbeat_s": 0.2,
        "join_timeout_s": 20.0,
        "steps": 5,
        "sizes": (1000,),
        "strikes": strikes,
        "resume": False,
        "again": False,
    }
    return chaos_plan.Plan(**{**values, **changes})


WORKERS = {
    "hang": "import time; time.sleep(60)",
    "orphan": "import subprocess, sys; "
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)",
    "wrong sum": """print('@@chaos {"what": "wrong", "at": 0.0, "pid": 0, "step": 1}', flush=True)""",
}


@pytest.mark.parametrize("kind", list(WORKERS))
def test_the_judge_sees(monkeypatch, kind):
    """One that finds nothing would let every round pass."""
    monkeypatch.setattr(Job, "_worker_command", lambda self: [sys.executable, "-c", WORKERS[kind]])
    if kind == "hang":
        monkeypatch.setattr(Round, "_limit", lambda self: 0.0)
    problems = Round(plan_of(), Site(), 29500, 1.0).run().problems
    assert any(problem.startswith(kind + ":") for problem in problems), problems


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({}, "status"),
        ({"what": "group error", "text": "timed out", "seconds": 0.1}, "unnamed"),
        ({"what": "group error", "text": "rank 1 aborted the group", "seconds": 30.0}, "slow"),
    ],
)
def test_the_judge_sees_who_was_not_told_of_a_group(monkeypatch, said, problem):
    events = [{"what": "start"}, *([said] if said else []), {"what": "done"}]
    lines = [f"@@chaos {json.dumps({'at': 0.0, 'pid': 0, **event})}" for event in events]
    script = "\n".join(f"print({line!r})" for line in lines)
    monkeypatch.setattr(GroupJob, "_worker_command", lambda self: [sys.executable, "-c", script])
    end = chaos_plan.GroupEnd((0, 1), 1, "abort", 2)
    problems = GroupRound(plan_of(group_end=end), Site(), 29500, 1.0).run().problems
    assert [each.split(":")[0] for each in problems] == [problem], problems


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_preloaded_endpoints_are_strict(tmp_path):
    """A library that is not in force would let every round pass."""
    package = Path(herring.__file__).resolve().parent
    library = chaos.build_strict_library(package, tmp_path)
    assert library is not None
    code = "import herring; herring.init(); print(herring.description()); print(herring.allreduce(1.0, 'sum'))"
    env = {**clean_environment(), "LD_PRELOAD": str(library), "HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
    command = [sys.executable, "-m", "herring._launch", "-np", "2", "--", sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(", strict") == 2, done.stdout
    assert done.stdout.count("2.0") == 2, done.stdout
