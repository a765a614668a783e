"""Tensors on GPUs: copied to host memory, reduced there as CPU tensors are, and copied back (docs/gpu.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from herring import _core
from herring._composed import Call, dtype_name
from herring._errors import HerringError, HerringTimeoutError, InvalidArgumentError, TransportError
from herring._operation import Operation, Steps
from herring.horovod._engine.engine import Engine, home
from herring.horovod._engine.fusion import Fusions
from herring.horovod.common.exceptions import HorovodInternalError

# What torch calls the devices that have streams and memory of their own (the second: of plug-ins, and of the tests).
_KINDS = ("cuda", "privateuseone")


def is_on_device(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a call is about tensors that are not in host memory: the first one says so."""
    return bool(tensors) and isinstance(tensors[0], torch.Tensor) and not tensors[0].is_cpu


def is_served(tensor: torch.Tensor) -> bool:
    """Whether it is on a device whose tensors calls take."""
    return tensor.device.type in _KINDS and home.current().session.config.cuda != "off"


class _Door:
    """What copies: torch's binding and its stager, both there from the first tensor on a GPU on; and the host memory of
    the engine that there is now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._binding: Any = None
        self._stager: Any = None
        self._engine: Engine | None = None
        self._memory: Any = None

    @property
    def binding(self) -> Any:
        """Raises UnavailableError where it cannot be built."""
        with self._lock:
            if self._binding is None:
                from herring.torch._binding import load

                binding = load()
                self._stager = binding.Stager()
                self._binding = binding
            return self._binding

    def hand(self, engine: Engine, device: torch.device, call: str) -> Any:
        """Copies for a call, to be put together; after what the current stream has now."""
        binding = self.binding
        with self._lock:
            if self._engine is not engine:
                self._engine, self._memory = engine, binding.HostMemory(engine.runtime.capsule())
                engine.late = self._stager.wait_until_started
                engine.closing.append(self._forget)
            memory = self._memory
        return binding.hand(self._stager, memory, device, call, engine.session.config.timeout_s)

    def _forget(self) -> None:
        """The engine goes, and its memory when the last copy is done."""
        with self._lock:
            self._engine = self._memory = None


_door = _Door()


def moment(device: torch.device) -> Any:
    """What the current stream has now. Its block_current_stream() makes another stream go on after that."""
    return _door.binding.moment(device)


class Stage:
    """The host tensors of one call, which stand for its tensors on a GPU; and, as a step of its operation, the wait
    until they have been copied."""

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        """Raises InvalidArgumentError for a device that is not served, RuntimeError while a graph is captured."""
        device, engine = tensor.device, home.current()
        if device.type not in _KINDS:
            raise InvalidArgumentError(
                f"{what}: the tensor is on {device}; tensors on the CPU and on CUDA devices work: use tensor.cpu()"
            )
        if engine.session.config.cuda == "off":
            raise InvalidArgumentError(
                f"{what}: the tensor is on {device}, and HERRING_CUDA=off: pass tensor.cpu(), or start the job with "
                "HERRING_CUDA=auto"
            )
        self._what = what
        self._copies = _door.hand(engine, device, what)
        self._writes = False

    # -- which tensors; before start() ----------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor, which will be what `tensor` is now."""
        self._check(tensor)
        return self._copies.read(tensor.detach())  # type: ignore[no-any-return]

    def write(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor, which `tensor` will be in the end."""
        self._check(tensor)
        return self._copies.write(tensor.detach())  # type: ignore[no-any-return]

    def write_from(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        """The same, for a host tensor that is there."""
        self._copies.write_from(tensor.detach(), host)

    def host_like(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A new host tensor; also later."""
        return self._copies.host_like(like, list(shape))  # type: ignore[no-any-return]

    def _check(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(f"{self._what} takes torch tensors, not {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise InvalidArgumentError(
                f"{self._what}: the tensor is sparse ({tensor.layout}); use hvd.sparse_allreduce_async or "
                "tensor.to_dense()"
            )
        dtype_name(tensor)

    # -- the operation --------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        name: str | None,
        set_id: int,
        host_steps: Callable[[Call], Steps],
        *,
        waits: bool,
        finish: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> OnDevice:
        """As Engine.start(); `host_steps` begin when the host tensors are there. What they return is the result, or
        what `finish` makes of it in the thread that wants it."""

        def steps(call: Call) -> Steps:
            yield [self]
            result = yield from host_steps(call)
            self._write_back()
            return result

        self._copies.start()
        return OnDevice(home.current().start(kind, name, set_id, steps, waits=waits, **options), self, finish)

    def start_travel(
        self,
        fusion: _core.Fusion,
        name: str,
        set_id: int,
        submit: Callable[[], int],
        start_alone: Callable[[], Operation],
        target: torch.Tensor,
    ) -> OnDevice:
        """A small allreduce, which travels with others once it has been copied: `submit` gives its ticket, or 0 where
        it has to go alone. `target` is the result."""
        engine = home.current()
        place = (engine, set_id, name)
        if place in _names:
            raise InvalidArgumentError(
                f"an operation named allreduce.{name} is in flight already (duplicate name); synchronize it first, or "
                "choose another name"
            )

        def steps() -> Steps:
            yield [self]
            ticket = submit()
            if ticket:
                engine.fusions.watch(fusion, ticket, name)
                yield [_Travels(engine.fusions, fusion, ticket)]
                engine.fusions.finish(ticket)
            else:
                alone = start_alone()
                yield [_Alone(alone)]
                alone.wait()
            self._write_back()
            return target

        def explain(error: HerringError) -> Exception:
            if isinstance(error, InvalidArgumentError):
                return error
            failure = HorovodInternalError(f"allreduce.{name}: {error}")
            failure.__cause__ = error
            return failure

        self._copies.start()
        operation = Operation(f"allreduce {name!r}", steps(), engine.fusions.longest_s, explain)
        _names.add(place)
        operation.on_seen(lambda: _names.discard(place))
        operation.begin(watched=True)
        return OnDevice(operation, self)

    def _write_back(self) -> None:
        self._copies.write_back()
        self._writes = True

    def is_over(self) -> bool:
        """Of an operation that has ended: the GPU's tensors are as they will be."""
        return not self._writes or self._copies.is_written()

    def show(self, result: Any, finish: Callable[[Any], Any] | None) -> Any:
        """The result, for the current stream of this thread."""
        self._copies.block_current_stream()
        return result if finish is None else finish(result)

    def place(self, host: torch.Tensor) -> torch.Tensor:
        """A new tensor on the GPU, for the current stream of this thread."""
        return self._copies.place(host)  # type: ignore[no-any-return]

    # -- as _core.Work has it: the copies to the host -------------------------------------------------------------

    def done(self) -> bool:
        return self._copies.is_read()  # type: ignore[no-any-return]

    def wait(self, timeout: float, *, blocks: bool = False) -> bool:
        return self._copies.wait(timeout)  # type: ignore[no-any-return]

    def check(self) -> None:
        failure = self._copies.failure()
        if failure is not None:
            text, is_timeout = failure
            raise HerringTimeoutError(text) if is_timeout else TransportError(text)

    def on_done(self, callback: Callable[[], object]) -> None:
        self._copies.on_read(callback)


# Small tensors by name that somebody has not seen the end of: engine, process set and name.
_names: set[tuple[object, int | None, str]] = set()


class OnDevice:
    """An operation on tensors of a GPU, as Operation is one on the host."""

    def __init__(self, operation: Operation, stage: Stage, finish: Callable[[Any], Any] | None = None) -> None:
        self._operation = operation
        self._stage: Stage | None = stage
        self._finish = finish
        self._result: Any = None

    def poll(self) -> bool:
        """Whether it has ended, well or not, and the tensors are as they will be."""
        return self._operation.poll() and (self._stage is None or self._stage.is_over())

    def wait(self) -> Any:
        """The result, for the current stream of this thread: the host waits until the copies to the GPU have been put
        on their stream, the current stream until they are done. Raises why there is no result."""
        result = self._operation.wait()
        stage, self._stage = self._stage, None
        if stage is not None:
            self._result = stage.show(result, self._finish)
        return self._result


class _Alone:
    """An operation as a step of another one."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation

    def done(self) -> bool:
        return self._operation.is_done()  # type: ignore[no-any-return]

    def wait(self, timeout: float, *, blocks: bool = False) -> bool:
        return self._operation.wait_for(timeout)  # type: ignore[no-any-return]

    def check(self) -> None:
        """It is asked by its own wait()."""

    def on_done(self, callback: Callable[[], object]) -> None:
        self._operation.on_done(callback)


class _Travels:
    """A tensor that travels with others as a step of an operation."""

    def __init__(self, fusions: Fusions, fusion: _core.Fusion, ticket: int) -> None:
        self._fusions, self._fusion, self._ticket = fusions, fusion, ticket

    def done(self) -> bool:
        return self._fusions.is_done(self._fusion, self._ticket)

    def wait(self, timeout: float, *, blocks: bool = False) -> bool:
        return self._fusions.wait_for(self._fusion, self._ticket, timeout)

    def check(self) -> None:
        """It is asked by finish()."""

    def on_done(self, callback: Callable[[], object]) -> None:
        self._fusions.on_end(self._fusion, self._ticket, callback)
