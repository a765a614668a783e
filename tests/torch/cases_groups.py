"""What each rank does in test_torch_groups.py."""

from __future__ import annotations

import os
import threading
import time
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from common import expect_error, world
from torch.distributed.distributed_c10d import _get_default_store

import herring
from herring._context import process


def several_groups() -> None:
    """Overlapping groups with operations in flight in all of them at once, in another order on each rank."""
    with world() as (rank, size):
        members = [list(range(size)), [0, 1], [1, 2], [2, 0], [2]]
        groups = [dist.new_group(ranks) for ranks in members]
        mine = [k for k, ranks in enumerate(members) if rank in ranks]
        if rank % 2:
            mine.reverse()
        tensors = {k: [torch.full((3,), 10.0 * k + rank) for _ in range(4)] for k in mine}
        works = [dist.all_reduce(each, group=groups[k], async_op=True) for k in mine for each in tensors[k]]
        for work in works:
            work.wait()
        for k in mine:
            want = sum(10.0 * k + r for r in members[k])
            assert all(each.tolist() == [want] * 3 for each in tensors[k]), (k, tensors[k])
        source = torch.full((2,), float(rank))
        if rank in members[2]:
            dist.broadcast(source, src=2, group=groups[2])
            assert source.tolist() == [2.0, 2.0], "roots are global ranks"
        for k in mine[:2]:
            dist.destroy_process_group(groups[k])
        dist.barrier()
        assert groups[mine[-1]]._get_backend(torch.device("cpu")).name() == "herring"


def again_and_again(times: str, folder: str) -> None:
    """init/destroy many times: same results, and no thread, file or mapping stays behind."""
    counts = []
    for number in range(int(times)):
        with world(**_store_file(folder, number)) as (rank, size):
            value = torch.full((100,), float(rank + number))
            dist.all_reduce(value)
            assert value[0] == sum(range(size)) + number * size
            group = dist.new_group()
            work = dist.all_reduce(value, group=group, async_op=True)
            work.wait()
        assert process.session() is None, "the runtime outlives the last group"
        counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), _herring_mappings()))
    print(counts)
    # The first rounds warm up (lazily opened files, pools that keep a thread for a second).
    assert counts[-1][0] <= counts[4][0] + 1, f"open files grow: {counts}"
    assert counts[-1][1] <= counts[4][1] + 2, f"threads grow: {counts}"
    assert counts[-1][2] <= counts[4][2] + 1, f"shared memory grows: {counts}"


def _store_file(folder: str, number: int) -> dict[str, Any]:
    """A store of its own for each init: with env:// a fast rank may still find the store that a slow one is closing."""
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    return {"init_method": f"file://{folder}/store-{number}", **place}


def _herring_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("memfd" in line for line in maps)


def disagreement() -> None:
    """Ranks that call different things each get an error naming the ranks and what they said, soon."""
    with world() as (rank, size):
        begun = time.monotonic()
        with expect_error(RuntimeError, "rank 0", f"rank {size - 1}", "float32[3]", "float32[4]") as error:
            dist.all_reduce(torch.ones(4 if rank == size - 1 else 3))
        assert "mismatch" in error.text
        with expect_error(RuntimeError, "float32", "int64"):
            dist.all_reduce(torch.ones(3, dtype=torch.int64 if rank == 0 else torch.float32))
        with expect_error(RuntimeError, "sum", "max"):
            dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM)
        with expect_error(RuntimeError, "all_reduce", "broadcast"):
            if rank == 0:
                dist.broadcast(torch.ones(3), src=0)
            else:
                dist.all_reduce(torch.ones(3))
        failed = dist.all_reduce(torch.ones(2 + rank), async_op=True)
        with expect_error(RuntimeError, "mismatch"):
            failed.get_future().wait()
        with expect_error(RuntimeError, "mismatch"):
            failed.wait()
        assert not failed.is_success()
        assert isinstance(failed.exception(), Exception)
        assert time.monotonic() - begun < 30, "errors took too long"
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == size, "the group works on after errors"


def absent_rank() -> None:
    """A rank that does not call: the others' operation times out and names it."""
    with world() as (rank, size):
        impatient = dist.new_group(timeout=timedelta(seconds=2))
        store = _get_default_store()
        if rank == size - 1:
            store.wait([f"gave up {other}" for other in range(size - 1)], timedelta(seconds=40))
        else:
            begun = time.monotonic()
            with expect_error(dist.DistBackendError, "timeout", f"rank {size - 1}"):
                dist.all_reduce(torch.ones(3), group=impatient)
            assert 1.5 < time.monotonic() - begun < 20
            store.set(f"gave up {rank}", "")
        # wait(timeout) gives up alone; the operation goes on.
        work = None
        if rank != 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with expect_error(RuntimeError, "not done after waiting 50 ms"):
                work.wait(timedelta(milliseconds=50))
            store.add("waited", 1)
        else:
            while store.add("waited", 0) < size - 1:
                time.sleep(0.01)
            work = dist.all_reduce(torch.ones(3), async_op=True)
        assert work.wait()


def absent_member() -> None:
    """A member that does not create a group: the others know within the group's time-out who it is."""
    with world() as (rank, size):
        store = _get_default_store()
        if rank == size - 1:
            store.wait([f"gave up {other}" for other in range(size - 1)], timedelta(seconds=40))
            return
        begun = time.monotonic()
        with expect_error(herring.HerringTimeoutError, f"group rank {size - 1} to create it", "3 s"):
            dist.new_group(timeout=timedelta(seconds=3))
        assert 2.5 < time.monotonic() - begun < 10, "a group with a time-out of 3 s"
        store.set(f"gave up {rank}", "")


def aborted_sub_group() -> None:
    """Rank 1 gives a group of two up: rank 0, which waits in it, hears who and why; the default group goes on."""
    with world() as (rank, size):
        pair = dist.new_group([0, 1])
        value = torch.ones(3)
        dist.all_reduce(value)
        if rank == 0:
            started = time.monotonic()
            with expect_error(RuntimeError, "rank 1 aborted the group"):
                dist.all_reduce(torch.ones(2), group=pair)
            assert time.monotonic() - started < 10
            with expect_error(RuntimeError, "rank 1 aborted the group"):
                dist.broadcast(torch.ones(2), 0, group=pair)
        elif rank == 1:
            time.sleep(0.2)
            dist.distributed_c10d._abort_process_group(pair)
        value = torch.ones(3)
        dist.all_reduce(value)
        assert value.tolist() == [size] * 3


def destroyed_while_pending() -> None:
    """Rank 1 has ended all it will do: rank 0, with a call that rank 1 never joins, need not wait to see that."""
    dist.init_process_group("herring", timeout=timedelta(seconds=60))
    value = torch.ones(1000)
    dist.all_reduce(value)
    work = dist.all_reduce(value, async_op=True) if dist.get_rank() == 0 else None
    started = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - started < 2, time.monotonic() - started
    if work is not None:
        with expect_error(RuntimeError, "worker 1", "has left the group"):
            work.wait()


def overlapping_memory() -> None:
    """Pending calls on one memory: what gloo gives, in call order."""
    with world() as (rank, size):
        t = torch.full((5,), rank + 1.0)
        total = size * (size + 1) / 2
        dist.all_reduce_coalesced([t, t])
        assert t.tolist() == [total] * 5, t
        t = torch.full((10,), rank + 1.0)
        dist.all_reduce_coalesced([t[:6], t[4:], torch.ones(3)])
        assert t.tolist() == [total] * 10, t
        for count in (5, 300_000):
            t = torch.ones(count)
            works = [dist.all_reduce(t, async_op=True) for _ in range(3)]
            copies = [torch.empty(count) for _ in range(size)]
            works.append(dist.all_gather(copies, t, async_op=True))
            works.append(dist.broadcast(t[: count // 2], 0, async_op=True))
            for work in works:
                work.wait()
            assert t.unique().tolist() == [float(size**3)], t
            assert all(each.unique().tolist() == [float(size**3)] for each in copies)
            # In place.
            block = torch.full((size * count,), float(rank))
            dist.all_to_all_single(block, block)
            assert block.view(size, count)[:, -1].tolist() == [float(other) for other in range(size)], block
            parts = list(torch.full((size * count,), float(rank)).chunk(size))
            dist.all_to_all(parts, parts)
            assert [part[0].item() for part in parts] == [float(other) for other in range(size)]
        received = torch.zeros(300_000)
        if rank == 0:
            first = dist.irecv(received, 1, tag=1)
            with expect_error(dist.DistBackendError, "memory is in use", "wait for that one first"):
                dist.irecv(received, 1, tag=2).wait()
            dist.barrier()
            first.wait()
            assert received[-1] == 1
        else:
            dist.barrier()
            if rank == 1:
                dist.send(received + 1, 0, tag=1)


def sub_group_of_gloo() -> None:
    """Only a sub-group uses Herring: its members are the job; a group that leaves it is refused on every member."""
    with world("gloo") as (rank, _size):
        inner = dist.new_group([1, 2], backend="herring")
        if rank in (1, 2):
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=inner)
            assert value.item() == 3.0
            assert herring.size() == 2
        narrower = dist.new_group([2], backend="herring")
        if rank == 2:
            dist.all_reduce(value, group=narrower)
        if rank in (0, 1):
            with expect_error(herring.InvalidArgumentError, "widest group first"):
                dist.new_group([0, 1], backend="herring")
        else:
            dist.new_group([0, 1], backend="herring")


def beside_the_numpy_api(folder: str) -> None:
    """herring.init() before init_process_group: one runtime, which stays when the groups go."""
    herring.init()
    for number in range(2):
        with world(**_store_file(folder, number)) as (rank, size):
            value = torch.tensor([float(rank)])
            dist.all_reduce(value)
            assert value.item() == sum(range(size)) == herring.allreduce(torch.tensor([float(rank)]), op="sum").item()
    assert herring.is_initialized()
    herring.shutdown()
    with world(**_store_file(folder, 2)) as (rank, size):
        assert herring.rank() == rank
        assert herring.size() == size
    assert not herring.is_initialized()


def no_goodbye() -> None:
    """A script that ends without destroy_process_group, with a callback that needs the interpreter."""
    warnings.simplefilter("ignore")
    dist.init_process_group("herring")
    dist.all_reduce(torch.ones(10), async_op=True).get_future().then(lambda done: done.value())
    print("ended")


def forked_child() -> None:
    with world() as (rank, size):
        child = os.fork()
        if child == 0:
            try:
                with expect_error(RuntimeError, "forked", str(os.getpid())):
                    dist.all_reduce(torch.ones(1))
                os._exit(0)
            except BaseException as error:
                print(error, flush=True)
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == size, rank


def dies(victim: str) -> None:
    """One process disappears: the others' operation fails and names it; their exit is theirs to choose."""
    dist.init_process_group("herring", timeout=timedelta(seconds=60))
    dist.barrier()
    if dist.get_rank() == int(victim):
        os._exit(17)
    begun = time.monotonic()
    with expect_error(dist.DistBackendError, f"worker {victim}"):
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
    assert time.monotonic() - begun < 20
    os._exit(3)


def from_many_threads() -> None:
    """A group for each thread, used at the same time."""
    with world() as (rank, size):
        groups = [dist.new_group() for _ in range(4)]
        wrong: list[object] = []

        def loop(k: int) -> None:
            for step in range(25):
                value = torch.full((1 + 999 * k,), float(rank + k + step))
                dist.all_reduce(value, group=groups[k])
                if value[0] != sum(range(size)) + size * (k + step):
                    wrong.append((k, step, value[0]))

        threads = [threading.Thread(target=loop, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong, wrong


def over_a_file(file: str, leaves: str) -> None:
    """The default group over a file:// store; rank 0 comes late, so that the others read what is there before."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        time.sleep(1)
    dist.init_process_group("herring", init_method=f"file://{file}", rank=rank, world_size=size)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    assert value.item() == sum(range(size))
    part = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(value, group=part)
        assert value.item() == 2 * sum(range(size))
    dist.barrier()
    if leaves == "leaves":
        os._exit(0)  # As a crash would: nobody removes the file.
    dist.destroy_process_group()
