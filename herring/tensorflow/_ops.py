"""Herring's operations in TensorFlow, and the job that they go to."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from herring._context import Session, process
from herring._errors import HerringError, UnavailableError
from herring._log import say
from herring.tensorflow import _gpu_stream

ALL_REDUCE, BROADCAST, ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = 1, 2, 7, 8, 10  # Numbers of csrc/core/types.h.
RANK, SIZE, LOCAL_RANK, LOCAL_SIZE, INCLUDED = range(5)  # Numbers of bindings/tensorflow/kernels.cc.
_REDUCE = {"sum": 1, "average": 2, "min": 3, "max": 4, "product": 5}
_OLDEST = (2, 16)
_NEWEST_ASIDE = (2, 21)  # Newer ones may have another class where HerringWaitAside looks (wait_aside() in kernels.cc).
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


# What the library has beside operations, and what it takes.
TELL = ctypes.CFUNCTYPE(
    None, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_int64), ctypes.c_int32,
)  # fmt: skip
TAKE_USE = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64)
_NATIVE: dict[str, list[Any]] = {
    "attach": [ctypes.c_void_p, ctypes.c_double],
    "serve_gpus": [ctypes.c_void_p, ctypes.c_int],
    "begin_again": [],
    "set_group": [ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32],
    "set_local": [ctypes.c_uint32, ctypes.c_uint32],
    "listen": [TELL],
    "uses": [TAKE_USE],
    "learn": [ctypes.c_uint32, ctypes.c_char_p, ctypes.c_uint64],
}


@dataclass(frozen=True)
class Group:
    """The ranks that take part.

    `has_key`: they find each other's calls by keys, also those without a name, as Horovod's do; else calls without a
    name go by their order.
    """

    number: int = 0
    has_key: bool = False


JOB = Group()


class _Library:
    """libherring_tensorflow.so, in this process."""

    def __init__(self) -> None:
        version = tuple(int(part) for part in tf.__version__.split(".")[:2])
        self.waits_aside = version <= _NEWEST_ASIDE
        if version < _OLDEST:
            raise HerringError(f"TensorFlow {tf.__version__} is too old; herring.tensorflow needs 2.16 or newer")
        path = Path(__file__).resolve().parent.parent / "lib" / "libherring_tensorflow.so"
        try:
            self.ops: Any = tf.load_op_library(str(path))
        except (OSError, tf.errors.OpError) as error:
            raise HerringError(
                f"TensorFlow {tf.__version__} cannot load {path}: {error}. Install Herring again: pip install ."
            ) from error
        self.native = ctypes.PyDLL(str(path))
        for function, arguments in _NATIVE.items():
            getattr(self.native, f"herring_tensorflow_{function}").argtypes = arguments
            getattr(self.native, f"herring_tensorflow_{function}").restype = None
        self.native.herring_tensorflow_pending.restype = ctypes.c_uint64
        self._open = ctypes.pythonapi.PyCapsule_GetPointer
        self._open.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self._open.restype = ctypes.c_void_p
        self._session: Session | None = None
        self._serves_gpus = False
        # Tensors on GPUs are taken as they are, by ALL_REDUCE and BROADCAST outside of sessions.
        self.by_stream = False
        process.on_start(self.attach)  # Graphs that are there go to the new job, whoever joins it.

    def attach(self) -> Session:
        """Operations go to the job that this process is in. Raises ShutdownError where it is in none."""
        session = process.current()
        if session is not self._session:
            self._serve_gpus(session)
            capsule = session.runtime.capsule()
            self.native.herring_tensorflow_attach(self._open(capsule, b"herring.runtime"), session.timeout_s)
            if session.elastic is None:  # There it may change, and the runtime is asked.
                self.native.herring_tensorflow_set_local(session.local_rank, session.local_size)
            self._session = session
        return session

    def _serve_gpus(self, session: Session) -> None:
        """Once in a process, as its first job says. Raises UnavailableError where that cannot be."""
        setting = session.config.tensorflow_stream
        if session.config.cuda == "off":
            if setting == "on":
                raise UnavailableError("HERRING_TENSORFLOW_STREAM=on: HERRING_CUDA is off")
            return
        if self._serves_gpus:
            return
        find = None
        if setting != "off":
            # TensorFlow opens the driver for this, and does not see CUDA_VISIBLE_DEVICES that is set later.
            if not _gpu_stream.has_gpus():
                return
            try:
                find = _gpu_stream.find()
            except UnavailableError as error:
                if setting == "on":
                    raise UnavailableError(f"HERRING_TENSORFLOW_STREAM=on: {error}") from None
                say(logging.WARNING, f"HERRING_TENSORFLOW_STREAM=auto: TensorFlow copies tensors: {error}", "herring")
        self.native.herring_tensorflow_serve_gpus(find, self.waits_aside)
        self.by_stream = find is not None
        self._serves_gpus = True

    def pending(self) -> int:
        """Operations that were submitted and not waited for."""
        return int(self.native.herring_tensorflow_pending())


@functools.cache
def library() -> _Library:
    """Loaded once. Raises HerringError that says why it cannot be."""
    return _Library()


def is_loaded() -> bool:
    """Whether library() has been called, without which there are no operations in any graph."""
    return library.cache_info().currsize > 0


# What nobody adds up can travel under another dtype of its size.
_MOVED_AS = {"uint16": tf.int16, "uint32": tf.int32, "uint64": tf.int64, "complex64": tf.int64}


def is_served(value: Any) -> bool:
    """Its dtype can travel."""
    return value.dtype.name in DTYPES


def check_dtypes(values: Sequence[Any], names: Sequence[str]) -> None:
    """Raises tf.errors.UnimplementedError for a dtype that cannot travel."""
    for value, name in zip(values, names, strict=True):
        if not is_served(value):
            text = f"herring: {name or 'this tensor'} is {value.dtype.name}; {', '.join(DTYPES)} are served"
            raise tf.errors.UnimplementedError(None, None, text)


def run(
    collective: int,
    values: Sequence[Any],
    names: Sequence[str],
    *,
    reduce: str = "sum",
    root: int = 0,
    group: Group = JOB,
    splits: Any = None,
) -> list[Any]:
    """Starts one operation for each of the tensors, and waits for all; their results.

    Args:
        names: Match them with those of other ranks; "" as `group` says.
        root: Within the group.
        splits: Of the one tensor of an ALL_TO_ALL, which has two results.
    """
    if not values:
        return []
    if collective not in (ALL_REDUCE, REDUCE_SCATTER) and any(value.dtype.name in _MOVED_AS for value in values):
        moved = [tf.bitcast(value, _MOVED_AS.get(value.dtype.name, value.dtype)) for value in values]
        results = run(collective, moved, names, root=root, group=group, splits=splits)
        own = [tf.bitcast(each, value.dtype) for each, value in zip(results, values, strict=False)]
        return own + results[len(values) :]
    check_dtypes(values, names)  # Before any of them has started.
    with _place_of(collective):
        return _run(collective, values, names, reduce, root, group, splits)


def _place_of(collective: int) -> contextlib.AbstractContextManager[Any]:
    """Where TensorFlow is to run it: on the CPU, where its operation for GPUs does not take this."""
    if not library().by_stream or (collective in (ALL_REDUCE, BROADCAST) and not _in_session()):
        return contextlib.nullcontext()
    place: contextlib.AbstractContextManager[Any] = tf.device("/device:CPU:0")
    return place


def _run(
    collective: int, values: Sequence[Any], names: Sequence[str], reduce: str, root: int, group: Group, splits: Any
) -> list[Any]:
    ops = library().ops
    token = ops.herring_begin()
    settings = {
        "collective": collective, "reduce": _REDUCE[reduce], "root": root, "group": group.number,
        "has_key": int(group.has_key), "names_iterations": int(_in_session()),
    }  # fmt: skip
    if splits is not None:
        handle = ops.herring_submit_splits(values[0], splits, token, tensor_name=names[0], **settings)
        return list(_wait()([handle], T=[values[0].dtype, splits.dtype]))
    handles = [
        ops.herring_submit(value, token, tensor_name=name, **settings)
        for value, name in zip(values, names, strict=True)
    ]
    results = list(_wait()(handles, T=[value.dtype for value in values]))
    keeps_rows = collective in (ALL_REDUCE, BROADCAST)
    for result, value in zip(results, values, strict=True):
        if keeps_rows or value.shape.rank is None:
            result.set_shape(value.shape)
        else:
            result.set_shape([None, *value.shape[1:]])
    return results


def _in_session() -> bool:
    """In a graph for a session of TensorFlow 1, or a branch, a loop or a function there: nothing has an order."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def _wait() -> Any:
    """In a session, nothing that holds up TensorFlow's threads."""
    aside = library().waits_aside and _in_session()
    return library().ops.herring_wait_aside if aside else library().ops.herring_wait


def reduce_all(values: Sequence[Any], names: Sequence[str], op: str, group: Group = JOB) -> list[Any]:
    """The reduced tensors; names match them with those of other ranks ("": by the order of calls)."""
    return run(ALL_REDUCE, values, names, reduce=op, group=group)


def broadcast_all(values: Sequence[Any], names: Sequence[str], root: int, group: Group = JOB) -> list[Any]:
    """The tensors of rank `root` of the group."""
    return run(BROADCAST, values, names, root=root, group=group)


def gather_all(values: Sequence[Any], names: Sequence[str], group: Group) -> list[Any]:
    """The ranks' tensors, joined along their first dimension, in which they may differ."""
    return run(ALL_GATHER, values, names, group=group)


def place(what: int, group: int = 0) -> Any:
    """A number that is asked for when the graph runs: RANK, SIZE and so on."""
    return library().ops.herring_place(place=what, group=group)
