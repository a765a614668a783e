"""Objects between ranks, for any framework: pickled, and sealed with the job's secret."""

from __future__ import annotations

import pickle
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from herring import _composed as collectives
from herring._errors import InvalidArgumentError
from herring._sealed import LENGTH_BYTES, load, seal_of
from herring.horovod._engine.engine import home
from herring.horovod._engine.process_sets import ProcessSet, members_of

_Bytes = npt.NDArray[np.uint8]


def broadcast_object(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    """Rank `root_rank`'s object, on every rank of the process set; there the very one."""
    engine, members = home.current(), members_of(process_set)
    set_id = members.set_id
    if root_rank not in members.ranks:
        raise InvalidArgumentError(
            f"broadcast: root rank {root_rank} is not among ranks {list(members.ranks)} of process set {set_id}"
        )
    seal, is_root = seal_of(engine.session), engine.rank == root_rank
    name = "object" if name is None else name
    purpose = f"broadcast_object {name!r} of process set {set_id}"
    length, data = np.empty(LENGTH_BYTES, np.uint8), np.empty(0, np.uint8)
    if is_root:
        sealed = seal.close(pickler().dumps(obj), purpose, root_rank)
        length = _array(seal.close_length(len(sealed), purpose, root_rank))
        data = _array(sealed)

    def send(array: _Bytes, part: str) -> None:
        root = members.ranks.index(root_rank)
        engine.run(
            "broadcast", f"{name}.{part}", set_id, lambda call: collectives.broadcast(call, array, array, root),
            single_step=True,
        )  # fmt: skip

    send(length, "size")
    if not is_root:
        data = np.empty(seal.open_length(length.data, purpose, root_rank), np.uint8)
    send(data, "data")
    return obj if is_root else load(seal.open(data.data, purpose, root_rank))


def allgather_object(obj: Any, name: str | None, process_set: ProcessSet) -> list[Any]:
    """The ranks' objects, in order of rank."""
    engine, members = home.current(), members_of(process_set)
    set_id = members.set_id
    seal = seal_of(engine.session)
    name = "object" if name is None else name
    purpose = f"allgather_object {name!r} of process set {set_id}"
    data = _array(seal.close(pickler().dumps(obj), purpose, engine.rank))
    parts = [data, np.asarray([data.size], np.int64)]
    joined, sizes = engine.run("allgather", name, set_id, lambda call: collectives.all_gather(call, parts, _new))
    starts = [0, *np.cumsum(sizes).tolist()]  # Where these are wrong, a seal is.
    places = zip(members.ranks, starts, starts[1:], strict=False)
    pickled = [seal.open(joined[start:end].data, purpose, rank) for rank, start, end in places]
    return [load(each) for each in pickled]


def _new(like: Any, shape: tuple[int, ...]) -> Any:
    return np.empty(shape, like.dtype)


def _array(data: bytes) -> _Bytes:
    return np.frombuffer(bytearray(data), np.uint8)


def pickler() -> ModuleType:
    """cloudpickle, where it is installed."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    module: ModuleType = cloudpickle
    return module
