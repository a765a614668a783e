"""Finds the stream on which TensorFlow runs its kernels on a GPU: by code that is built for the installed release.

TensorFlow's stable C interface does not tell it. What does (bindings/tensorflow/gpu_stream.cc) is a few lines against
TensorFlow's C++ headers, built at their first use, in about 15 s, into a cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path

import tensorflow as tf

from herring import _build_cache
from herring._compiler import BuildError, compiler, run
from herring._errors import UnavailableError
from herring._log import say

_PACKAGE = Path(__file__).resolve().parent.parent
_WHAT = "the helper that finds TensorFlow's stream"


def has_gpus() -> bool:
    """Whether this TensorFlow runs anything on a GPU. Does not start them."""
    return bool(tf.config.list_physical_devices("GPU"))


def find() -> int:
    """Address of a function as StreamOf in bindings/tensorflow/gpu_stream.h. Raises UnavailableError."""
    _check_gpus()
    try:
        path = build()
    except BuildError as error:
        raise UnavailableError(str(error)) from error
    except OSError as error:
        raise UnavailableError(
            f"{_WHAT} cannot be built ({error}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"{_WHAT} does not load ({error}); remove the file, the next start builds it") from error
    address = ctypes.cast(library.herring_stream_of, ctypes.c_void_p).value
    assert address is not None
    return address


def describe(setting: str) -> tuple[str, str]:
    """For herring doctor: "ok" or "problem", and who copies tensors on GPUs with this setting. Builds nothing."""
    if not has_gpus():
        return "ok", "TensorFlow sees no GPU"
    if setting == "off":
        return "ok", "TensorFlow copies tensors on GPUs (HERRING_TENSORFLOW_STREAM=off)"
    try:
        _check_gpus()
        is_there = _target().is_file()
        if not is_there:
            compiler(_WHAT)
    except (BuildError, UnavailableError) as error:
        if setting == "on":
            return "problem", f"HERRING_TENSORFLOW_STREAM=on cannot be: {error}"
        return "ok", f"TensorFlow copies tensors on GPUs, because {error} (HERRING_TENSORFLOW_STREAM=auto)"
    later = "" if is_there else f"; {_WHAT} is built at its first use, in about 15 s"
    return "ok", f"Herring copies tensors on GPUs (HERRING_TENSORFLOW_STREAM={setting}){later}"


def _check_gpus() -> None:
    for gpu in tf.config.list_physical_devices("GPU"):
        # Nothing else is said of devices that plug-ins bring.
        if "compute_capability" not in tf.config.experimental.get_device_details(gpu):
            raise UnavailableError(f"TensorFlow's {gpu.name.removeprefix('/physical_device:')} is not a CUDA device")


def _target() -> Path:
    """Of this TensorFlow and these sources. Raises BuildError, and UnavailableError where there is no place for it."""
    source = _source()
    content = [source.read_bytes(), source.with_suffix(".h").read_bytes()]
    content += [word.encode() for word in [*_own_flags(), platform.machine()]]  # Builds of a release differ in them.
    digest = hashlib.sha256(b"\0".join(content)).hexdigest()[:16]
    return _build_cache.folder("tensorflow", tf.__version__, digest) / "gpu_stream.so"


def build() -> Path:
    """The library, built where it is not there yet. Raises BuildError, and OSError or UnavailableError where there is
    no place for it."""
    target = _target()
    if target.is_file():
        return target
    folder = target.parent
    with _build_cache.locked(folder):
        if not target.is_file():  # Nor has another process built it meanwhile.
            with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
                output = Path(scratch) / target.name
                command = _command(_source(), output)
                say(logging.WARNING, f"building {_WHAT} once, about 15 s, in {folder}", "herring")
                run([command], _WHAT)
                os.replace(output, target)
    return target


def _source() -> Path:
    """Of an installed package, else of the source checkout around it."""
    for folder in (_PACKAGE / "_tensorflow_src", _PACKAGE.parent / "bindings" / "tensorflow"):
        if (folder / "gpu_stream.cc").is_file():
            return folder / "gpu_stream.cc"
    raise BuildError(f"the source of {_WHAT} is not there (looked in {_PACKAGE}): install Herring again")


def _own_flags() -> list[str]:
    """What this build of TensorFlow wants code to be compiled with."""
    return [flag for flag in tf.sysconfig.get_compile_flags() if not flag.startswith(("-I", "--std"))]


def _command(source: Path, output: Path) -> list[str]:
    headers = tf.sysconfig.get_include()
    return [
        *(*compiler(_WHAT), "-std=c++17", "-O2", "-w", "-fPIC", "-shared", "-fvisibility=hidden"),
        *(*_own_flags(), f"-isystem{headers}", f"-I{source.parent}", str(source), "-o", str(output)),
        *tf.sysconfig.get_link_flags(),
    ]
