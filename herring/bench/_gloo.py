"""The peer gloo: torch.distributed's process group for CPU tensors, in the same processes."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np

import herring
from herring._context import process
from herring._errors import UnavailableError
from herring._rendezvous import published_address
from herring.bench._contender import Case, Plan, Turn, timed_loop
from herring.bench._herring import PrivateMemory
from herring.bench._pattern import Array, Pattern

TIMEOUT_S = 300.0
_ADDRESS_BYTES = 128
_DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
_OPS = ("sum", "min", "max", "product", "band", "bor", "bxor")
OPS_OF_TORCH = {
    "sum": "SUM", "average": "AVG", "min": "MIN", "max": "MAX", "product": "PRODUCT", "band": "BAND", "bor": "BOR",
    "bxor": "BXOR",
}  # fmt: skip


def agree_on_store(dist: Any) -> Any:
    """A TCPStore of the peer's own, on a port that rank 0 found free and the others learn through Herring."""
    session = process.current()
    text = np.zeros(_ADDRESS_BYTES, np.uint8)
    store = None
    if herring.rank() == 0:
        is_local = herring.local_size() == herring.size()
        host = published_address(is_local, session.config.interface, os.environ.get("MASTER_ADDR"))
        store = dist.TCPStore(
            host, 0, herring.size(), is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )
        encoded = f"{host} {store.port}".encode()
        text[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    herring.broadcast_(text)
    if store is None:
        host, port = bytes(text).rstrip(b"\0").decode().split()
        store = dist.TCPStore(host, int(port), herring.size(), is_master=False, timeout=timedelta(seconds=TIMEOUT_S))
    return store


class GlooContender:
    """ProcessGroupGloo on tensors that share memory with numpy arrays.

    gloo works in place; out of place is what its user would write: a copy, then the operation.
    """

    name = "gloo"
    memory = "private"

    def __init__(self, private: PrivateMemory) -> None:
        try:
            import torch
        except ImportError as error:
            raise UnavailableError(f"--peers gloo needs torch ({error}): pip install torch") from error
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            interface = process.current().config.interface
            if herring.local_size() == herring.size():
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            elif interface and not interface[0].isdigit():
                os.environ["GLOO_SOCKET_IFNAME"] = interface.replace(" ", "")
        dist: Any = torch.distributed
        self._torch, self._dist = torch, dist
        self._private = private
        self._store = agree_on_store(dist)
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("bench", self._store),
            herring.rank(),
            herring.size(),
            timedelta(seconds=TIMEOUT_S),
        )
        self._options = dist.AllreduceOptions()
        self._pattern: Pattern | None = None
        self._arrays: tuple[Array, Array] | None = None

    def refusal(self, case: Case) -> str:
        """See Contender."""
        if case.dtype not in _DTYPES:
            return f"gloo has no {case.dtype}"
        return "" if case.op in _OPS else f"gloo has no {case.op}"

    def prepare(self, case: Case) -> None:
        """See Contender."""
        self._arrays = self._private.take(case)
        self._pattern = Pattern(case.dtype, case.op, herring.rank(), herring.size(), case.count)
        self._options.reduceOp = getattr(self._dist.ReduceOp, OPS_OF_TORCH[case.op])

    def turn(self, plan: Plan) -> Turn:
        """See Contender."""
        assert self._arrays is not None
        assert self._pattern is not None
        source, result = self._arrays
        tensors = [self._torch.from_numpy(result)]
        group, options, origin = self._group, self._options, self._torch.from_numpy(source)

        def in_place() -> None:
            group.allreduce(tensors, options).wait()

        def out_of_place() -> None:
            tensors[0].copy_(origin)
            group.allreduce(tensors, options).wait()

        def barrier() -> None:
            group.barrier().wait()

        operate = in_place if source is result else out_of_place
        return timed_loop(self._pattern, source, result, barrier, operate, plan)

    def release(self) -> None:
        """See Contender."""
        self._arrays = None

    def close(self) -> None:
        """See Contender."""
        self.release()
        if self._group is not None:
            herring.barrier()  # rank 0 holds the store that the others still talk to
            self._group = None
            self._store = None
