"""Arrays in memory of empty_like(): where they lie, and that they are reduced there by their names."""

import random

import numpy as np
import pytest

import herring

SHAPES = [(300, 1000) if index % 5 == 0 else (index % 4, index + 1) for index in range(25)]
FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}


def like(prefix):
    dtypes = ("float32", "float64", "int32")
    return {f"{prefix}.{index}": np.empty(shape, dtypes[index % 3]) for index, shape in enumerate(SHAPES)}


def reduce_all(arrays, ranks=None, **options):
    """In an order of this rank's own."""
    ranks = range(herring.size()) if ranks is None else ranks
    for index, array in enumerate(arrays.values()):
        array.fill(herring.rank() + 1 + index)
    order = random.sample(list(arrays), len(arrays))
    handles = [herring.allreduce_(arrays[name], "sum", name=name, async_op=True, **options) for name in order]
    for name, handle in zip(order, handles, strict=True):
        assert handle.wait() is arrays[name]
    for index, (name, array) in enumerate(arrays.items()):
        np.testing.assert_array_equal(array, sum(rank + 1 + index for rank in ranks), err_msg=name)


@pytest.mark.parametrize("env", [{}, FABRIC], ids=["shared_memory", "fabric"])
def test_they_are_reduced_where_they_lie(job, env):
    job.run(steps, 3, env=env)


def steps():
    herring.init()
    arrays = herring.empty_like(like("a"))
    assert {name: (array.shape, array.dtype) for name, array in arrays.items()} == {
        name: (array.shape, array.dtype) for name, array in like("a").items()
    }
    for _ in range(3):
        reduce_all(arrays)
    before = herring.stats()
    reduce_all(arrays)
    after = herring.stats()
    assert after["ops_completed"] - before["ops_completed"] < len(SHAPES)


def test_ranks_that_ask_meet_those_that_do_not(job):
    job.run(some_ask, 3)


def some_ask():
    herring.init()
    for asks in (0, 1):
        arrays = like(str(asks))
        if (herring.rank() == 0) == (asks == 0):
            arrays = herring.empty_like(arrays)
        for _ in range(4):
            reduce_all(arrays)


def test_in_a_group(job):
    job.run(group, 3)


def group():
    herring.init()
    pair = herring.new_group([0, 2])
    if pair.rank is not None:
        arrays = herring.empty_like(like("pair"), group=pair)
        for _ in range(4):
            reduce_all(arrays, ranks=[0, 2], group=pair)
    pair.close()


def test_a_use_may_follow_another_of_its_name(job):
    job.run(uses, 2)


def uses():
    herring.init()
    arrays = [herring.empty_like(like("a")) for _ in range(3)]
    for _ in range(4):
        for number, each in enumerate(arrays):
            for array in each.values():
                array.fill(number + herring.rank())
        handles = [
            herring.allreduce_(array, "sum", name=name, async_op=True)
            for each in arrays
            for name, array in each.items()
        ]
        for handle in handles:
            handle.wait()
        for number, each in enumerate(arrays):
            for name, array in each.items():
                np.testing.assert_array_equal(array, 2 * number + 1, err_msg=name)


def test_what_lies_between_parts_of_such_memory_stays(job):
    job.run(parts, 2)


def parts():
    """Parts that lie as a bucket would have them, under other names; what is between them is somebody else's."""
    herring.init()
    memory = herring.empty_like({"flat": np.empty(4096, "float32")})["flat"]
    first, second, between = memory[0:10], memory[16:26], memory[10:16]
    for step in range(6):
        first[:] = second[:] = herring.rank() + 1
        memory[26:32] = 2000 + herring.rank()
        between[:] = herring.rank() + 1 if step % 2 else 1000 + herring.rank()
        handles = [
            herring.allreduce_(first, "sum", name="first", async_op=True),
            herring.allreduce_(second, "sum", name="second", async_op=True),
        ]
        if step % 2:
            handles.append(herring.allreduce_(between, "max", name="between", async_op=True))
        for handle in handles:
            handle.wait(timeout=20)
        np.testing.assert_array_equal(first, 3)
        np.testing.assert_array_equal(second, 3)
        np.testing.assert_array_equal(between, 2 if step % 2 else 1000 + herring.rank())
        np.testing.assert_array_equal(memory[26:32], 2000 + herring.rank())


def test_alone_and_without_fusion(job):
    job.run(steps_alone, 1)
    job.run(steps_alone, 2, env={"HERRING_FUSION_BYTES": "0"})


def steps_alone():
    herring.init()
    arrays = herring.empty_like(like("a"))
    for _ in range(2):
        reduce_all(arrays)


def test_what_it_takes(job):
    job.run(arguments, 1)


class Negative:
    shape = (-3,)
    dtype = np.dtype("float32")


def arguments():
    import torch

    herring.init()
    taken = herring.empty_like(
        [("array", np.empty((2, 3), "float16")), ("tensor", torch.empty(4)), ("none", np.empty(0))]
    )
    assert taken["array"].dtype == np.float16
    assert isinstance(taken["tensor"], torch.Tensor)
    assert taken["none"].shape == (0,)
    assert herring.empty_like({}) == {}
    for bad, text in (
        ([("a", np.empty(1)), ("a", np.empty(1))], "'a' comes twice"),
        ({"a": 3.5}, "'a' is a float"),
        ({"a": np.empty(1, object)}, "Python objects"),
        ({7: np.empty(1)}, "name is 7"),
        ([(None, np.empty(1))], "a name is None"),
        ([1, 2], "pairs of a name and an array"),
        ({"a": Negative()}, r"'a' has the shape \(-3,\)"),
    ):
        with pytest.raises(herring.InvalidArgumentError, match=text):
            herring.empty_like(bad)
