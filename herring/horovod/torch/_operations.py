"""Torch tensors in, operations of the engine out; and the handles that stand for them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from herring import _composed as collectives
from herring import _core
from herring._composed import Call
from herring._errors import InvalidArgumentError
from herring._operation import Operation, Steps
from herring.horovod._engine.engine import GLOBAL_SET, Engine, Members, home
from herring.horovod._engine.fusion import FIRST_TICKET
from herring.horovod._engine.process_sets import ProcessSet, members_of
from herring.horovod._engine.reduce_ops import OPS, Adasum, Average, Max, Min, Product, Sum
from herring.horovod.common.exceptions import HorovodInternalError
from herring.horovod.torch import _batches
from herring.horovod.torch._batches import InBatch, Reduction
from herring.horovod.torch._device import OnDevice, Stage, door, is_on_device, is_served

# As in csrc/core/types.h: numbers on the wire, never used again.
_DTYPE_NUMBERS = {
    torch.float32: 1, torch.float64: 2, torch.float16: 3, torch.bfloat16: 4, torch.int8: 5, torch.int16: 6,
    torch.int32: 7, torch.int64: 8, torch.uint8: 9, torch.bool: 10,
}  # fmt: skip
_OP_NUMBERS = {Sum: 1, Average: 2, Min: 3, Max: 4, Product: 5}
_OPS_OF_NUMBERS = {number: op for op, number in _OP_NUMBERS.items()}


def _reader() -> _core.TensorReader | None:
    """None where torch has no C functions for it: before 2.10."""
    try:
        return _core.TensorReader((torch.Tensor, torch.nn.Parameter), "is_neg")
    except TypeError:
        return None


_READER = _reader()

Started = Operation | OnDevice | InBatch


class Handles:
    """Operations by number, from the call to synchronize()."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._operations: dict[int, tuple[Started, bool]] = {}
        self._void: set[int] = set()

    def add(self, operation: Started, *, is_one: bool = False) -> int:
        """The operation's number from now on; `is_one`: the result is a list of one, and the one is wanted."""
        with self._lock:
            number = next(self._numbers)
            self._operations[number] = operation, is_one
            return number

    def poll(self, handle: int) -> bool:
        """Whether synchronize() would not block. Raises InvalidArgumentError (a ValueError) for no handle."""
        entry = self._operations.get(handle)
        if entry is None:
            engine = home.peek()
            has_ended = None if engine is None else engine.fusions.poll(handle)
            if has_ended is not None:
                return has_ended
            raise InvalidArgumentError(f"Handle {handle} was not created or has been cleared.")
        return entry[0].poll()

    def synchronize(self, handle: int) -> Any:
        """Waits for the operation; its result, or None where it has been asked for before.

        Raises HorovodInternalError for one that clear() has made void: who knows whether its tensor holds the result.
        """
        if type(handle) is int and handle >= FIRST_TICKET and handle not in self._void:
            engine = home.peek()
            result = None if engine is None else engine.fusions.finish(handle)
            if result is not None:
                return result
        with self._lock:
            entry = self._operations.pop(handle, None)
            is_void = handle in self._void
        if is_void:
            raise HorovodInternalError(f"hvd.shutdown() was called before handle {handle} was synchronized")
        if entry is None:
            return None
        operation, is_one = entry
        return operation.wait()[0] if is_one else operation.wait()

    def clear(self) -> None:
        """Makes all of them void; the operations go on."""
        engine = home.peek()
        with self._lock:
            self._void.update(self._operations)
            self._operations.clear()
            if engine is not None:
                self._void.update(engine.fusions.in_flight)


handles = Handles()


def all_reduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    waits: bool = False,
) -> Started:
    """Results: `outputs` (the tensors themselves: in place), else new tensors."""
    members = members_of(process_set)
    if is_on_device(tensors):
        return _all_reduce_on_device(tensors, outputs, name, op, prescale_factor, postscale_factor, members, waits)
    return _all_reduce(tensors, outputs, name, op, prescale_factor, postscale_factor, members, waits=waits)


def _all_reduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    members: Members,
    *,
    waits: bool = False,
) -> Operation:
    sources = [_memory(each, "allreduce") for each in tensors]
    targets = [each.new_empty(each.shape) for each in sources] if outputs is None else list(outputs)
    # Where the caller's tensor is not contiguous the result lands elsewhere first.
    is_in_place = outputs is tensors
    results = sources if is_in_place else [_memory(each, "allreduce") for each in targets]
    steps = _reduction(members, sources, results, targets, op, prescale_factor, postscale_factor)
    return home.current().start(
        "allreduce", name, members.set_id, steps, waits=waits, single_step=op != Adasum and len(sources) == 1,
        shadow=_shadow(sources, op), op=OPS.get(op, "sum"),
    )  # fmt: skip


def _shadow(tensors: Sequence[torch.Tensor], op: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((collectives.dtype_name(each), tuple(each.shape)) for each in tensors) if op != Adasum else ()


def _reduction(
    members: Members,
    sources: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    op: int,
    prescale_factor: float,
    postscale_factor: float,
) -> Callable[[Call], Steps]:
    """The steps for CPU tensors, contiguous ones, which are scaled now."""
    scaled = [_scaled(each, prescale_factor) for each in sources]
    if op == Adasum:
        _check_adasum(members, scaled)

    def steps(call: Call) -> Steps:
        if op == Adasum:
            values = yield from collectives.adasum(call, scaled, _adasum_pair)
            for result, value in zip(results, values, strict=True):
                result.copy_(value)
        else:
            there = [_view(each) for each in results]
            here = [there[i] if each is results[i] else _view(each) for i, each in enumerate(scaled)]
            yield from collectives.all_reduce(call, here, there, OPS[op])
        for result, target in zip(results, targets, strict=True):
            _scale_(result, postscale_factor)
            if result.data_ptr() != target.data_ptr():
                target.detach().copy_(result)
        return targets

    return steps


def _all_reduce_on_device(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    members: Members,
    waits: bool,
) -> OnDevice:
    if op == Adasum:
        _check_adasum(members, tensors)
    targets = [each.detach().new_empty(each.shape) for each in tensors] if outputs is None else list(outputs)
    stage = Stage(tensors[0], "allreduce")
    hosts = stage.update(tensors, targets)

    def steps(call: Call) -> Steps:
        yield from _reduction(members, hosts, hosts, hosts, op, prescale_factor, postscale_factor)(call)
        return targets

    return stage.start(
        "allreduce", name, members.set_id, steps, waits=waits, shadow=_shadow(hosts, op), op=OPS.get(op, "sum")
    )


def all_reduce_async(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    """The handle of a reduction of one tensor. With a name, and where the tensor is small, it travels with others."""
    engine = home.current()
    fusion = engine.fusions.by_set.get(process_set.process_set_id)
    if fusion is not None and name is not None and op in _OP_NUMBERS:
        engine.fusions.start_alone = _start_alone
        number = _OP_NUMBERS[op]
        if is_on_device((tensor,)):
            there = _travel_from_device(
                engine, fusion, tensor, output, name, number, prescale_factor, postscale_factor, process_set
            )
            if there is not None:
                return handles.add(there)
        else:
            ticket = None
            if _READER is not None and output is not None:
                ticket = fusion.submit_tensor(_READER, tensor, output, name, number, prescale_factor, postscale_factor)
            if ticket is None:
                ticket = _travel(fusion, tensor, output, name, number, prescale_factor, postscale_factor)
            if ticket:
                if engine.timeline is not None:
                    engine.fusions.watch(fusion, ticket, name)
                return ticket
    outputs = None if output is None else [output]
    started = all_reduce([tensor], outputs, name, op, prescale_factor, postscale_factor, process_set)
    return handles.add(started, is_one=True)


def _travel(
    fusion: _core.Fusion,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
) -> int:
    """As Fusion.submit_tensor(), whatever the tensor; 0 also where it cannot travel."""
    if not isinstance(tensor, torch.Tensor) or not _is_plain(tensor) or tensor.dtype not in _DTYPE_NUMBERS:
        return 0
    target = torch.empty_like(tensor) if output is None else output
    if target is not tensor and not _is_plain(target):
        return 0
    source = tensor.data_ptr()
    result = source if target is tensor else target.data_ptr()
    return fusion.submit(
        name, source, result, _DTYPE_NUMBERS[tensor.dtype], op, tensor.shape, prescale, postscale, tensor, target
    )


def _travel_from_device(
    engine: Engine,
    fusion: _core.Fusion,
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> InBatch | None:
    """The same, once it is in host memory; None where it cannot travel."""
    dtype = _DTYPE_NUMBERS.get(tensor.dtype)
    if dtype is None or not is_served(tensor) or tensor.layout is not torch.strided:
        return None
    target = tensor.detach().new_empty(tensor.shape) if output is None else output
    if tensor.nbytes > engine.fusions.tensor_bytes or not door.takes(tensor, target):
        return None
    reduction = Reduction(name, dtype, op, tensor.shape, prescale, postscale)
    return _batches.add(engine, fusion, members_of(process_set).set_id, tensor, target, reduction)


def _start_alone(
    tensor: torch.Tensor, output: torch.Tensor, name: str, op: int, prescale: float, postscale: float, set_id: int
) -> Operation:
    members = home.current().members(set_id)
    return _all_reduce([tensor], [output], name, _OPS_OF_NUMBERS[op], prescale, postscale, members)


def all_reduce_in_place(
    tensors: Sequence[torch.Tensor],
    name: str,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> Callable[[], list[torch.Tensor]]:
    """Starts it; what is returned waits for it, and returns the tensors."""
    if len(tensors) > 1:
        return all_reduce(tensors, tensors, name, op, prescale_factor, postscale_factor, process_set).wait
    only = tensors[0]
    handle = all_reduce_async(only, only, name, op, prescale_factor, postscale_factor, process_set)
    return lambda: [handles.synchronize(handle)]


def add_up(numbers: torch.Tensor, name: str, process_set: ProcessSet) -> Operation:
    """Starts to sum them over the ranks, in place; the result is a list of the one tensor. The name is free again when
    it has ended, whether or not somebody has seen that."""
    members, one = members_of(process_set), [numbers]
    operation = home.current().start(
        "allreduce", name, members.set_id, _reduction(members, one, one, one, Sum, 1.0, 1.0), shadow=_shadow(one, Sum),
        op=OPS[Sum],
    )  # fmt: skip
    operation.on_done(operation.poll)
    return operation


def memory_for(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Elements in memory that this host's ranks share and the network can reach, so that nothing is copied on its way,
    where there is such memory; else in any. Uninitialised."""
    session = home.current().session
    if device.type == "cpu" and session.elastic is None and session.job.size > 1:
        memory = session.runtime.allocate(count * dtype.itemsize)
        if memory is not None:
            return torch.frombuffer(memoryview(memory), dtype=dtype)
    return torch.empty(count, dtype=dtype, device=device)


def is_dtype_served(dtype: torch.dtype) -> bool:
    """Whether tensors of it can be reduced."""
    return dtype in _DTYPE_NUMBERS


def _is_plain(tensor: torch.Tensor) -> bool:
    """Its memory holds it as it is, one element after the other."""
    return tensor.is_cpu and tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_neg()


def all_gather(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, *, waits: bool = False
) -> Started:
    """Results: new tensors."""
    if is_on_device(tensors):
        stage = Stage(tensors[0], "allgather")
        hosts = [stage.read(each.reshape(1) if each.dim() == 0 else each) for each in tensors]
        return stage.start(
            "allgather", name, members_of(process_set).set_id,
            lambda call: collectives.all_gather(call, hosts, stage.host_like), waits=waits,
            finish=lambda results: [stage.place(each) for each in results],
        )  # fmt: skip
    sources = [_memory(each, "allgather") for each in tensors]
    sources = [each.reshape(1) if each.dim() == 0 else each for each in sources]

    def steps(call: Call) -> Steps:
        return collectives.all_gather(call, sources, _new)

    return home.current().start("allgather", name, members_of(process_set).set_id, steps, waits=waits)


def broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    waits: bool = False,
) -> Started:
    """`root_rank` is a rank of the job, also with process sets. Result: `output`, which may be `tensor`."""
    members = members_of(process_set)
    if root_rank not in members.ranks:
        raise InvalidArgumentError(
            f"broadcast: root rank {root_rank} is not among ranks {list(members.ranks)} of process set {members.set_id}"
        )
    root = members.ranks.index(root_rank)
    if is_on_device([tensor]):
        return _broadcast_on_device(tensor, output, root, name, members, waits)
    source, result = _memory(tensor, "broadcast"), _memory(output, "broadcast")
    if tensor is output:
        source = result

    def steps(call: Call) -> Steps:
        yield from collectives.broadcast(call, source, result, root)
        if result.data_ptr() != output.data_ptr():
            output.detach().copy_(result)
        return output

    return home.current().start("broadcast", name, members.set_id, steps, waits=waits, single_step=True)


def _broadcast_on_device(
    tensor: torch.Tensor, output: torch.Tensor, root: int, name: str | None, members: Members, waits: bool
) -> OnDevice:
    stage = Stage(tensor, "broadcast")
    if root == members.index:
        host = stage.read(tensor)
        if output is not tensor:
            stage.write_from(output, host)
    else:
        host = stage.write(output)

    def steps(call: Call) -> Steps:
        yield from collectives.broadcast(call, host, host, root)
        return output

    return stage.start("broadcast", name, members.set_id, steps, waits=waits)


def all_to_all(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
    *,
    waits: bool = False,
) -> Started:
    """Result: (rows that came, how many from each rank); the numbers are of the dtype of `splits`, else int32."""
    members = members_of(process_set)
    stage = Stage(tensor, "alltoall") if is_on_device([tensor]) else None
    source = _memory(tensor, "alltoall") if stage is None else tensor
    if source.dim() == 0:
        raise InvalidArgumentError("alltoall: the tensor is a scalar; it takes at least one dimension")
    dtype = torch.int32
    counts: list[int] | None = None
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64):
            raise InvalidArgumentError(f"alltoall: splits are {splits.dtype}; they must be int32 or int64")
        dtype, counts = splits.dtype, splits.tolist()
    elif splits is not None:
        counts = [int(each) for each in splits]
    # Here, so that a bad call starts nothing.
    sent = _core.checked_splits(counts, source.shape[0], len(members.ranks))

    host, new = (source, _new) if stage is None else (stage.read(source), stage.host_like)

    def steps(call: Call) -> Steps:
        result, received = yield from collectives.all_to_all(call, host, sent, new)
        return result, torch.tensor(received, dtype=dtype)

    if stage is None:
        return home.current().start("alltoall", name, members.set_id, steps, waits=waits)
    return stage.start(
        "alltoall", name, members.set_id, steps, waits=waits, finish=lambda told: (stage.place(told[0]), told[1])
    )


def reduce_scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    *,
    waits: bool = False,
) -> Started:
    """Results: new tensors."""
    members = members_of(process_set)
    if op not in OPS:
        raise InvalidArgumentError("reducescatter: op must be hvd.Average, Sum, Min, Max or Product")
    if is_on_device(tensors):
        return _reduce_scatter_on_device(tensors, name, op, prescale_factor, postscale_factor, members, waits)
    sources = [_scaled(_memory(each, "reducescatter"), prescale_factor) for each in tensors]
    _check_rows(sources)
    whole = [each.new_empty(each.shape) for each in sources]

    def steps(call: Call) -> Steps:
        parts = yield from collectives.reduce_scatter(call, sources, whole, OPS[op])
        results = [part.clone() for part in parts]  # A view would keep all of the sum.
        for result in results:
            _scale_(result, postscale_factor)
        return results

    return home.current().start("reducescatter", name, members.set_id, steps, waits=waits, single_step=True)


def _check_rows(tensors: Sequence[torch.Tensor]) -> None:
    if any(each.dim() == 0 for each in tensors):
        raise InvalidArgumentError("reducescatter: a tensor is a scalar; it takes at least one dimension")


def _reduce_scatter_on_device(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    members: Members,
    waits: bool,
) -> OnDevice:
    _check_rows(tensors)
    rows = [_core.rows_of(each.shape[0], len(members.ranks), members.index or 0) for each in tensors]
    targets = [
        each.detach().new_empty((last - first, *each.shape[1:]))
        for each, (first, last) in zip(tensors, rows, strict=True)
    ]
    stage = Stage(tensors[0], "reducescatter")
    hosts = [stage.read(each) for each in tensors]
    for target, host, (first, last) in zip(targets, hosts, rows, strict=True):
        stage.write_from(target, host[first:last])

    def steps(call: Call) -> Steps:
        scaled = [_scaled(each, prescale_factor) for each in hosts]
        parts = yield from collectives.reduce_scatter(call, scaled, hosts, OPS[op])
        for part in parts:
            _scale_(part, postscale_factor)
        return targets

    return stage.start("reducescatter", name, members.set_id, steps, waits=waits)


def barrier(process_set: ProcessSet) -> None:
    """Returns when every rank of the set has come."""
    home.current().run("barrier", None, members_of(process_set).set_id, collectives.barrier)


def _memory(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """The tensor's own memory where it is contiguous, else a copy. Raises InvalidArgumentError where it cannot go."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgumentError(f"{what} takes torch tensors, not {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(
            f"{what}: all tensors of a call must be on one device, got the CPU and {tensor.device}"
        )
    if tensor.layout != torch.strided:
        raise InvalidArgumentError(
            f"{what}: the tensor is sparse ({tensor.layout}); use hvd.sparse_allreduce_async or tensor.to_dense()"
        )
    collectives.dtype_name(tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _view(tensor: torch.Tensor) -> Any:
    """Its memory as a numpy array, which the core reads in a third of the time, where numpy has the type."""
    return tensor if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _new(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return like.new_empty(shape)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Integers are multiplied in float64 and truncated, 16-bit floats multiplied in float32."""
    if factor == 1.0:
        return tensor
    return (tensor if tensor.dtype.is_floating_point else tensor.double()).mul(factor).to(tensor.dtype)


def _scale_(tensor: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        tensor.copy_(_scaled(tensor, factor))


def _check_adasum(members: Members, tensors: Sequence[torch.Tensor]) -> None:
    if members.set_id != GLOBAL_SET:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    size = len(members.ranks)
    if size & (size - 1):
        raise NotImplementedError(f"Adasum works for a number of ranks that is a power of 2; these are {size}")
    if not all(each.dtype.is_floating_point for each in tensors):
        raise InvalidArgumentError("Adasum is for tensors of floating point")


def _adasum_pair(lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """Adasum of two (Maleki et al., "Scaling Distributed Training with Adaptive Summation", equation 4): each loses
    half of its projection on the other, so that equal gradients average and orthogonal ones add."""
    a, b = lower.double(), upper.double()
    dot, a_square, b_square = (a * b).sum(), (a * a).sum(), (b * b).sum()
    a_factor = 1.0 if a_square == 0 else 1.0 - dot / (2 * a_square)
    b_factor = 1.0 if b_square == 0 else 1.0 - dot / (2 * b_square)
    return (a_factor * a + b_factor * b).to(lower.dtype)
