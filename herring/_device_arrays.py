"""Arrays on GPUs, for the functions on arrays: by way of the host's memory, where the operation takes place.

A call waits until its arrays are in the host's memory. Results are on the GPU when it returns; with async_op, when the
handle is done.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

from herring import _core
from herring._arrays import is_on_gpu
from herring._context import Session, process
from herring._errors import HerringError, HerringTimeoutError, InvalidArgumentError, UnavailableError, text_of
from herring._handle import Handle, to_seconds

# A copy back waits for nothing but the GPU: so long at least, also where the operation has less.
_COPY_S = 60.0


def through_host(
    refused: InvalidArgumentError,
    call: Callable[..., Any],
    given: Any,
    *arguments: Any,
    listed: list[Any] | None = None,
    results: Literal["same", "new", "returned"],
    **options: Any,
) -> Any:
    """What `call` does, for an array on a GPU or a list of such, with memory of the host instead; `call` has refused
    the arrays themselves, and that is raised where they are not on a GPU.

    `given`: an array; with `listed`, whose arrays are taken then, what the caller has passed for that.
    `results`: `call` works in place, and "same" is for what is `given`, "new" for new arrays (or the option `out`);
    "returned": `call` returns new arrays.
    """
    if not any(is_on_gpu(each) for each in (listed or [given])):
        raise refused
    try:
        return _through_host(call, given, arguments, listed, results, **options)
    except BaseException as error:
        _forget(refused, error)
        raise


def _forget(refused: InvalidArgumentError, error: BaseException) -> None:
    """`error` came while `refused` was handled, which is no news to the user."""
    last = error
    while last.__context__ is not None and last.__context__ is not refused:
        last = last.__context__
    last.__context__ = refused.__context__


def _through_host(
    call: Callable[..., Any],
    given: Any,
    arguments: Sequence[Any],
    listed: list[Any] | None,
    results: Literal["same", "new", "returned"],
    *,
    out: Any = None,
    async_op: bool = False,
    timeout: float | timedelta | None = None,
    **options: Any,
) -> Any:
    session = process.current()
    if session.config.cuda == "off":
        raise InvalidArgumentError("the array is on a CUDA device, and HERRING_CUDA is off")
    is_list = listed is not None
    places = [given] if listed is None else listed
    kind = call.__name__.rstrip("_")
    limit = to_seconds(timeout) or session.timeout_s
    sources = []
    for i, each in enumerate(places):
        role = f"array {i} of the list" if is_list else "the array"
        sources.append(_Staged(session, each, kind, role, results == "same"))
    targets = None if out is None else [sources[0].into(out)]
    _fetch(sources, limit)
    hosts = [each.host for each in sources]
    value = call(hosts if is_list else hosts[0], *arguments, async_op=async_op, timeout=timeout, **options)

    def start(value: Any) -> _Return:
        if results == "returned":
            return _Return.of_returned(kind, places[0], value)
        if results == "same":
            return _Return([(each.there, each.memory) for each in sources], given)
        if targets is not None:
            return _Return(targets, out)
        return _Return.of_new(kind, list(zip(places, hosts, strict=True)), is_list)

    longest = max(limit, _COPY_S)
    if async_op:
        return DeviceHandle(value, start, longest)
    back = start(value)
    back.wait(kind, longest)
    return back.result


class _Staged:
    """An array on a GPU, and memory of the host that stands for it."""

    def __init__(self, session: Session, array: Any, kind: str, role: str, is_written: bool) -> None:
        self.kind, self.role = kind, role
        if not is_on_gpu(array):
            raise InvalidArgumentError(
                f"{kind}: {role} is not on a CUDA device, but others are; pass all on GPUs, or none"
            )
        with _its_device(array):
            source = array if is_written else _contiguous(array)
            self.there = _core.DeviceArray(source, is_written, f"{kind}: {role}")
        self.host, self.memory = _host_array(session, self.there)

    def into(self, out: Any) -> tuple[_core.DeviceArray, Any]:
        """Where the result goes instead."""
        if not is_on_gpu(out):
            raise InvalidArgumentError(f"{self.kind}: {self.role} is on a CUDA device, and out is not")
        with _its_device(out):
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
        warnings.warn(f"herring: {refusal}; copies from and to GPUs are slower", RuntimeWarning, stacklevel=6)
    flat = np.empty(there.nbytes // dtype.itemsize, dtype) if pages is None else np.frombuffer(memoryview(pages), dtype)
    memory = flat.reshape(there.shape)
    return (Bfloat16Array(memory) if there.dtype == "bfloat16" else memory), memory


def _fetch(sources: Sequence[_Staged], limit_s: float) -> None:
    for each in sources:
        each.there.start_to_host(each.memory)
    end = time.monotonic() + limit_s
    for each in sources:
        if not each.there.wait(max(end - time.monotonic(), 0)):
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
            with _its_device(like):
                try:
                    array = _new_like(like, tuple(memory.shape))
                except Exception as error:  # Any library's.
                    raise UnavailableError(f"{kind}: no memory for the result on the GPU: {text_of(error)}") from error
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

    def wait(self, what: str, limit_s: float) -> None:
        """Until all are done."""
        end = time.monotonic() + limit_s
        for there in self._there:
            if not there.wait(max(end - time.monotonic(), 0)):
                raise HerringTimeoutError(
                    f"{what}: the result's copy to cuda:{there.device} has not ended after {limit_s:g} s: a kernel "
                    "that was submitted before it has not ended"
                )


def _new_like(array: Any, shape: tuple[int, ...]) -> Any:
    """Uninitialised, on the same GPU; None where its library makes no such array."""
    new_empty = getattr(array, "new_empty", None)
    if new_empty is not None:
        return new_empty(shape)
    library = _library(array)
    return None if library is None else library.empty(shape, dtype=array.dtype)


def _contiguous(array: Any) -> Any:
    """Row-major; the same array where it is."""
    contiguous = getattr(array, "contiguous", None)
    if contiguous is not None:
        return contiguous()
    library = _library(array)
    return array if library is None else library.ascontiguousarray(array)


def _library(array: Any) -> Any:
    """The module of its class or of one that this is derived from, where it is one like numpy: CuPy."""
    for kind in type(array).__mro__:
        library: Any = sys.modules.get(kind.__module__.partition(".")[0])
        if getattr(library, "ndarray", None) is kind:
            return library
    return None


def _its_device(array: Any) -> contextlib.AbstractContextManager[Any]:
    """Its GPU is the thread's current one in it. Libraries make a stream wait for the current GPU's alone, and make new
    arrays there."""
    if getattr(array, "is_cuda", False):
        torch: Any = sys.modules["torch"]
        place: contextlib.AbstractContextManager[Any] = torch.cuda.device_of(array)
    else:
        place = getattr(array, "device", contextlib.nullcontext())
    return place if hasattr(place, "__enter__") else contextlib.nullcontext()


class DeviceHandle(Handle[Any]):
    """Of an operation on arrays of GPUs: the host's handle, and the copies back after it."""

    __slots__ = ("_back", "_inner", "_lock", "_longest_s", "_start")

    def __init__(self, inner: Handle[Any], start: Callable[[Any], _Return], longest_s: float) -> None:
        self._inner = inner
        self._start = start
        self._longest_s = longest_s
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
        limit, begun = to_seconds(timeout), time.monotonic()
        back = self._copies(limit)
        back.wait(self._what(), self._longest_s if limit is None else max(begun + limit - time.monotonic(), 0))
        return back.result

    def contributors(self) -> list[int]:
        self.wait()
        return self._inner.contributors()

    def _copies(self, timeout: float | None) -> _Return:
        value = self._inner.wait(timeout)
        with self._lock:
            if self._back is None:
                self._back = self._start(value)
            return self._back

    def _what(self) -> str:
        return self._inner._what()
