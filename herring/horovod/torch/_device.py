"""Tensors on GPUs: copied to host memory, reduced there as CPU tensors are, and copied back (docs/gpu.md)."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from herring._composed import Call, dtype_name
from herring._errors import HerringTimeoutError, InvalidArgumentError, TransportError
from herring._operation import Operation, Steps
from herring.horovod._engine.engine import Engine, home

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
        self._pid = 0
        self._engine: Engine | None = None
        self._memory: Any = None
        # After the session's own exit handler, which was registered later: its threads call into Python until then.
        atexit.register(self._stop)

    @property
    def binding(self) -> Any:
        """Raises UnavailableError where it cannot be built."""
        with self._lock:
            if self._binding is None:
                from herring.torch._binding import load

                binding = load()
                self._stager, self._pid = binding.Stager(), os.getpid()
                self._binding = binding
            return self._binding

    def hand(self, engine: Engine, device: torch.device, call: str) -> Any:
        """Copies for a call, to be put together; after what the current stream has now."""
        binding = self.binding
        memory = self._memory_of(engine)
        return binding.hand(self._stager, memory, device, call, engine.session.config.timeout_s)

    def batch(self, engine: Engine, device: torch.device, call: str) -> Any:
        """A batch of copies (bindings/torch/batch.h)."""
        binding = self.binding
        memory = self._memory_of(engine)
        return binding.batch(self._stager, memory, device, call, engine.session.config.timeout_s)

    def takes(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """Whether they can go in a batch: dense, contiguous, of one type and shape, at most 1 MB (Pack::takes)."""
        return self.binding.takes(source, target)  # type: ignore[no-any-return]

    def _memory_of(self, engine: Engine) -> Any:
        with self._lock:
            if self._engine is not engine:
                self._engine, self._memory = engine, self._binding.HostMemory(engine.runtime.capsule())
                engine.late = self._stager.wait_until_started
                engine.closing.append(self._forget)
            return self._memory

    def _stop(self) -> None:
        """Python ends; a forked child has no such thread."""
        if self._stager is not None and os.getpid() == self._pid:
            self._stager.stop()

    def _forget(self) -> None:
        """The engine goes, and its memory when the last copy is done."""
        with self._lock:
            self._engine = self._memory = None


door = _Door()


def moment(device: torch.device) -> Any:
    """What the current stream has now. Its block_current_stream() makes another stream go on after that."""
    return door.binding.moment(device)


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
        self._copies = door.hand(engine, device, what)
        self._writes = False

    # -- which tensors; before start() ----------------------------------------------------------------------------

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor, which will be what `tensor` is now."""
        self._check(tensor)
        return self._copies.read(tensor.detach())  # type: ignore[no-any-return]

    def update(self, tensors: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host tensors, which will be what `tensors` are now, and which `targets` will be in the end."""
        for each in (*tensors, *targets):
            self._check(each)
        return self._copies.update(list(tensors), list(targets))  # type: ignore[no-any-return]

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
