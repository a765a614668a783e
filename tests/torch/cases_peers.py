"""HERRING_ON_HOST=device and nccl: tensors of GPUs that the ranks of one host reduce on the GPUs. accelerator.py plays
these, and NCCL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerator import DEVICE, IS_REAL, expect_freed, load
from cases_accelerator import _late, job, on_both
from common import data, expect_error, world

IS_NCCL = os.environ.get("HERRING_ON_HOST") == "nccl"


@contextlib.contextmanager
def on_the_gpu(gpu: ctypes.CDLL) -> Iterator[None]:
    """No byte of the tensors comes to the host in it."""
    if IS_REAL:  # CUDA does not count them.
        yield
        return
    copies, sums = gpu.fake_copies(), _sums(gpu)
    yield
    assert gpu.fake_copies() == copies, "copied to the host"
    assert _sums(gpu) > sums, "nothing was summed on the GPU"


def _sums(gpu: ctypes.CDLL) -> int:
    """How many so far, of Herring's kernel or of NCCL."""
    return int(gpu.fake_collectives() if IS_NCCL else gpu.fake_launches())


def bits() -> None:
    """HERRING_DEVICE_MEMORY_BYTES is 1 MB here: a piece has 256 KB at most."""
    with job() as (gpu, rank, size):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64):
            for elements in (1, 33, 5_003, 150_001):
                for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                    mine = data(rank, (elements,), dtype)
                    there = mine.to(DEVICE)
                    dist.all_reduce(mine, op=op)
                    through_host = IS_NCCL and op == dist.ReduceOp.AVG and not dtype.is_floating_point
                    with contextlib.nullcontext() if through_host else on_the_gpu(gpu):
                        dist.all_reduce(there, op=op)
                        if not IS_REAL:
                            gpu.fake_run_all()
                    got = there.cpu()
                    wrong = (got != mine).nonzero().flatten()
                    told = (dtype, elements, op, wrong.numel(), wrong[:3].tolist(), wrong[-3:].tolist())
                    assert got.view(torch.uint8).equal(mine.view(torch.uint8)), told
        # What the GPUs do not sum goes through the host, between calls that do not.
        for dtype, op in ((torch.uint8, dist.ReduceOp.SUM), (torch.float32, dist.ReduceOp.MAX)):
            on_both(lambda t, op=op: dist.all_reduce(t[0], op=op), [data(rank, (999,), dtype)], f"{dtype} {op}")
        columns = data(rank, (60, 1000), torch.float32)
        wanted = columns[:, ::2].clone()
        strided = columns.to(DEVICE)[:, ::2]
        dist.all_reduce(wanted)
        dist.all_reduce(strided)
        assert strided.cpu().equal(wanted), "not contiguous"
        dist.all_reduce(torch.empty(0, 3).to(DEVICE))
        here = torch.full((7,), float(rank))
        dist.all_reduce(here)
        assert here.tolist() == [float(sum(range(size)))] * 7


def streams() -> None:
    with job() as (gpu, rank, size):
        gpu.fake_set_stream(gpu.fake_new_stream())
        total = sum(range(size))
        for step in range(10):
            # A late kernel that fills it with bytes: as int32, each 0x01010101 times what it writes.
            gradient = torch.zeros(20_000, dtype=torch.int32).to(DEVICE)
            _late(gpu, gradient, rank + step)
            dist.all_reduce(gradient, async_op=True).wait()
            assert gradient.cpu().unique().tolist() == [0x01010101 * (total + size * step)]
        many = [torch.zeros(100_000, dtype=torch.int32).to(DEVICE) for _ in range(6)]
        for index, tensor in enumerate(many):
            _late(gpu, tensor, 4 * index + rank)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
        for index in (4, 0, 2, 5, 1, 3):
            works[index].wait()
            assert many[index].cpu().unique().tolist() == [0x01010101 * (total + size * 4 * index)]
        gradient = torch.zeros(50_000, dtype=torch.int32).to(DEVICE)
        _late(gpu, gradient, rank + 1)
        seen = dist.all_reduce(gradient, async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()
        assert seen.cpu().unique().tolist() == [0x01010101 * (total + size) + 1]


def lifetime() -> None:
    with job() as (gpu, _rank, size):
        last = torch.ones(3).to(DEVICE)
        dist.all_reduce(last)  # Shared memory is there from here on.
        dist.barrier()
        gpu.fake_run_all()
        before = gpu.fake_allocated()
        for _ in range(20):
            dist.all_reduce(torch.ones(40_000).to(DEVICE), async_op=True)
        dist.all_reduce(last)
        assert last.cpu().tolist() == [float(size) ** 2] * 3
        dist.barrier()
        expect_freed(gpu, before + 2 * 4096)


def groups() -> None:
    """Each group shares memory of its own; calls of several groups in any order."""
    with job() as (gpu, rank, size):
        pair = dist.new_group([0, 1])
        world_tensor, pair_tensor = torch.full((50_000,), float(rank)).to(DEVICE), torch.ones(70_000).to(DEVICE)
        works = [dist.all_reduce(world_tensor, async_op=True)]
        if rank < 2:
            works.append(dist.all_reduce(pair_tensor, group=pair, async_op=True))
        for work in works:
            work.wait()
        assert world_tensor.cpu().unique().tolist() == [float(sum(range(size)))]
        assert pair_tensor.cpu().unique().tolist() == [2.0 if rank < 2 else 1.0]
        for _ in range(3):
            again = dist.new_group(list(range(size)))
            for _ in range(4):
                dist.all_reduce(torch.ones(30_000).to(DEVICE), group=again, async_op=True)
            dist.destroy_process_group(again)
        dist.all_reduce(world_tensor)
        gpu.fake_run_all()


def ddp() -> None:
    """The same parameters, bit for bit, as with HERRING_ON_HOST=host: gradients of CPU tensors are reduced there."""
    with job() as (_gpu, rank, _size):
        for _ in range(4):
            gradients = [data(rank, shape, torch.float32) for shape in ((300, 100), (300,), (7, 300), (7,))]
            there = [gradient.to(DEVICE) for gradient in gradients]
            flat, flat_there = (torch.cat([each.view(-1) for each in list_]) for list_ in (gradients, there))
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)
            dist.all_reduce(flat_there, op=dist.ReduceOp.AVG)
            assert flat_there.cpu().equal(flat)


def an_order_of_its_own() -> None:
    """NCCL's: with three ranks the bits are not those of the CPU, but they are the same on all ranks."""
    with job() as (gpu, rank, _size):
        mine = data(rank, (50_001,), torch.float32)
        there = mine.to(DEVICE)
        dist.all_reduce(mine)
        with on_the_gpu(gpu):
            dist.all_reduce(there)
            gpu.fake_run_all()
        got = there.cpu()
        assert torch.allclose(got, mine, rtol=1e-5, atol=1e-6)
        least, most = got.view(torch.int32).clone(), got.view(torch.int32).clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        assert least.equal(most), "ranks have different bits"
        whole = data(rank, (50_001,), torch.int64)
        whole_there = whole.to(DEVICE)
        dist.all_reduce(whole)
        dist.all_reduce(whole_there)
        assert whole_there.cpu().equal(whole)


def mismatch() -> None:
    gpu = load()
    with world(seconds=20) as (rank, _size):
        x = torch.ones(100 if rank == 1 else 50).to(DEVICE)
        with expect_error(
            RuntimeError, "mismatch", "rank 0: all_reduce(float32[50], sum)", "rank 1: all_reduce(float32[100]"
        ):
            dist.all_reduce(x)
        with expect_error(RuntimeError, "mismatch"):
            dist.all_reduce(torch.ones(3).to(DEVICE))
        here = torch.ones(3)
        dist.all_reduce(here)
        assert here.tolist() == [2.0] * 3, "CPU tensors go on"
        gpu.fake_run_all()


def one_rank_has_it_on_the_cpu() -> None:
    gpu = load()
    with world(seconds=30) as (rank, _size):
        x = torch.ones(100).to(DEVICE)
        dist.all_reduce(x)
        begun = time.monotonic()
        with expect_error(RuntimeError, "all_reduce"):
            dist.all_reduce(x if rank == 0 else torch.ones(100))
        assert time.monotonic() - begun < 20, "only the time limit ended it"
        gpu.fake_run_all()


def the_first_call_of_one_rank_is_on_the_cpu() -> None:
    """Nobody has come together yet: one rank wants to, and the other never will."""
    gpu = load()
    with world(seconds=600) as (rank, _size):
        begun = time.monotonic()
        with expect_error(RuntimeError, "all_reduce"):
            dist.all_reduce(torch.ones(100).to(DEVICE) if rank == 0 else torch.ones(100))
        assert time.monotonic() - begun < 20, "only the time limit ended it"
        gpu.fake_run_all()


def settings_differ() -> None:
    if os.environ["RANK"] == "1":
        os.environ["HERRING_ON_HOST"] = "host"
    load()
    with expect_error(
        ValueError, "process group '0': the settings differ: group rank 0 has HERRING_ON_HOST=", "group rank 1 has",
        "HERRING_ON_HOST=host; set them to the same values in every process",
    ):  # fmt: skip
        dist.init_process_group("herring")


def blocks_differ() -> None:
    os.environ["HERRING_DEVICE_BLOCKS"] = "4" if os.environ["RANK"] == "1" else "8"
    load()
    with expect_error(ValueError, "the settings differ", "HERRING_DEVICE_BLOCKS=8, group rank 1 has", "BLOCKS=4"):
        dist.init_process_group("herring")


def destroyed_by_one_rank_before_the_other() -> None:
    """NCCL's end waits for all ranks: it must hold up nobody's other groups."""
    with job() as (_gpu, rank, size):
        pair = dist.new_group([0, 1])
        x = torch.ones(1000).to(DEVICE)
        dist.all_reduce(x, group=pair)
        dist.all_reduce(x)
        dist.barrier()
        if rank == 0:
            begun = time.monotonic()
            dist.destroy_process_group(pair)
            del pair
            assert time.monotonic() - begun < 15
        dist.all_reduce(x)
        assert x.cpu().unique().tolist() == [float(size) ** 3]


def a_rank_is_killed_while_kernels_of_several_groups_wait_for_it() -> None:
    """To end the first group's frees memory, which waits for the others' kernels: nobody has ended those yet."""
    gpu = load()
    with world(seconds=600) as (rank, _size):
        groups = [dist.new_group([0, 1]) for _ in range(2)]
        x = torch.ones(100_000).to(DEVICE)
        for group in groups:
            dist.all_reduce(x, group=group)
        if rank == 1:
            gpu.fake_hold_collectives()
        works = [dist.all_reduce(torch.ones(100_000).to(DEVICE), group=group, async_op=True) for group in groups]
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        for work in works:
            with expect_error(RuntimeError, "worker 1"):
                work.wait()
        assert time.monotonic() - begun < 12
        gpu.fake_run_all()


def a_rank_is_killed() -> None:
    gpu = load()
    with world(seconds=60) as (rank, _size):
        x = torch.ones(200_000).to(DEVICE)
        for _ in range(3):
            dist.all_reduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with expect_error(RuntimeError, "worker 1"):
            dist.all_reduce(x)
        assert time.monotonic() - begun < 20
        gpu.fake_run_all()


def a_rank_is_killed_while_a_kernel_waits_for_it() -> None:
    """Rank 1's kernel never begins, rank 0's waits for it on the GPU, where nobody tells it of the end."""
    gpu = load()
    with world(seconds=600) as (rank, _size):
        x = torch.ones(200_000).to(DEVICE)
        dist.all_reduce(x)
        if rank == 1:
            gpu.fake_hold_collectives()
            dist.all_reduce(x, async_op=True)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with expect_error(RuntimeError, "worker 1"):
            dist.all_reduce(x)
        assert time.monotonic() - begun < 30
        gpu.fake_run_all()


def no_library() -> None:
    load()
    with (
        world(seconds=20) as (_rank, _size),
        expect_error(RuntimeError, "HERRING_ON_HOST", "no NCCL on this machine", "HERRING_NCCL"),
    ):
        dist.all_reduce(torch.ones(50).to(DEVICE))


def one_rank_does_not_connect() -> None:
    if os.environ["RANK"] == "1":
        os.environ["FAKE_NCCL_REFUSES"] = "1"
    load()
    with world(seconds=600) as (rank, _size):
        why = "this fake connects nobody" if rank == 1 else "rank 1 cannot connect to the other ranks of its host"
        with expect_error(RuntimeError, "HERRING_ON_HOST", why):
            dist.all_reduce(torch.ones(50).to(DEVICE))


def one_rank_cannot() -> None:
    """FAKE_ACCELERATOR_SHARES_NOTHING on rank 1."""
    if os.environ["RANK"] == "1":
        os.environ["FAKE_ACCELERATOR_SHARES_NOTHING"] = "1"
    load()
    with world(seconds=20) as (rank, _size):
        x = torch.ones(50).to(DEVICE)
        why = "this fake shares no memory" if rank == 1 else "rank 1 cannot share memory of its GPU"
        if os.environ["HERRING_ON_HOST"] == "device":
            with expect_error(RuntimeError, "HERRING_ON_HOST", why):
                dist.all_reduce(x)
            return
        dist.all_reduce(x)
        assert x.cpu().tolist() == [2.0] * 50


def aborted() -> None:
    """A group that a rank aborts is an error on the others, on the GPUs too."""
    gpu = load()
    with world(seconds=30) as (rank, _size):
        group = dist.new_group([0, 1], timeout=timedelta(seconds=30))
        x = torch.ones(100).to(DEVICE)
        dist.all_reduce(x, group=group)
        if rank == 1:
            group._get_backend(torch.device(DEVICE)).abort()
        else:
            with expect_error(RuntimeError, "abort"):
                dist.all_reduce(x, group=group)
        here = torch.ones(3)
        dist.all_reduce(here)
        assert here.tolist() == [2.0] * 3
        gpu.fake_run_all()


def hosts() -> None:
    """Several hosts: the GPUs of each reduce among themselves, then a part of the data each goes over the network."""
    with job() as (gpu, rank, size):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for elements in (1, 33, 50_001, 300_007):
                mine = data(rank, (elements,), dtype)
                there = mine.to(DEVICE)
                dist.all_reduce(mine)
                # Of a small tensor not every rank has a part.
                with on_the_gpu(gpu) if elements > 1000 else contextlib.nullcontext():
                    dist.all_reduce(there)
                    gpu.fake_run_all()
                assert there.cpu().view(torch.uint8).equal(mine.view(torch.uint8)), (dtype, elements)
        # The servers divide: through the host.
        on_both(lambda t: dist.all_reduce(t[0], op=dist.ReduceOp.AVG), [data(rank, (999,), torch.float32)], "average")
        # One host's ranks alone, and two of different hosts: on the GPUs, and not.
        for members in (list(range(size // 2)), [0, size - 1]):
            group = dist.new_group(members)
            if rank in members:
                x = torch.full((1000,), float(rank)).to(DEVICE)
                sums = _sums(gpu)
                dist.all_reduce(x, group=group)
                assert x.cpu().unique().tolist() == [float(sum(members))]
                assert (_sums(gpu) > sums) == (members[1] == 1)
    print(f"rank {rank}: every sum is right")
