"""The check behind the column "wrong": it passes what is right in every type, and misses nothing that is not."""

import numpy as np
import pytest

from herring.bench import _options
from herring.bench._contender import Plan, timed_loop
from herring.bench._pattern import BITWISE, DTYPES, OPS, Pattern

RANKS = 5
COUNT = 150_001  # over the pattern's period twice, and odd
NUMPY = {
    "sum": np.add,
    "average": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def inputs(dtype, op, salt):
    arrays = []
    for rank in range(RANKS):
        array = np.empty(COUNT, dtype)
        Pattern(dtype, op, rank, RANKS).fill(array, salt)
        arrays.append(array)
    return arrays


def reduced(dtype, op, salt):
    result = inputs(dtype, op, salt)
    total = result[0].copy()
    for each in result[1:]:
        total = NUMPY[op](total, each)
    if op == "average":
        total = (total.astype(np.float64) / RANKS).astype(dtype)
    return total


PAIRS = [(dtype, op) for dtype in DTYPES for op in OPS if not (op in BITWISE and dtype.startswith("float"))]


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_the_right_result_has_no_wrong_element(dtype, op):
    for salt in (0, 1, 12):
        assert Pattern(dtype, op, 2, RANKS).count_wrong(reduced(dtype, op, salt), salt) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_wrong_element_is_counted(dtype):
    result = reduced(dtype, "sum", 3)
    result[[0, 70_000, COUNT - 1]] += 1
    assert Pattern(dtype, "sum", 0, RANKS).count_wrong(result, 3) == 3


def test_not_a_number_is_wrong():
    result = reduced("float32", "average", 0)
    result[7] = np.nan
    assert Pattern("float32", "average", 0, RANKS).count_wrong(result, 0) == 1


@pytest.mark.parametrize("op", ["sum", "average", "min", "max"])
def test_a_result_of_another_iteration_or_no_reduction_at_all_is_wrong(op):
    pattern = Pattern("float32", op, 0, RANKS)
    assert pattern.count_wrong(reduced("float32", op, 4), 5) > 0
    assert pattern.count_wrong(inputs("float32", op, 4)[0], 4) > 0


@pytest.mark.parametrize("ranks", [1, 2, 7, 8, 14])
def test_sums_differ_by_place_and_iteration_whatever_the_number_of_ranks(ranks):
    pattern, ours = Pattern("float32", "sum", 0, ranks), np.zeros(COUNT, np.float32)
    each = np.empty(COUNT, np.float32)
    for rank in range(ranks):
        Pattern("float32", "sum", rank, ranks).fill(each, 3)
        ours += each
    assert pattern.count_wrong(ours, 3) == 0
    assert pattern.count_wrong(ours, 4) > COUNT // 4
    assert pattern.count_wrong(np.roll(ours, 1), 3) > COUNT // 4


def test_a_rank_left_out_is_wrong():
    arrays = inputs("float32", "sum", 0)
    assert Pattern("float32", "sum", 0, RANKS).count_wrong(sum(arrays[:-1]), 0) > COUNT // 2


def test_nobody_fills_or_checks_while_others_are_timed():
    """A rank that is done must wait for the others: on few cores, its next input would be on their time."""
    calls = []

    class Recorder(Pattern):
        def fill(self, array, salt):
            calls.append("fill")
            super().fill(array, salt)

        def count_wrong(self, array, salt):
            calls.append("check")
            return super().count_wrong(array, salt)

    array = np.empty(10, np.float32)
    barrier, operate = (lambda: calls.append("barrier")), (lambda: calls.append("operation"))
    turn = timed_loop(Recorder("float32", "sum", 0, 1), array, array, barrier, operate, Plan(2, 0))
    assert calls == ["fill", "barrier", "operation", "barrier"] * 2 + ["check"]
    assert (len(turn.seconds), turn.wrong) == (2, 0)
    calls.clear()
    turn = timed_loop(Recorder("float32", "sum", 0, 1), array, array, barrier, operate, Plan(5, 0, 3))
    assert calls == ["fill", "barrier", "operation", "barrier"] * 5 + ["check"], "no clock, else the same"
    assert (len(turn.seconds), turn.wrong) == (2, 0)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_short_arrays_have_the_same_pattern(count):
    whole, short = np.empty(1000, np.int32), np.empty(count, np.int32)
    Pattern("int32", "sum", 1, RANKS).fill(whole, 2)
    Pattern("int32", "sum", 1, RANKS, count).fill(short, 2)
    assert (whole[:count] == short).all()


def test_the_command_line_offers_what_can_be_checked():
    assert _options.DTYPES == DTYPES
    assert _options.OPS == OPS
