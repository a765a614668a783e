"""Where the processes of chaos.py's rounds run, and how they are found again."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ROUND_MARK = "CHAOS_ROUND"


class Site:
    """Where processes run. This one: plainly on this machine."""

    address = "127.0.0.1"
    interface = "lo"
    strict_library: Path | None = None  # chaos_strict.cc, built.
    has_libfabric = False

    def enter(self, host: int, command: list[str]) -> list[str]:
        del host
        return command

    def cut(self, host: int) -> None:
        raise NotImplementedError(f"host {host}: links can be cut between emulated hosts only")

    def heal(self, host: int) -> None: ...

    def lose(self, sender: int, receiver: int) -> None:  # What it sends there vanishes from now on.
        raise NotImplementedError(f"hosts {sender}, {receiver}: packets can be lost between emulated hosts only")

    def find(self, sender: int, receiver: int) -> None: ...  # It arrives again.

    def leftovers(self) -> set[str]:
        """Files that a job might have left."""
        return {name for name in os.listdir("/dev/shm") if "herring" in name}


def marked_processes(token: str) -> list[int]:
    """The processes of this machine (or process namespace) that belong to a round."""
    wanted = f"{ROUND_MARK}={token}".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    found.append(int(name))
    return found
