"""Collectives on tensors of an accelerator, which accelerator.cc plays: run by several ranks."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from accelerator import DEVICE, IS_REAL, expect_freed, load
from common import data, expect_error, same_everywhere, world

import herring
from herring.torch.parallel import DistributedDataParallel, in_order


@contextlib.contextmanager
def job() -> Iterator[tuple[ctypes.CDLL, int, int]]:
    gpu = load()
    with world() as (rank, size):
        yield gpu, rank, size
    gpu.fake_run_all()
    fault = gpu.fake_fault().decode()
    assert not fault, f"what a real GPU would punish: {fault}"


def on_both(call: Callable[[list[torch.Tensor]], object], tensors: list[torch.Tensor], what: str) -> None:
    """`call` on CPU tensors and on copies of them on the accelerator: the same bits in all of them afterwards."""
    there = [tensor.to(DEVICE) for tensor in tensors]
    call(tensors)
    call(there)
    for mine, theirs in zip(tensors, there, strict=True):
        came = theirs.cpu()
        assert came.view(-1).view(torch.uint8).equal(mine.view(-1).view(torch.uint8)), (
            f"{what}: other bits than on the CPU"
        )


def collectives() -> None:
    with job() as (_, rank, size):
        for dtype in (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.uint8,
            torch.bool,
        ):
            x = data(rank, (3, 1001), dtype)
            on_both(lambda t: dist.all_reduce(t[0]), [x.clone()], f"all_reduce {dtype}")
            same_everywhere(x.clone().fill_(1), "the control itself")
            on_both(lambda t: dist.broadcast(t[0], 1), [x.clone()], f"broadcast {dtype}")
            on_both(lambda t: dist.reduce(t[0], 1), [x.clone()], f"reduce {dtype}")
            on_both(lambda t: dist.all_gather(t[1:], t[0]), [x.clone(), *(torch.zeros_like(x) for _ in range(size))],
                    f"all_gather {dtype}")  # fmt: skip
            on_both(lambda t: dist.all_gather_into_tensor(t[1], t[0]), [x.clone(), x.repeat(size, 1)],
                    f"all_gather_into_tensor {dtype}")  # fmt: skip
        x = data(rank, (4 * size, 5), torch.float32)
        on_both(
            lambda t: dist.reduce_scatter_tensor(t[1], t[0]), [x.clone(), torch.zeros(4, 5)], "reduce_scatter_tensor"
        )
        on_both(
            lambda t: dist.reduce_scatter(t[0], t[1:]), [torch.zeros(4, 5), *x.clone().chunk(size)], "reduce_scatter"
        )
        on_both(lambda t: dist.all_to_all_single(t[1], t[0]), [x.clone(), torch.zeros_like(x)], "all_to_all_single")
        on_both(lambda t: dist.all_reduce(t[0], op=dist.ReduceOp.MAX), [x.clone()], "max")
        on_both(lambda t: dist.gather(t[0], t[1:] if rank == 0 else None, dst=0),
                [x.clone(), *(torch.zeros_like(x) for _ in range(size))], "gather")  # fmt: skip
        on_both(lambda t: dist.scatter(t[0], t[1:] if rank == 1 else None, src=1),
                [torch.zeros_like(x), *(data(rank + i, (4 * size, 5), torch.float32) for i in range(size))],
                "scatter")  # fmt: skip
        on_both(
            lambda t: dist.send(t[0], 1 - rank) if rank == 0 else dist.recv(t[0], 1 - rank), [x.clone()], "messages"
        )
        columns = data(rank, (6, 10), torch.float32).to(DEVICE)[:, ::2]
        wanted = data(rank, (6, 10), torch.float32)[:, ::2].clone()
        dist.all_reduce(columns)
        dist.all_reduce(wanted)
        assert columns.cpu().equal(wanted), "not contiguous"
        empty = torch.empty(0, 3).to(DEVICE)
        dist.all_reduce(empty)
        dist.barrier()


def _late(gpu: ctypes.CDLL, tensor: torch.Tensor, value: int) -> None:
    gpu.fake_fill_later(tensor.data_ptr(), tensor.nbytes, value)


def streams() -> None:
    with job() as (gpu, rank, _size):
        gpu.fake_set_stream(gpu.fake_new_stream())
        # What a late kernel writes is what is summed, and a copy on the caller's stream after wait() sees the sum.
        for step in range(20):
            gradient = torch.zeros(50_000, dtype=torch.uint8).to(DEVICE)
            _late(gpu, gradient, rank + 1 + step)
            work = dist.all_reduce(gradient, async_op=True)
            work.wait()
            assert gradient.cpu().unique().tolist() == [3 + 2 * step]
        # Several at once, each waited for out of order.
        many = [torch.zeros(30_000, dtype=torch.uint8).to(DEVICE) for _ in range(5)]
        for index, tensor in enumerate(many):
            _late(gpu, tensor, 10 * index + rank)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
        for index in (4, 0, 2, 1, 3):
            works[index].wait()
            assert many[index].cpu().unique().tolist() == [20 * index + 1]
        # A callback runs where the copy back is: what it computes from the result is right.
        gradient = torch.zeros(50_000, dtype=torch.uint8).to(DEVICE)
        _late(gpu, gradient, rank + 1)
        seen = dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()
        assert seen.cpu().unique().tolist() == [4]


def order_with_cpu_tensors() -> None:
    """Ranks whose GPUs are not equally late still call a group's operations in one order."""
    with job() as (gpu, rank, _size):
        there = torch.zeros(100_000, dtype=torch.uint8).to(DEVICE)
        if rank == 0:
            _late(gpu, there, 1)
        work = dist.all_reduce(there, async_op=True)
        here = torch.full((5,), float(rank))
        dist.broadcast(here, 1)
        assert here.tolist() == [1.0] * 5
        work.wait()
        assert there.cpu().unique().tolist() == [1]


def lifetime() -> None:
    """Tensors that are dropped while they are copied stay where they are until that is done."""
    with job() as (gpu, _rank, _size):
        before = gpu.fake_allocated()
        for _ in range(10):
            dist.all_reduce(torch.ones(40_000).to(DEVICE), async_op=True)
        dist.barrier()
        for _ in range(10):
            dist.all_reduce(torch.ones(40_000).to(DEVICE), async_op=True).get_future()
        last = torch.ones(3).to(DEVICE)
        dist.all_reduce(last)
        assert last.cpu().tolist() == [2.0] * 3
        dist.barrier()
        expect_freed(gpu, before + 2 * 4096)


def refusals() -> None:
    with job() as (gpu, _rank, _size):
        x = torch.ones(4).to(DEVICE)
        with expect_error(ValueError, "all tensors of a call must be on one device", "cpu"):
            dist.all_gather([torch.ones(4), torch.ones(4)], x)
        gpu.fake_capture(1)
        with expect_error(RuntimeError, "herring:all_reduce", "being captured into a graph", "outside of the capture"):
            dist.all_reduce(x)
        gpu.fake_capture(0)
        # What only the operation itself checks comes with wait().
        work = dist.all_gather_into_tensor(torch.ones(5).to(DEVICE), x, async_op=True)
        with expect_error(ValueError, "the output must hold 2 times the input"):
            work.wait()
        assert work.is_completed()
        dist.all_reduce(x)
        assert x.cpu().tolist() == [2.0] * 4, "the group goes on"


def switched_off() -> None:
    with job() as (_gpu, _rank, size):
        x = torch.ones(4).to(DEVICE)
        for _ in range(2):
            with expect_error(NotImplementedError, "herring:all_reduce", "HERRING_CUDA=off", "tensor.cpu()"):
                dist.all_reduce(x)
        there = torch.ones(4)
        dist.all_reduce(there)
        assert there.tolist() == [float(size)] * 4


def wanted_and_not_there() -> None:
    with (
        expect_error(herring.UnavailableError, "HERRING_CUDA=on, but no GPU can be used here: ", "libcuda.so.1"),
        world(),
    ):
        pass


def a_kernel_that_never_ends() -> None:
    gpu = load()
    with world(seconds=2) as (rank, _size):
        x = torch.ones(4).to(DEVICE)
        dist.all_reduce(x)  # CUDA waits for all kernels before it gives pinned memory.
        gpu.fake_stall(1)
        with expect_error(RuntimeError, "herring:all_reduce" if rank < 0 else "timeout", "has not ended"):
            dist.all_reduce(x)
        gpu.fake_stall(0)
        gpu.fake_run_all()


def what_is_only_written_waits_too() -> None:
    """A copy back comes after what the caller's stream had before the call, also where nothing is copied out."""
    with job() as (gpu, rank, size):
        gpu.fake_set_stream(gpu.fake_new_stream())
        for step in range(10):
            tensor = torch.full((20_000,), 100 + step, dtype=torch.uint8).to(DEVICE)
            if rank != 1:
                _late(gpu, tensor, 7)
            dist.broadcast(tensor, 1)
            assert tensor.cpu().unique().tolist() == [100 + step], "broadcast"
            mine = torch.zeros(20_000, dtype=torch.uint8).to(DEVICE)
            _late(gpu, mine, 7)
            parts = [torch.full((20_000,), step + i, dtype=torch.uint8).to(DEVICE) for i in range(size)]
            dist.scatter(mine, parts if rank == 1 else None, src=1)
            assert mine.cpu().unique().tolist() == [step + rank], "scatter"


def parts() -> None:
    """HERRING_LOCAL_PART_BYTES is 4096 here: copies out, sums and copies back of one tensor overlap."""
    with job() as (gpu, rank, _size):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8):
            for elements in (1024, 4097, 30_011):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                    x = data(rank, (elements,), dtype)
                    on_both(lambda t, op=op: dist.all_reduce(t[0], op=op), [x], f"{dtype} {elements} {op}")
        x = data(rank, (40, 500), torch.float32).to(DEVICE)
        before = 0 if IS_REAL else gpu.fake_copies()
        dist.all_reduce(x)
        if not IS_REAL:  # CUDA does not count them.
            assert gpu.fake_copies() - before == 2 * -(-x.nbytes // 4096), "not in parts"
        # What is no plain memory of numbers goes as a whole, with the same result.
        columns = data(rank, (60, 1000), torch.float32)
        wanted = columns[:, ::2].clone()
        strided = columns.to(DEVICE)[:, ::2]
        dist.all_reduce(wanted)
        dist.all_reduce(strided)
        assert strided.cpu().equal(wanted)


def callbacks_that_wait() -> None:
    """As PowerSGD's: each waits for another collective, after tensors that go in parts and after small ones; and one
    that waits holds no other operation up."""
    with job() as (_, rank, size):

        def again(done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            tensor = done.value()[0].clone()
            dist.all_reduce(tensor)
            return [tensor]

        for elements in (50_000, 16):
            future = dist.all_reduce(torch.ones(elements, device=DEVICE), async_op=True).get_future()
            for _ in range(5):
                future = future.then(again)
            assert future.wait()[0].cpu().unique().tolist() == [float(size**6)], elements
        may_go_on = threading.Event()
        first = dist.all_reduce(torch.ones(50_000, device=DEVICE), async_op=True).get_future()
        held = first.then(lambda _: may_go_on.wait(30))
        for elements in (50_000, 16):
            other = torch.full((elements,), float(rank), device=DEVICE)
            dist.all_reduce(other)
            assert other.cpu().unique().tolist() == [1.0]
        may_go_on.set()
        assert held.wait(), "the others waited for a callback"


def _train(ddp: torch.nn.Module, rank: int, shape: tuple[int, int], place: str, steps: int) -> None:
    for step in range(steps):
        ddp(data(rank, shape, torch.float32, step).to(place)).square().mean().backward()
        with torch.no_grad():
            for each in ddp.parameters():
                assert each.grad is not None
                each -= 0.1 * each.grad
                each.grad = None


def hooks_in_order() -> None:
    """A DDP hook whose callback calls a collective, with several buckets: as on the CPU, where gradients are late,
    too."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def halve(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            mean = done.value()[0] / 4
            dist.all_reduce(mean)  # Twice the sum, then.
            return mean

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(halve)

    with job() as (_gpu, rank, _size):
        trained = []
        for place in ("cpu", DEVICE):
            torch.manual_seed(1)
            layers = [torch.nn.Linear(40, 40) for _ in range(6)]
            ddp = DistributedDataParallel(torch.nn.Sequential(*layers).to(place), bucket_cap_mb=0.008)
            ddp.register_comm_hook(None, in_order(hook))
            _train(ddp, rank, (4, 40), place, steps=6)
            trained.append([each.detach() for each in ddp.parameters()])
        for here, there in zip(*trained, strict=True):
            same_everywhere(there.cpu(), "the ranks have drifted apart")
            torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


def host_memory_is_the_arenas() -> None:
    """Ranks of a host read each other's tensors where they were copied to."""
    with job() as (_gpu, _rank, _size):
        x = torch.ones(100_000).to(DEVICE)
        dist.all_reduce(x)
        before = herring.stats()
        for _ in range(5):
            dist.all_reduce(x)
        after = herring.stats()
        assert after["staged_ops"] == before["staged_ops"], "copied once more on the host"
        assert after["zero_copy_ops"] == before["zero_copy_ops"] + 5
        assert x.cpu().unique().tolist() == [2.0**6]


def more_than_the_arena() -> None:
    """HERRING_ARENA_BYTES is 16 MB here: what does not fit goes through other memory, and what is idle makes room."""
    with job() as (_gpu, rank, size):
        total = sum(range(size))
        for elements in (30_000, 400_000, 2_000_000):
            tensors = [torch.full((elements + 9_000 * i,), float(rank + i)).to(DEVICE) for i in range(6)]
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()
            for i, tensor in enumerate(tensors):
                assert tensor.cpu().unique().tolist() == [float(total + size * i)], (elements, i)
        time.sleep(0.1)  # Until nothing of them is under way.
        before = herring.stats()["staged_ops"]
        x = torch.ones(2_500_000).to(DEVICE)
        dist.all_reduce(x)
        assert herring.stats()["staged_ops"] == before, "sizes that nobody asks for any more keep the arena"
        assert x.cpu().unique().tolist() == [float(size)]


def a_group_ends_while_copies_are_under_way() -> None:
    with job():
        for turn in range(5):
            group = dist.new_group([0, 1])
            for _ in range(4):
                dist.all_reduce(torch.ones(100_000 + turn).to(DEVICE), group=group, async_op=True)
            dist.destroy_process_group(group)
        for _ in range(4):
            dist.all_reduce(torch.ones(100_000).to(DEVICE), async_op=True)


def parts_of_late_tensors() -> None:
    with job() as (gpu, rank, _size):
        gpu.fake_set_stream(gpu.fake_new_stream())
        for step in range(10):
            many = [torch.zeros(50_000 + index, dtype=torch.uint8).to(DEVICE) for index in range(3)]
            for index, tensor in enumerate(many):
                _late(gpu, tensor, 10 * index + rank + step)
            works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
            here = torch.full((5,), float(rank))
            dist.broadcast(here, 1)
            assert here.tolist() == [1.0] * 5
            for index in (1, 2, 0):
                works[index].wait()
                assert many[index].cpu().unique().tolist() == [20 * index + 1 + 2 * step]
            seen = dist.all_reduce(many[0], async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()
            assert seen.cpu().unique().tolist() == [2 * (1 + 2 * step) + 1]


def parts_of_ranks_with_and_without_a_gpu() -> None:
    with job() as (_gpu, rank, _size):
        for elements in (5_000, 100_001):
            x = data(rank, (elements,), torch.float32)
            mine = x.to(DEVICE) if rank == 0 else x.clone()
            dist.all_reduce(mine)
            same_everywhere(mine.cpu(), "CPU and GPU")
            dist.all_reduce(x)
            assert mine.cpu().equal(x)


def parts_are_dropped() -> None:
    with job() as (gpu, _rank, _size):
        before = gpu.fake_allocated()
        for _ in range(10):
            dist.all_reduce(torch.ones(40_000).to(DEVICE), async_op=True)
        dist.barrier()
        last = torch.ones(40_000).to(DEVICE)
        dist.all_reduce(last)
        assert last.cpu().unique().tolist() == [2.0]
        del last
        dist.barrier()
        expect_freed(gpu, before)


def a_part_that_never_comes() -> None:
    """Of a tensor whose kernel does not end: a time-out, and the job goes on."""
    gpu = load()
    with world(seconds=2) as (_rank, _size):
        x = torch.ones(40_000).to(DEVICE)
        dist.all_reduce(x)
        gpu.fake_stall(1)
        with expect_error(RuntimeError, "timeout", "has not ended"):
            dist.all_reduce(x)
        gpu.fake_stall(0)
        gpu.fake_run_all()
        y = torch.ones(40_000).to(DEVICE)
        dist.all_reduce(y)
        assert y.cpu().unique().tolist() == [2.0]


def ranks_that_wait_for_each_other() -> None:
    """HERRING_DEADLOCK_AFTER_S is 1 here: each calls on a group where the other does not."""
    gpu = load()
    with world(seconds=40) as (rank, _size):
        groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        x = torch.ones(100).to(DEVICE)
        for group in groups:
            dist.all_reduce(x, group=group)
        begun = time.monotonic()
        with expect_error(RuntimeError, "ranks wait for each other", "all_reduce"):
            dist.all_reduce(x, group=groups[rank])
        assert time.monotonic() - begun < 20, "only the time limit ended it"
        gpu.fake_run_all()


def a_late_kernel_is_no_deadlock() -> None:
    """HERRING_DEADLOCK_AFTER_S is 1 here. What rank 0 waits for has been called on rank 1, but its tensor comes late;
    and rank 1 waits for what rank 0 calls afterwards."""
    with job() as (gpu, rank, size):
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        x, y = torch.ones(100).to(DEVICE), torch.ones(100).to(DEVICE)
        for group in (first, second):
            dist.all_reduce(x, group=group)
        if rank == 0:
            dist.all_reduce(x, group=first)
            dist.all_reduce(y, group=second)
        else:
            work = dist.all_reduce(y, group=second, async_op=True)
            time.sleep(0.2)  # Until its tensor has come.
            late = gpu.fake_new_stream()
            gpu.fake_set_stream(late)
            gpu.fake_stall(1)

            def let_go() -> None:
                time.sleep(4)
                gpu.fake_set_stream(late)
                gpu.fake_stall(0)

            thread = threading.Thread(target=let_go)
            thread.start()
            dist.all_reduce(x, group=first, async_op=True)
            work.wait()
            thread.join()
        assert y.cpu().unique().tolist() == [float(size)]


def parts_that_others_disagree_about() -> None:
    with job() as (_gpu, rank, _size):
        with expect_error(RuntimeError, "herring:all_reduce"):
            dist.all_reduce(torch.ones(40_000 + 4 * rank).to(DEVICE))
        y = torch.ones(40_000).to(DEVICE)
        dist.all_reduce(y)
        assert y.cpu().unique().tolist() == [2.0], "the group goes on"


def training_in_parts() -> None:
    with job() as (_gpu, rank, _size):
        trained = []
        for place in ("cpu", DEVICE):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(60, 80), torch.nn.Tanh(), torch.nn.Linear(80, 40)).to(place)
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            _train(ddp, rank, (4, 60), place, steps=3)
            trained.append([each.detach() for each in model.parameters()])
        for here, there in zip(*trained, strict=True):
            same_everywhere(there.cpu(), "the ranks have drifted apart")
            if IS_REAL:  # The model's own products have other bits there.
                torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)
            else:
                assert there.cpu().equal(here), "other bits than on the CPU"


def benchmark() -> None:
    """What `herring bench --device` measures, its check of results with it."""
    from herring.bench._contender import Case
    from herring.bench._device import DeviceContender, DeviceGroups
    from herring.bench._measure import Schedule, measure_all

    load()
    herring.init()
    groups = DeviceGroups((), torch.device(DEVICE, 0))
    ours = DeviceContender("herring", groups)
    cases = [
        Case(size, "float32", op, in_place)
        for size in (64, 300_000)
        for op in ("sum", "average")
        for in_place in (True, False)
    ]
    rows = measure_all(cases, [ours], Schedule(iterations=3, warmup=1, lead_in=0), lambda _: None, lambda _: None)
    assert [(len(row.times_s), row.wrong, row.memory) for row in rows] == [(3, 0, "cuda")] * 8, rows
    right = groups.all_reduce

    def wrong(who: str, tensor: torch.Tensor, op: str) -> None:
        right(who, tensor, op)
        tensor[5] = 99.0

    groups.all_reduce = wrong  # type: ignore[method-assign]
    rows = measure_all(cases[:1], [ours], Schedule(iterations=3, warmup=1, lead_in=0), lambda _: None, lambda _: None)
    assert rows[0].wrong > 0, "a wrong element was not seen"
    ours.close()
    herring.shutdown()
