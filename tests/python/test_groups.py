"""Groups of some of the job's ranks: who is in them, where they are, and what others are told."""

import numpy as np
import pytest

import herring
from herring._context import process

FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo"}
WAYS = pytest.mark.parametrize("env", [{}, FABRIC], ids=["shared_memory", "fabric"])


@WAYS
def test_operations_of_a_group_concern_its_ranks_alone(job, env):
    job.run(in_groups, 3, env=env)


def in_groups():
    herring.init()
    rank = herring.rank()
    last, first = herring.new_group([2, 1]), herring.new_group(iter([0, 1]))
    assert (last.ranks, last.size, last.rank) == ((2, 1), 2, [None, 1, 0][rank])
    for group in (last, first):
        if group.rank is None:
            continue
        mine = np.full((2, 3), rank, np.float32)
        total = sum(group.ranks)
        assert (herring.allreduce(mine, "sum", group=group) == total).all()
        assert (herring.allreduce(mine, "sum", group=group, name="a", async_op=True).wait() == total).all()
        assert (herring.allreduce_(mine.copy(), "max", group=group) == max(group.ranks)).all()
        assert (herring.broadcast(mine, group.ranks[1], group=group) == group.ranks[1]).all()
        assert (herring.broadcast_(mine.copy(), group.ranks[0], group=group) == group.ranks[0]).all()
        assert herring.allgather(mine, group=group)[:, 0].tolist() == [group.ranks[0]] * 2 + [group.ranks[1]] * 2
        assert herring.allgather(np.full(group.rank, rank), uneven=True, group=group).tolist() == [group.ranks[1]]
        rows = np.arange(2) + 10 * rank
        assert herring.alltoall(rows, group=group).tolist() == [group.rank + 10 * each for each in group.ranks]
        assert herring.reduce_scatter(np.arange(2), "sum", group=group).tolist() == [2 * group.rank]
        assert [each[0] for each in herring.grouped_allreduce([mine[0], mine[1]], "sum", group=group)[1:]] == [total]
        herring.barrier(group=group)
        handle = herring.barrier(group=group, async_op=True)
        assert handle.wait() is None
        assert handle.contributors() == list(group.ranks)
        group.close()
        group.close()
        with pytest.raises(herring.InvalidArgumentError, match="is closed"):
            herring.allreduce(mine, group=group)
    assert herring.allreduce(1.0, "sum") == 3.0


def test_split_orders_by_key_then_rank(job):
    assert job.run(split_the_job, 4) == [[2, 0], None, [2, 0], [3]]


def split_the_job():
    herring.init()
    rank = herring.rank()
    group = herring.split([7, None, 7, 9][rank], key=-rank)
    assert herring.split(0).ranks == (0, 1, 2, 3)
    if group is None:
        return None
    assert herring.allreduce(1, "sum", group=group) == group.size
    return list(group.ranks)


def test_closed_groups_leave_nothing_behind(job):
    job.run(open_and_close, 2)


def open_and_close():
    herring.init()
    uses = process.current().uses
    for step in range(20):
        with_all = herring.new_group([0, 1])
        herring.grouped_allreduce([np.ones(2), np.ones(3)], group=with_all)
        herring.alltoall(np.ones(2), group=with_all, name=f"step {step}")
        with_all.close()
    assert (len(uses.counts), len(uses.unnamed), len(uses.in_flight)) == (0, 0, 0)


def test_what_does_not_work_is_said(job):
    job.run(refusals, 2)


def refusals():
    herring.init()
    rank = herring.rank()
    for ranks, told in (([], "different ranks"), ([0, 0], "different ranks"), ([0, 2], "from 0 to 1"), ([0.5], "0.5")):
        with pytest.raises(herring.InvalidArgumentError, match=told):
            herring.new_group(ranks)
    with pytest.raises(herring.MismatchError, match=r"rank 0: \[0\], rank 1: \[1\]"):
        herring.new_group([rank])
    with pytest.raises(herring.MismatchError, match=r"rank 0: \[0, 1\], rank 1: \[1, 0\]"):
        herring.new_group([rank, 1 - rank])
    with pytest.raises(herring.InvalidArgumentError, match="color is -3"):
        herring.split(-3)
    for color, key in ((1 << 70, 0), (0, 1 << 70), (0, -(1 << 70))):
        with pytest.raises(herring.InvalidArgumentError, match="does not fit into 64 bits"):
            herring.split(color, key)
    with pytest.raises(herring.InvalidArgumentError, match="ranks is 1; it must be a list of ranks"):
        herring.new_group(1)
    # What the two tell each other must not look alike.
    with pytest.raises(herring.MismatchError, match="all_gather"):
        herring.split(0, -1) if rank else herring.new_group([0])
    only = herring.new_group([1])
    with pytest.raises(herring.InvalidArgumentError, match="a rank of the job that is in"):
        herring.broadcast(1.0, 0, group=only)
    with pytest.raises(herring.InvalidArgumentError, match="come from herring.new_group"):
        herring.allreduce(1.0, group=[0])
    if rank == 0:
        for call in (herring.allreduce, herring.alltoall, herring.reduce_scatter):
            with pytest.raises(herring.InvalidArgumentError, match=r"rank 0 is not in .*\[1\]"):
                call(np.ones(2), group=only)
    else:
        assert herring.allreduce(3.0, "sum", group=only) == 3.0
        assert herring.alltoall([5], group=only).tolist() == [5]
    herring.shutdown()
    herring.init(size=1, rank=0)
    with pytest.raises(herring.ShutdownError, match="make it again"):
        herring.barrier(group=only)
