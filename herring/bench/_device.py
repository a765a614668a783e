"""--device cuda: all_reduce of tensors on GPUs through torch.distributed, on Herring, gloo and NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np

import herring
from herring._errors import InvalidArgumentError, UnavailableError
from herring.bench._contender import Case, Plan, Turn, count_wrong, timed
from herring.bench._gloo import OPS_OF_TORCH, TIMEOUT_S, agree_on_store
from herring.bench._pattern import Array, Pattern

_NO_BITS = {"nccl": ("band", "bor", "bxor")}


class DeviceGroups:
    """The process groups of one run, and the tensors that they share. Herring's is torch's default group.

    Raises UnavailableError where torch sees no GPU, InvalidArgumentError where NCCL would have to share one.
    """

    def __init__(self, peers: tuple[str, ...], device: Any = None) -> None:
        """`device`: a torch.device instead of this rank's GPU."""
        try:
            import torch
            import torch.distributed as dist

            import herring.torch
        except ImportError as error:
            raise UnavailableError(f"--device cuda needs torch ({error}): pip install torch") from error
        self.torch: Any = torch
        self.device = _gpu(torch, peers) if device is None else device
        self._dist: Any = dist
        dist.init_process_group(
            "herring",
            store=agree_on_store(dist),
            rank=herring.rank(),
            world_size=herring.size(),
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        self._groups: dict[str, Any] = {"herring": dist.group.WORLD}
        for peer in peers:
            self._groups[peer] = dist.new_group(backend=peer, timeout=timedelta(seconds=TIMEOUT_S))
        self._tensors: dict[str, Any] = {}

    def take(self, role: str, case: Case) -> Any:
        """A flat tensor on the GPU: the same one for all who ask in one case."""
        tensor, dtype = self._tensors.get(role), getattr(self.torch, case.dtype)
        if tensor is None or tensor.numel() != case.count or tensor.dtype != dtype:
            tensor = self._tensors[role] = self.torch.empty(case.count, dtype=dtype, device=self.device)
        return tensor

    def all_reduce(self, who: str, tensor: Any, op: str) -> None:
        """Until the result is there."""
        self._dist.all_reduce(tensor, getattr(self._dist.ReduceOp, OPS_OF_TORCH[op]), self._groups[who])
        self.synchronize()

    def synchronize(self) -> None:
        """Until the GPU has nothing to do."""
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Ends the groups. Idempotent."""
        self._tensors.clear()
        if self._groups:
            self._groups.clear()
            herring.barrier()  # Rank 0 holds the store that the others still talk to.
            self._dist.destroy_process_group()


def _gpu(torch: Any, peers: tuple[str, ...]) -> Any:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus == 0:
        raise UnavailableError(
            f"--device cuda: torch {torch.__version__} sees no GPU on the host of rank {herring.rank()}; `herring "
            "doctor` says what the driver reports"
        )
    if "nccl" in peers and herring.local_size() > gpus:
        raise InvalidArgumentError(
            f"--peers nccl: {herring.local_size()} ranks on the host of rank {herring.rank()} share {gpus} GPU"
            f"{'s' * (gpus > 1)}, and NCCL wants one for each: start fewer ranks on a host, or leave out nccl"
        )
    device = torch.device("cuda", herring.local_rank() % gpus)
    torch.cuda.set_device(device)
    return device


class DeviceContender:
    """torch.distributed.all_reduce() of one backend. Out of place is what its user would write: a copy, then that."""

    memory = "cuda"

    def __init__(self, name: str, groups: DeviceGroups) -> None:
        self.name = name
        self._groups = groups
        self._tensors: tuple[Any, Any] | None = None
        self._host: Array = np.empty(0)
        self._pattern: Pattern | None = None
        self._op = "sum"

    def refusal(self, case: Case) -> str:
        """See Contender."""
        if self.name == "gloo" and case.op == "average":
            return "gloo has no average"
        return f"{self.name} has no {case.op}" if case.op in _NO_BITS.get(self.name, ()) else ""

    def prepare(self, case: Case) -> None:
        """See Contender."""
        source = self._groups.take("source", case)
        self._tensors = (source, source if case.in_place else self._groups.take("result", case))
        self._host = np.empty(case.count, case.dtype)
        self._pattern = Pattern(case.dtype, case.op, herring.rank(), herring.size(), case.count)
        self._op = case.op

    def turn(self, plan: Plan) -> Turn:
        """See Contender."""
        assert self._tensors is not None
        assert self._pattern is not None
        pattern, host, (source, result) = self._pattern, self._host, self._tensors
        groups, from_numpy = self._groups, self._groups.torch.from_numpy

        def fill(iteration: int) -> None:
            pattern.fill(host, plan.salt + iteration)
            source.copy_(from_numpy(host))
            groups.synchronize()

        def operate() -> None:
            if result is not source:
                result.copy_(source)
            groups.all_reduce(self.name, result, self._op)

        turn = timed(plan, fill, herring.barrier, operate)
        turn.wrong = count_wrong(pattern, source.cpu().numpy(), result.cpu().numpy(), plan, in_place=result is source)
        return turn

    def release(self) -> None:
        """See Contender."""
        self._tensors = None
        self._host = np.empty(0)

    def close(self) -> None:
        """See Contender."""
        self.release()
        self._groups.close()
