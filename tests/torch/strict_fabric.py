"""A libfabric whose cards read and write the fake accelerator's memory (tests/efa/strict_fabric.cc): builds it once,
and joins the two in a rank."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import subprocess
from pathlib import Path

from accelerator import ROOT

from herring import _core
from herring._fabric import fabric_search
from herring._job import read_settings

SOURCE = ROOT / "tests" / "efa" / "strict_fabric.cc"


def build() -> Path:
    """Its library, compiled where it is not there yet."""
    folder = ROOT / "build" / "accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"strict_fabric-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            scratch = target.with_suffix(".new")
            command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", str(SOURCE), "-o", str(scratch), "-ldl"]
            subprocess.run(command, check=True)
            scratch.rename(target)
    return target


def settings() -> dict[str, str] | None:
    """What makes a job use it; None where there is no libfabric to put behind it."""
    report = _core.probe_fabric(read_settings({"provider": "tcp"}), fabric_search())
    if not report["path"]:
        return None
    return {
        "HERRING_LIBFABRIC": str(build()),
        "HERRING_PROVIDER": "tcp",
        "STRICT_FABRIC_LIBRARY": report["path"],
        "HERRING_GPUDIRECT": "on",
        "TORCH_CPP_LOG_LEVEL": "WARNING",
    }


def load(gpu: ctypes.CDLL) -> ctypes.CDLL:
    """In a rank: the cards reach the accelerator's memory."""
    library = ctypes.CDLL(str(build()))
    library.strict_fabric_fault.restype = ctypes.c_char_p
    library.strict_fabric_device_bytes.restype = ctypes.c_uint64
    library.strict_fabric_uses.restype = ctypes.c_uint64
    library.strict_fabric_receives.restype = ctypes.c_uint64
    library.strict_fabric_hold.restype = ctypes.c_uint64
    library.strict_fabric_reach(gpu.fake_alias)
    return library
