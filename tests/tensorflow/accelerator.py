"""A GPU for TensorFlow where there is none (accelerator.cc): builds it once for the installed release, and loads it."""

from __future__ import annotations

import ctypes
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from compiled import DOUBLES, ROOT, compiled

HERE = Path(__file__).resolve().parent


def build() -> Path:
    """The fake's library, compiled where it is not there yet. Does not import TensorFlow, which takes seconds."""
    found = find_spec("tensorflow")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    sources = [
        HERE / "accelerator.cc",
        *(DOUBLES / f"{name}.h" for name in ("fake_gpu", "fake_device", "locked_device")),
    ]
    sources += [ROOT / "csrc" / "core" / "device.h", ROOT / "bindings" / "tensorflow" / "gpu_stream.h"]
    flags = [f"-isystem{package / 'include'}", f"-L{package}", "-l:libtensorflow_framework.so.2"]
    return compiled("tensorflow_accelerator", version("tensorflow-cpu"), sources, flags)


def load() -> tuple[ctypes.CDLL, Any]:
    """Makes TensorFlow know the device, before anything asks for its devices. What the fake can be told, and its
    operations in TensorFlow."""
    from tensorflow.python.framework import load_library

    path = str(build())
    operations = load_library.load_op_library(path)  # First: it gives what is new with it.
    load_library.load_pluggable_device_library(path)
    library = ctypes.CDLL(path)
    library.fake_fault.restype = ctypes.c_char_p
    library.fake_copies.restype = ctypes.c_int64
    library.fake_launches.restype = ctypes.c_int64
    library.fake_own_copies.restype = ctypes.c_int64
    return library, operations
