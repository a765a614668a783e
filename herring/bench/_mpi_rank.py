"""One rank of the MPI job that the bench measures as a peer; started by the launcher, steered by the bench's rank 0."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from herring.bench._contender import Case, Plan
from herring.bench._herring import PrivateMemory
from herring.bench._mpi import mpi_loop
from herring.bench._mpi_job import CONTROL_VARIABLE, Lines
from herring.bench._pattern import Array, Pattern

_CONNECT_S = 30.0


def _unlink_shared_memory(mpi: Any) -> None:
    """Removes the names of MPICH's files in /dev/shm, which would outlive ranks that are killed. All ranks have them
    open when MPI_Init returns, and none needs the name after that."""
    mpi.COMM_WORLD.Barrier()
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for path in {line[line.index("/") :] for line in lines if " /dev/shm/mpich_shm" in line}:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _read_commands(lines: Lines, commands: queue.SimpleQueue[dict[str, Any]]) -> None:
    """On a thread: MPI calls cannot be interrupted, so the end of the bench ends the process from here."""
    try:
        while True:
            commands.put(lines.receive(None))
    except (OSError, EOFError, ValueError):
        os._exit(1)


class Rank:
    """Carries the bench's commands out."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._memory = PrivateMemory()
        self._arrays: tuple[Array, Array] | None = None
        self._pattern: Pattern | None = None
        self._op = "sum"

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """The answer to one command."""
        what = command["do"]
        if what == "prepare":
            case = Case(command["size_bytes"], command["dtype"], command["op"], command["in_place"])
            self._arrays = self._memory.take(case)
            self._op = case.op
            world = self._mpi.COMM_WORLD
            self._pattern = Pattern(case.dtype, case.op, world.Get_rank(), world.Get_size(), case.count)
            return {}
        if what == "turn":
            assert self._arrays is not None
            assert self._pattern is not None
            plan = Plan(**{each.name: command[each.name] for each in fields(Plan)})
            return asdict(mpi_loop(self._mpi, self._pattern, self._arrays, self._op, plan))
        if what == "release":
            self._arrays = None
            self._memory.release()
            return {}
        return {"error": f"unknown command {what!r}"}


def main() -> int:
    """Entry point; the exit code."""
    host, port, token = os.environ[CONTROL_VARIABLE].split()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    _unlink_shared_memory(MPI)
    connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lines = Lines(connection)
    version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    lines.send({"token": token, "rank": world.Get_rank(), "size": world.Get_size(), "version": version})
    commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(lines, commands), daemon=True, name="commands").start()
    rank = Rank(MPI)
    while (command := commands.get())["do"] != "quit":
        try:
            lines.send(rank.obey(command))
        except (RuntimeError, ValueError, KeyError, TypeError, MemoryError) as error:
            lines.send({"error": f"{type(error).__name__}: {error}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
