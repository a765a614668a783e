"""HERRING_GPUDIRECT: tensors of GPUs that the network card reads and writes. accelerator.py plays the GPU, and
strict_fabric.py the card; the ranks, the servers and the hosts are real, but for being on one machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import strict_fabric
import torch
import torch.distributed as dist
from accelerator import DEVICE, expect_freed, load
from cases_accelerator import _late, _train
from common import data, expect_error, same_everywhere, world

ELEMENTS = 300_007  # More than travels in an announce, no multiple of anything, and of several chunks.
MEDIUM = 4_000_001
LARGE = 9_000_001  # Several parts.


class Rank:
    def __init__(self, gpu: ctypes.CDLL, fabric: ctypes.CDLL, rank: int, size: int) -> None:
        self.gpu, self.fabric, self.rank, self.size = gpu, fabric, rank, size

    @contextlib.contextmanager
    def direct(self) -> Iterator[None]:
        """No byte of the tensors comes to the host in it, and the card has some."""
        copies, posted = self.gpu.fake_copies(), self.fabric.strict_fabric_device_bytes()
        yield
        assert self.gpu.fake_copies() == copies, "copied to the host"
        assert self.fabric.strict_fabric_device_bytes() > posted, "the card saw nothing of it"

    @contextlib.contextmanager
    def staged(self) -> Iterator[None]:
        posted = self.fabric.strict_fabric_device_bytes()
        yield
        assert self.fabric.strict_fabric_device_bytes() == posted, "the card read the GPU"

    def check(self) -> None:
        self.gpu.fake_run_all()
        for fault in (self.gpu.fake_fault(), self.fabric.strict_fabric_fault()):
            assert not fault, f"what real hardware would punish: {fault.decode()}"


@contextlib.contextmanager
def job(seconds: float = 60) -> Iterator[Rank]:
    gpu = load()
    fabric = strict_fabric.load(gpu)
    with world(seconds=seconds) as (rank, size):
        one = Rank(gpu, fabric, rank, size)
        yield one
    one.check()
    assert fabric.strict_fabric_uses() == 0, "the card still uses memory of the GPU"
    print(f"rank {rank}: all is well", flush=True)


def same_bits(mine: torch.Tensor, there: torch.Tensor, what: object) -> None:
    assert there.cpu().view(torch.uint8).equal(mine.view(torch.uint8)), f"other bits than on the CPU: {what}"


def bits() -> None:
    with job() as one:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                if op == dist.ReduceOp.AVG and not dtype.is_floating_point:
                    continue
                mine = data(one.rank, (ELEMENTS,), dtype)
                there = mine.to(DEVICE)
                dist.all_reduce(mine, op=op)
                with one.direct():
                    dist.all_reduce(there, op=op)
                same_bits(mine, there, (dtype, op))
        mine = data(one.rank, (LARGE,), torch.float32)
        there = mine.to(DEVICE)
        dist.all_reduce(mine)
        with one.direct():
            dist.all_reduce(there)
        same_bits(mine, there, "several parts")
        # Small ones, and those that are not contiguous, go as ever.
        for there in (torch.ones(64).to(DEVICE), torch.ones(600, 1000).to(DEVICE)[:, ::2]):
            with one.staged():
                dist.all_reduce(there)
            assert there.cpu().unique().tolist() == [float(one.size)]


def streams() -> None:
    """Late kernels, several buckets at once, waited for in any order; and all memory is given back."""
    with job() as one:
        one.gpu.fake_set_stream(one.gpu.fake_new_stream())
        total = sum(range(one.size))
        first = torch.zeros(100_000, dtype=torch.int32).to(DEVICE)
        dist.all_reduce(first)
        for step in range(5):
            gradient = torch.zeros(100_000, dtype=torch.int32).to(DEVICE)
            _late(one.gpu, gradient, one.rank + step)
            with one.direct():
                dist.all_reduce(gradient, async_op=True).wait()
            assert gradient.cpu().unique().tolist() == [0x01010101 * (total + one.size * step)]
        many = [torch.zeros(100_000, dtype=torch.int32).to(DEVICE) for _ in range(6)]
        for index, tensor in enumerate(many):
            _late(one.gpu, tensor, 4 * index + one.rank)
        with one.direct():
            works = [dist.all_reduce(tensor, async_op=True) for tensor in many]
            for index in (4, 0, 2, 5, 1, 3):
                works[index].wait()
        for index, tensor in enumerate(many):
            assert tensor.cpu().unique().tolist() == [0x01010101 * (total + one.size * 4 * index)]
        seen = dist.all_reduce(first, async_op=True).get_future().then(lambda done: done.value()[0] + 1).wait()
        assert seen.cpu().shape == first.shape
        works.clear()
        dist.barrier()
        # What the card knows stays: as much as was in use at once.
        before = one.gpu.fake_allocated()
        for _ in range(20):
            dist.all_reduce(torch.ones(100_000).to(DEVICE), async_op=True)
        dist.all_reduce(first)
        dist.barrier()
        expect_freed(one.gpu, before + 40 * (512 << 10))
        works = [dist.all_reduce(torch.ones(50_000).to(DEVICE), async_op=True) for _ in range(3)]
    del works, first, many, gradient, seen


def mixed() -> None:
    """Of three ranks one has its tensor on the card, one stages it, and one has it on the CPU."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.environ["HERRING_GPUDIRECT"] = "off"
    with job() as one:
        for dtype in (torch.float32, torch.bfloat16):
            for elements in (ELEMENTS, LARGE):
                mine = data(rank, (elements,), dtype)
                wanted = mine.clone()
                dist.all_reduce(wanted)
                there = mine if rank == 2 else mine.to(DEVICE)
                with one.direct() if rank == 0 else one.staged():
                    dist.all_reduce(there)
                same_bits(wanted, there, (dtype, elements))


def ddp() -> None:
    with job() as one:
        trained = []
        for place in ("cpu", DEVICE):
            torch.manual_seed(1)
            layers = [torch.nn.Linear(200, 300), torch.nn.Tanh(), torch.nn.Linear(300, 400), torch.nn.Linear(400, 10)]
            model = torch.nn.Sequential(*layers).to(place)
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.2)
            posted = one.fabric.strict_fabric_device_bytes()
            _train(model, one.rank, (4, 200), place, steps=3)
            assert (one.fabric.strict_fabric_device_bytes() > posted) == (place == DEVICE)
            trained.append([each.detach() for each in model.parameters()])
        for here, there in zip(*trained, strict=True):
            same_everywhere(there.cpu(), "the ranks have drifted apart")
            assert there.cpu().equal(here), "other bits than on the CPU"


def a_kernel_that_never_ends() -> None:
    with job(seconds=6) as one:
        x = torch.ones(ELEMENTS).to(DEVICE)
        dist.all_reduce(x)
        if one.rank == 0:
            one.gpu.fake_set_stream(one.gpu.fake_new_stream())
            one.gpu.fake_stall(1)
            _late(one.gpu, x, 1)
        begun = time.monotonic()
        with expect_error(RuntimeError, "timeout" if one.rank == 0 else "herring:all_reduce"):
            dist.all_reduce(x)
        assert time.monotonic() - begun < 30
        if one.rank == 0:
            one.gpu.fake_stall(0)
            one.gpu.fake_run_all()


def a_rank_is_killed() -> None:
    gpu = load()
    fabric = strict_fabric.load(gpu)
    with world(seconds=60) as (rank, _size):
        x = torch.ones(LARGE).to(DEVICE)
        for _ in range(2):
            dist.all_reduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begun = time.monotonic()
        with expect_error(RuntimeError, "worker 1"):
            dist.all_reduce(x)
        assert time.monotonic() - begun < 20
        gpu.fake_run_all()
        for fault in (gpu.fake_fault(), fabric.strict_fabric_fault()):
            assert not fault, fault.decode()
        assert fabric.strict_fabric_uses() == 0, "the card still uses memory of the GPU"
    print(f"rank {rank}: all is well", flush=True)


def _end_server(number: int, how: int = signal.SIGKILL) -> None:
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"server" in words and b"--rank" in words and words[words.index(b"--rank") + 1] == str(number).encode():
                os.kill(int(process.name), how)


def a_server_dies() -> None:
    """What it had is pushed again, from the same memory of the GPU."""
    with job() as one:
        wanted = [data(one.rank, (LARGE,), torch.float32, seed) for seed in range(6)]
        there = [tensor.to(DEVICE) for tensor in wanted]
        for tensor in wanted:
            dist.all_reduce(tensor)
        dist.barrier()
        with one.direct():
            works = [dist.all_reduce(tensor, async_op=True) for tensor in there]
            if one.rank == 0:
                time.sleep(0.15)
                _end_server(1)
            for work in works:
                work.wait()
        for mine, theirs in zip(wanted, there, strict=True):
            same_bits(mine, theirs, "a server was lost")
        for seed in range(3):
            mine = data(one.rank, (ELEMENTS,), torch.float32, seed)
            theirs = mine.to(DEVICE)
            dist.all_reduce(mine)
            with one.direct():
                dist.all_reduce(theirs)
            same_bits(mine, theirs, "after it")
        works.clear()


def a_server_dies_and_the_card_goes_on() -> None:
    """Receives that were posted for it stay with the card: no later tensor may have that memory."""
    with job() as one:
        inputs = [data(one.rank, (MEDIUM,), torch.float32, seed) for seed in range(2)]
        wanted = [tensor.clone() for tensor in inputs]
        for tensor in wanted:
            dist.all_reduce(tensor)

        def reduce_all(what: str, meanwhile: Callable[[], bool]) -> bool:
            there = [tensor.to(DEVICE) for tensor in inputs]
            with one.direct():
                works = [dist.all_reduce(tensor, async_op=True) for tensor in there]
                answer = meanwhile()
                for work in works:
                    work.wait()
            for mine, theirs in zip(wanted, there, strict=True):
                same_bits(mine, theirs, what)
            return answer

        def end_in_the_middle() -> bool:
            """With receives that it alone can end."""
            if one.rank != 0:
                return False
            enough = one.fabric.strict_fabric_device_bytes() + 4 * MEDIUM // 2
            while one.fabric.strict_fabric_device_bytes() < enough:
                pass
            _end_server(1, signal.SIGSTOP)
            time.sleep(0.3)
            is_good = one.fabric.strict_fabric_receives() > 0
            _end_server(1, signal.SIGKILL if is_good else signal.SIGCONT)
            return is_good

        for _ in range(10):
            is_lost = torch.tensor([int(reduce_all("a server was lost", end_in_the_middle))])
            dist.all_reduce(is_lost)
            if is_lost.item():
                break
        held = one.fabric.strict_fabric_hold()
        assert held > 0 or one.rank != 0, "nothing was posted for the server: this tries nothing"
        for _ in range(2):
            reduce_all("after it", lambda: False)


def impossible(*why: str, takes_part: bool = False) -> None:
    """With "on" an error that says why; with "auto" as without it, and a warning that says why, once. `takes_part`: for
    ranks with "auto", with a tensor on the CPU after the error."""
    mode = os.environ["HERRING_GPUDIRECT"]
    gpu = load()
    strict_fabric.load(gpu)
    with world(seconds=60) as (rank, size):
        for _ in range(2):
            x = torch.full((ELEMENTS,), float(rank)).to(DEVICE)
            if mode == "on":
                with expect_error(RuntimeError, "HERRING_GPUDIRECT=on", *why):
                    dist.all_reduce(x)
                x = x.cpu()
            if mode == "auto" or takes_part:
                dist.all_reduce(x)
                assert x.cpu().unique().tolist() == [float(sum(range(size)))]
        gpu.fake_run_all()
    print(f"rank {rank}: all is well", flush=True)


def impossible_both_ways(*why: str) -> None:
    """Each rank decides for itself."""
    os.environ["HERRING_GPUDIRECT"] = "on" if os.environ["RANK"] == "0" else "auto"
    impossible(*why, takes_part=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
