"""Arrays on GPUs, for the functions on arrays: by way of the host's memory, where the operation takes place.

A call waits until its arrays are in the host's memory. Results are on the GPU when it returns; with async_op, when the
handle is done.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

from herring import _core
from herring._arrays import is_on_gpu
from herring._context import Session, process
from herring._errors import HerringError, HerringTimeoutError, InvalidArgumentError
from herring._handle import Handle, to_seconds

# A copy back waits for nothing but the GPU.
_COPY_S = 60.0


def through_host(
    refused: InvalidArgumentError,
    call: Callable[..., Any],
    arrays: Any,
    *arguments: Any,
    results: Literal["same", "new", "returned"],
    out: Any = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    **options: Any,
) -> Any:
    """What `call` does, for an array on a GPU or a list of such, with memory of the host instead; `call` has refused
    the arrays themselves, and that is raised where they are not on a GPU.

    `results`: `call` works in place, and "same" is for the arrays that were passed, "new" for new ones (or `out`);
    "returned": `call` returns new arrays.
    """
    is_list = isinstance(arrays, (list, tuple))
    places = list(arrays) if is_list else [arrays]
    if not any(is_on_gpu(each) for each in places):
        raise refused
    session = process.current()
    if session.config.cuda == "off":
        raise InvalidArgumentError("the array is on a CUDA device, and HERRING_CUDA is off") from None
    kind = call.__name__.rstrip("_")
    limit = to_seconds(timeout) or session.timeout_s
    try:
        sources = [
            _Staged(session, each, kind, f"array {i} of the list" if is_list else "the array", results == "same")
            for i, each in enumerate(places)
        ]
        targets = None if out is None else [sources[0].into(out)]
        _fetch(sources, limit)
    except HerringError as error:
        raise error from None
    hosts = [each.host for each in sources]
    value = call(hosts if is_list else hosts[0], *arguments, async_op=async_op, timeout=timeout, **options)

    def start(value: Any) -> _Return:
        if results == "returned":
            return _Return.of_returned(kind, places[0], value)
        if results == "same":
            return _Return([(each.there, each.memory) for each in sources], arrays)
        if targets is not None:
            return _Return(targets, out)
        return _Return.of_new(kind, list(zip(places, hosts, strict=True)), is_list)

    if async_op:
        return DeviceHandle(value, start)
    back = start(value)
    back.wait()
    return back.result


class _Staged:
    """An array on a GPU, and memory of the host that stands for it."""

    def __init__(self, session: Session, array: Any, kind: str, role: str, is_written: bool) -> None:
        self.kind, self.role = kind, role
        if not is_on_gpu(array):
            raise InvalidArgumentError(
                f"{kind}: {role} is not on a CUDA device, but others are; pass all on GPUs, or none"
            )
        contiguous = None if is_written else getattr(array, "contiguous", None)
        self.there = _core.DeviceArray(array if contiguous is None else contiguous(), is_written, f"{kind}: {role}")
        self.host, self.memory = _host_array(session, self.there)

    def into(self, out: Any) -> tuple[_core.DeviceArray, Any]:
        """Where the result goes instead."""
        if not is_on_gpu(out):
            raise InvalidArgumentError(f"{self.kind}: {self.role} is on a CUDA device, and out is not")
        there = _core.DeviceArray(out, True, f"{self.kind}: out")
        if (there.shape, there.dtype) != (self.there.shape, self.there.dtype):
            raise InvalidArgumentError(
                f"{self.kind}: out has shape {there.shape} and dtype {there.dtype}, the array {self.there.shape} and "
                f"{self.there.dtype}"
            )
        return there, self.memory


def _host_array(session: Session, there: _core.DeviceArray) -> tuple[Any, Any]:
    """An array like it, and its memory as something with the buffer protocol."""
    import numpy as np

    from herring._bfloat16 import Bfloat16Array

    dtype = np.dtype(np.int16 if there.dtype == "bfloat16" else there.dtype)
    pages, refusal = session.runtime.pinned(there.nbytes, there)
    if refusal:
        warnings.warn(f"herring: {refusal}; copies from and to GPUs are slower", RuntimeWarning, stacklevel=5)
    flat = np.empty(there.nbytes // dtype.itemsize, dtype) if pages is None else np.frombuffer(memoryview(pages), dtype)
    memory = flat.reshape(there.shape)
    return (Bfloat16Array(memory) if there.dtype == "bfloat16" else memory), memory


def _fetch(sources: Sequence[_Staged], limit_s: float) -> None:
    for each in sources:
        each.there.start_to_host(each.memory)
    for each in sources:
        if not each.there.wait(limit_s):
            raise HerringTimeoutError(
                f"{each.kind}: {each.role} on cuda:{each.there.device} was not ready after {limit_s:g} s: a kernel "
                "that writes it has not ended"
            )


class _Return:
    """Copies to the GPU, and what the caller gets when they are done."""

    def __init__(self, copies: Sequence[tuple[_core.DeviceArray, Any]], result: Any) -> None:
        self.result = result
        self._there = [there for there, _ in copies]
        for there, memory in copies:
            there.start_to_device(memory)

    @classmethod
    def of_new(cls, kind: str, likes: Sequence[tuple[Any, Any]], is_list: bool) -> _Return:
        """Of new arrays, each like the first of a pair with the elements of the second, an array of the host."""
        copies, results = [], []
        for like, host in likes:
            memory = getattr(host, "bits", host)
            array = _new_like(like, tuple(memory.shape))
            if array is None:
                results.append(memory.copy())  # Ours is for the next call.
                continue
            copies.append((_core.DeviceArray(array, True, f"{kind}: the result"), memory))
            results.append(array)
        return cls(copies, results if is_list else results[0])

    @classmethod
    def of_returned(cls, kind: str, like: Any, value: Any) -> _Return:
        """Of what a call has returned: an array of the host, or that and more."""
        host, *more = value if isinstance(value, tuple) else (value,)
        back = cls.of_new(kind, [(like, host)], False)
        if more:
            back.result = (back.result, *more)
        return back

    def has_ended(self) -> bool:
        """Whether all are done. Raises what went wrong."""
        return all(there.has_ended() for there in self._there)

    def wait(self, limit_s: float = _COPY_S) -> None:
        """Until all are done."""
        for there in self._there:
            if not there.wait(limit_s):
                raise HerringTimeoutError(f"the result's copy to cuda:{there.device} has not ended after {limit_s:g} s")


def _new_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Uninitialised, on the same GPU; None where its library makes no such array."""
    new_empty = getattr(array, "new_empty", None)
    if new_empty is not None:
        return new_empty(shape)
    library: Any = sys.modules.get(type(array).__module__.partition(".")[0])
    kind, empty = getattr(library, "ndarray", None), getattr(library, "empty", None)
    if empty is not None and isinstance(kind, type) and issubclass(type(array), kind):  # CuPy
        return empty(shape, dtype=array.dtype)
    return None


class DeviceHandle(Handle[Any]):
    """Of an operation on arrays of GPUs: the host's handle, and the copies back after it."""

    __slots__ = ("_back", "_inner", "_lock", "_start")

    def __init__(self, inner: Handle[Any], start: Callable[[Any], _Return]) -> None:
        self._inner = inner
        self._start = start
        self._back: _Return | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        if not self._inner.done():
            return False
        try:
            return self._copies(None).has_ended()
        except HerringError:
            return True

    def wait(self, timeout: float | timedelta | None = None) -> Any:
        back = self._copies(timeout)
        back.wait()
        return back.result

    def contributors(self) -> list[int]:
        self.wait()
        return self._inner.contributors()

    def _copies(self, timeout: float | timedelta | None) -> _Return:
        value = self._inner.wait(timeout)
        with self._lock:
            if self._back is None:
                self._back = self._start(value)
            return self._back

    def _what(self) -> str:
        return self._inner._what()
