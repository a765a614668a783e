"""Herring's operations in TensorFlow, and the job that they go to."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from herring._context import Session, process
from herring._errors import HerringError

_ALL_REDUCE, _BROADCAST = 1, 2  # Numbers of csrc/core/types.h.
_REDUCE = {"sum": 1, "average": 2, "min": 3, "max": 4, "product": 5}
_OLDEST = (2, 16)
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")


class _Library:
    """libherring_tensorflow.so, in this process."""

    def __init__(self) -> None:
        version = tuple(int(part) for part in tf.__version__.split(".")[:2])
        if version < _OLDEST:
            raise HerringError(f"TensorFlow {tf.__version__} is too old; herring.tensorflow needs 2.16 or newer")
        path = Path(__file__).resolve().parent.parent / "lib" / "libherring_tensorflow.so"
        try:
            self.ops: Any = tf.load_op_library(str(path))
        except (OSError, tf.errors.OpError) as error:
            raise HerringError(
                f"TensorFlow {tf.__version__} cannot load {path}: {error}. Install Herring again: pip install ."
            ) from error
        self._native = ctypes.PyDLL(str(path))
        self._native.herring_tensorflow_attach.argtypes = [ctypes.c_void_p]
        self._native.herring_tensorflow_attach.restype = None
        self._native.herring_tensorflow_pending.restype = ctypes.c_uint64
        self._open = ctypes.pythonapi.PyCapsule_GetPointer
        self._open.argtypes = [ctypes.py_object, ctypes.c_char_p]
        self._open.restype = ctypes.c_void_p
        self._session: Session | None = None

    def attach(self) -> Session:
        """Operations go to the job that this process is in. Raises ShutdownError where it is in none."""
        session = process.current()
        if session is not self._session:
            capsule = session.runtime.capsule()
            self._native.herring_tensorflow_attach(self._open(capsule, b"herring.runtime"))
            self._session = session
        return session

    def pending(self) -> int:
        """Operations that were submitted and not waited for."""
        return int(self._native.herring_tensorflow_pending())


@functools.cache
def library() -> _Library:
    """Loaded once. Raises HerringError that says why it cannot be."""
    return _Library()


def is_served(value: Any) -> bool:
    """Its dtype can travel."""
    return value.dtype.name in _DTYPES


def _run(collective: int, reduce: str, root: int, values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """Starts one operation for each of the tensors, and waits for all."""
    if not values:
        return []
    for value, name in zip(values, names, strict=True):  # Before any of them has started.
        if not is_served(value):
            text = f"herring: {name or 'this tensor'} is {value.dtype.name}; {', '.join(_DTYPES)} are served"
            raise tf.errors.UnimplementedError(None, None, text)
    ops = library().ops
    token = ops.herring_begin()
    handles = [
        ops.herring_submit(value, token, tensor_name=name, collective=collective, reduce=_REDUCE[reduce], root=root)
        for value, name in zip(values, names, strict=True)
    ]
    results = list(ops.herring_wait(handles, T=[value.dtype for value in values]))
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    return results


def reduce_all(values: Sequence[Any], names: Sequence[str], op: str) -> list[Any]:
    """The reduced tensors; names match them with those of other ranks ("": by the order of calls)."""
    return _run(_ALL_REDUCE, op, 0, values, names)


def broadcast_all(values: Sequence[Any], names: Sequence[str], root: int) -> list[Any]:
    """The tensors of rank `root`."""
    return _run(_BROADCAST, "sum", root, values, names)
