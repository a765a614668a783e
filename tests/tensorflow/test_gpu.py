"""TensorFlow's tensors on a GPU that is a fake: copied by TensorFlow, and by Herring on TensorFlow's stream."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import build
from test_tensorflow import Launch, LaunchByHand

CASES = [
    "same_bits_as_on_the_cpu",
    "who_copies",
    "in_a_function",
    "small_ones_are_packed_on_the_gpu",
    "packed_by_herrings_kernel",
    "tape",
    "ranks_with_and_without_a_gpu",
    "the_other_functions",
    "horovods_functions",
    "submitted_in_one_place_and_waited_for_in_another",
    "strict_placement",
    "session_of_tensorflow_1",
    "disagreements_are_named",
    "a_wait_holds_up_no_kernels",
    "what_is_let_go_has_no_effect_later",
    "a_call_that_is_submitted_in_part",
    "a_step_leaves_nothing_on_the_gpu",
    "many_steps_keep_nothing",
]
BY_STREAM = {"HERRING_TENSORFLOW_STREAM": "on"}
PROGRAM = "cases_gpu.py"


@pytest.fixture(scope="module", autouse=True)
def fake() -> None:
    """Built before ranks with a time limit want it."""
    build()


@pytest.fixture(scope="module", params=["host", "stream"])
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    by_stream = request.param == "stream"
    size, servers = (3, 1) if by_stream else (2, 0)
    settings = BY_STREAM | {"HERRING_TEST_SEED": "7"} if by_stream else {}
    folder = tmp_path_factory.mktemp("gpu")
    return Launch(folder, size, *CASES, servers=servers, program=PROGRAM, settings=settings)


@pytest.mark.parametrize("case", CASES)
def test_case(launch: Launch, case: str) -> None:
    launch.check(case)


def test_all_of_it_ended_well(launch: Launch) -> None:
    assert launch.codes == [0], launch.output[-8000:]
    assert "Traceback" not in launch.output


@pytest.mark.parametrize("case", ["a_kernel_that_does_not_end", "more_copies_than_a_stuck_gpu_takes"])
def test_a_kernel_that_does_not_end(tmp_path: Path, case: str) -> None:
    settings = BY_STREAM | {"HERRING_TIMEOUT_S": "3"}
    launch = LaunchByHand(tmp_path, 2, case, program=PROGRAM, settings=settings)
    launch.check(case)


def test_starting_again(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 2, "starting_again", "in_a_function", program=PROGRAM, settings=BY_STREAM)
    launch.check("starting_again")
    launch.check("in_a_function")
    assert launch.codes == [0, 0], launch.output[-8000:]


def test_ranks_that_wait_for_each_other(tmp_path: Path) -> None:
    settings = BY_STREAM | {"HERRING_DEADLOCK_AFTER_S": "1"}
    launch = LaunchByHand(tmp_path, 2, "ranks_that_wait_for_each_other", program=PROGRAM, settings=settings)
    launch.check("ranks_that_wait_for_each_other")


def test_where_nothing_can_be_pinned(tmp_path: Path) -> None:
    """One warning, and the same results."""
    cases = ["same_bits_as_on_the_cpu", "in_a_function", "tape", "packed_by_herrings_kernel"]
    launch = LaunchByHand(tmp_path, 2, *cases, program=PROGRAM, settings=BY_STREAM | {"FAKE_GPU_PIN_BYTES": "0"})
    for case in cases:
        launch.check(case)
    assert launch.output.count("copies from and to GPUs are slower") == 2, "once on each rank"


def test_a_driver_that_is_too_old_for_kernels(tmp_path: Path) -> None:
    settings = BY_STREAM | {"FAKE_GPU_NO_KERNELS": "1"}
    launch = LaunchByHand(tmp_path, 2, "packed_by_herrings_kernel", "tape", program=PROGRAM, settings=settings)
    launch.check("packed_by_herrings_kernel")
    launch.check("tape")


def test_a_dead_rank(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 3, "a_dead_rank", program=PROGRAM, settings=BY_STREAM)
    launch.check("a_dead_rank", ranks=2)
    assert launch.codes == [0, 0, 9], launch.output[-8000:]


def test_a_gpu_that_fails(tmp_path: Path) -> None:
    launch = LaunchByHand(tmp_path, 2, "a_gpu_that_fails", program=PROGRAM, settings=BY_STREAM)
    launch.check("a_gpu_that_fails")


@pytest.mark.parametrize("setting", ["on", "auto"])
def test_a_stream_that_cannot_be_found(tmp_path: Path, setting: str) -> None:
    """Here because the GPU is not CUDA's."""
    cases = [] if setting == "on" else ["what_the_real_finder_says", "in_a_function"]
    settings = {"HERRING_TENSORFLOW_STREAM": setting}
    launch = LaunchByHand(tmp_path, 1, "real_finder", *cases, program=PROGRAM, settings=settings)
    assert f"HERRING_TENSORFLOW_STREAM={setting}: " in launch.output, launch.output
    assert "GPU:0 is not a CUDA device" in launch.output
    assert launch.codes == [1 if setting == "on" else 0], launch.output
    for case in cases:
        launch.check(case)


INIT_ASKS_FOR_NO_DEVICE = """
import herring.tensorflow as hvd
from tensorflow.python.eager import context

hvd.init()
assert context.context()._physical_devices is None, context.context()._physical_devices
"""


def test_init_leaves_the_choice_of_gpus_to_the_program() -> None:
    """CUDA_VISIBLE_DEVICES counts until TensorFlow asks for devices: scripts set it by the local rank, after init()."""
    setting = {"HERRING_TENSORFLOW_STREAM": "off"}
    command = [sys.executable, "-c", INIT_ASKS_FOR_NO_DEVICE]
    subprocess.run(command, env=os.environ | setting, check=True, timeout=100)
