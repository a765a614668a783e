"""Doubles in C++ that a test loads: each compiled once, for what it is compiled against."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOUBLES = ROOT / "tests" / "device"
LIBRARIES = ROOT / "herring" / "lib"


def compiled(name: str, release: str, sources: Sequence[Path], flags: Sequence[str]) -> Path:
    """A shared library of the first of `sources`, with libherring.so; the others are what it includes. `release`: of
    what `flags` name. Raises RuntimeError where it does not compile."""
    content = hashlib.sha256(release.encode())
    for source in sources:
        content.update(source.read_bytes())
    folder = ROOT / "build" / name
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{content.hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            scratch = target.with_suffix(f".{os.getpid()}")
            command = [
                *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w"),
                *(f"-I{path}" for path in (ROOT / "tests", ROOT / "csrc", ROOT)),
                *(str(sources[0]), "-o", str(scratch), *flags),
                *(f"-L{LIBRARIES}", "-lherring", f"-Wl,-rpath,{LIBRARIES}"),
            ]
            if subprocess.run(command).returncode != 0:
                raise RuntimeError(f"{sources[0]} does not compile")
            scratch.rename(target)
    return target
