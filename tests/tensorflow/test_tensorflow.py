"""herring.tensorflow on several ranks. A launch runs many cases: importing TensorFlow takes seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from surroundings import clean_environment

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "tensorflow_digits.py"
RESNET = EXAMPLE.with_name("tensorflow_resnet.py")
# What starts each rank: a command before Python's (.ci/asan-tensorflow).
RANKS_BY = shlex.split(os.environ.get("TENSORFLOW_RANKS_BY", ""))
CASES = [
    "before_init",
    "every_dtype_and_operation",
    "every_shape",
    "packed_as_tensorflow_does",
    "strings_and_complex_numbers_are_refused",
    "in_a_function",
    "control_flow",
    "unused_results_are_reduced_all_the_same",
    "gradients_travel_while_others_are_computed",
    "gradients_of_reductions",
    "tape",
    "many_gradients",
    "keras_fit",
    "what_is_no_optimizer_is_refused",
    "custom_loop",
    "broadcasts",
    "large_results_are_written_where_they_are_read",
    "large_results_belong_to_who_has_them",
    "large_gradients",
    "a_large_result_after_an_error",
    "tensorflow_1_session",
    "mismatches_are_named_on_all_ranks",
    "compiled_by_xla",
    "many_steps_leave_nothing",
    "tf_config_is_known",
    "starting_again",
]


class Launch:
    """cases.py on several ranks: what they printed, and how they ended."""

    def __init__(
        self,
        folder: Path,
        size: int,
        *cases: str,
        servers: int = 0,
        program: str = "cases.py",
        settings: dict[str, str] | None = None,
    ) -> None:
        command = [sys.executable, "-m", "herring._launch", "-np", str(size), "--servers", str(servers)]
        self.program = program
        self._finish(folder, size, [(command, settings or {})], cases)

    def _finish(
        self, folder: Path, size: int, prefixes: list[tuple[list[str], dict[str, str]]], cases: Sequence[str]
    ) -> None:
        env = clean_environment() | {"HERRING_TIMEOUT_S": "60", "TF_CPP_MIN_LOG_LEVEL": "3"}
        started = [
            subprocess.Popen(
                [*prefix, *RANKS_BY, sys.executable, str(HERE / self.program), *cases], env=env | own, cwd=folder,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for prefix, own in prefixes
        ]  # fmt: skip
        try:
            self.output = "".join(each.communicate(timeout=240)[0] for each in started)
        finally:
            for each in started:
                each.kill()
                each.wait()
        self.size = size
        self.codes = [each.returncode for each in started]

    def check(self, case: str, ranks: int | None = None) -> None:
        told = set(re.findall(rf"<(\d+) {case} ok>", self.output))
        wanted = {str(rank) for rank in range(self.size if ranks is None else ranks)}
        assert told == wanted, self.output[-8000:]


class LaunchByHand(Launch):
    """No launcher ends the others when one ends."""

    def __init__(
        self, folder: Path, size: int, *cases: str, program: str = "cases.py", settings: dict[str, str] | None = None
    ) -> None:
        self.program = program
        with socket.create_server(("127.0.0.1", 0)) as probe:
            job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)} for rank in range(size)]
        self._finish(folder, size, [([], job | place | (settings or {})) for place in places], cases)


class LaunchByTfConfig(Launch):
    """As TensorFlow's launchers do, each in its own way: a chief and workers, and nothing else is said."""

    def __init__(self, folder: Path, size: int, *cases: str, program: str = "cases.py") -> None:
        self.program = program
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first = int(probe.getsockname()[1])
        addresses = [f"127.0.0.1:{first + rank}" for rank in range(size)]
        cluster = {"chief": addresses[:1], "worker": addresses[1:]}
        tasks = [{"type": "chief", "index": 0}, *({"type": "worker", "index": index} for index in range(size - 1))]
        said = [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]
        self._finish(folder, size, [([], each) for each in said], cases)


@pytest.fixture(scope="module", params=[(2, 0), (3, 1)], ids=["2-ranks", "3-ranks-1-server"])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    size, servers = request.param
    cases = [each for each in CASES if servers == 0 or each != "starting_again"]  # herringrun's servers serve one job.
    return Launch(tmp_path_factory.mktemp("tensorflow"), size, *cases, servers=servers)


@pytest.mark.parametrize("case", CASES)
def test_case(launch: Launch, case: str) -> None:
    launch.check(case, ranks=0 if case == "starting_again" and launch.size == 3 else None)


def test_all_of_it_ended_well(launch: Launch) -> None:
    assert launch.codes == [0], launch.output[-8000:]
    assert "Traceback" not in launch.output


def test_one_inter_op_thread_is_enough(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "one_thread")
    launch.check("one_thread")
    assert launch.codes == [0], launch.output[-8000:]


@pytest.mark.parametrize("arena", ["4MB", "12MB"])
def test_results_for_which_there_is_no_shared_memory(tmp_path: Path, arena: str) -> None:
    launch = LaunchByHand(tmp_path, 2, "full_arena", settings={"HERRING_ARENA_BYTES": arena})
    launch.check("full_arena")
    assert launch.codes == [0, 0], launch.output[-8000:]


def test_tf_config_alone_makes_a_job(tmp_path: Path) -> None:
    launch = LaunchByTfConfig(tmp_path, 3, "every_shape", "tf_config_is_known")
    launch.check("every_shape")
    launch.check("tf_config_is_known")
    assert launch.codes == [0, 0, 0], launch.output[-8000:]


def test_a_dead_rank_is_named_to_the_others_at_once(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 3, "dead_rank")
    launch.check("dead_rank", ranks=2)
    assert launch.codes == [0, 0, 9], launch.output[-8000:]


def test_a_lost_server_costs_no_step(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 2, "lost_server", servers=2)
    launch.check("lost_server")
    assert launch.codes == [0], launch.output[-8000:]
    assert "is lost" in launch.output


def test_a_job_of_one_process(tmp_path: Path) -> None:
    launch = Launch(tmp_path, 1, "every_shape", "tape", "keras_fit", "in_a_function")
    assert launch.codes == [0], launch.output[-8000:]


@pytest.mark.parametrize("options", [[], ["--fit"]], ids=["loop", "fit"])
def test_the_example_learns(tmp_path: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable, str(EXAMPLE), *options]
    done = subprocess.run(
        command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^accuracy ([\d.]+)$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    assert float(found[1]) > 0.9


@pytest.mark.skipif("TENSORFLOW_LONG" not in os.environ, reason="make test-tensorflow-long runs it: some minutes")
@pytest.mark.parametrize("options", [[], ["--fit"]], ids=["loop", "fit"])
def test_resnet_50_trains(tmp_path: Path, options: list[str]) -> None:
    """Small images and few of them: that the script runs to its end on two processes, with the same loss."""
    command = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable, str(RESNET)]
    small = ["--image-size", "32", "--batch-size", "2", "--steps", "2"]
    done = subprocess.run(
        [*command, *small, *options], env=clean_environment() | {"TF_CPP_MIN_LOG_LEVEL": "3"}, cwd=tmp_path,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    loss = re.search(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert loss, done.stdout + done.stderr
    assert 0 < float(loss[1]) < 100
    assert re.search(r"^[\d.]+ images/s on 2 processes$", done.stdout, re.MULTILINE), done.stdout
