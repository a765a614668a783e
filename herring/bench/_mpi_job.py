"""An MPI job that rank 0 starts and steers over a connection of its own to every MPI rank."""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from herring._context import process
from herring._errors import HerringTimeoutError, InvalidArgumentError, PeerLostError, UnavailableError
from herring._own_python import main_command
from herring._rendezvous import published_address
from herring.bench._mpi_launch import find_launcher, job_command, job_environment, read_emulated

# host port token, for the ranks of the job.
CONTROL_VARIABLE = "BENCH_CONTROL"
_START_S = 120.0
_ANSWER_S = 600.0
_STOP_S = 10.0
_TAIL_BYTES = 2000
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Lines:
    """JSON objects, one a line, over a connected socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        """Raises OSError where the other side is gone."""
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None) -> dict[str, Any]:
        """The next object. Raises TimeoutError after `seconds`, EOFError where the other side is gone."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._rest:
            self._socket.settimeout(None if deadline is None else max(deadline - time.monotonic(), 0.001))
            read = self._socket.recv(1 << 16)
            if not read:
                raise EOFError
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not an object: {line[:80]!r}")
        return message

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


class MpiJob:
    """`ranks` processes under the launcher of "mpi" or "mpich". Lives in rank 0's process of the bench."""

    def __init__(self, name: str, ranks: int, arguments: list[str]) -> None:
        self.name = name
        self.version = ""
        self._lines: list[Lines] = []
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the job)
        self._process: subprocess.Popen[bytes] | None = None
        emulated = read_emulated(os.environ)
        session = process.current()
        if emulated is None and session.local_size != ranks:
            raise InvalidArgumentError(
                f"--peers {name}: the ranks are on several hosts, where only mpirun can start MPI: "
                "run the bench itself under mpirun"
            )
        launcher = find_launcher(name)
        address = published_address(
            session.local_size == ranks, session.config.interface, os.environ.get("MASTER_ADDR")
        )
        token = secrets.token_hex(16)
        try:
            with socket.create_server((address, 0), backlog=ranks) as server:
                control = f"{address} {server.getsockname()[1]} {token}"
                program = main_command(sys.executable, "herring.bench._mpi_rank")
                command = job_command(name, launcher, ranks, emulated, arguments, program, [CONTROL_VARIABLE])
                self._process = subprocess.Popen(
                    command,
                    env=job_environment(name, launcher, {CONTROL_VARIABLE: control}),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    # A launcher that is killed with our process group could not clean up; SIGTERM lets it.
                    start_new_session=True,
                    preexec_fn=_die_with_parent,  # noqa: PLW1509 (only async-signal-safe calls)
                )
                self._accept(server, ranks, token, launcher)
        except BaseException:
            self.close()
            raise

    def _accept(self, server: socket.socket, ranks: int, token: str, launcher: Path) -> None:
        deadline = time.monotonic() + _START_S
        found: dict[int, Lines] = {}
        server.settimeout(0.5)
        while len(found) < ranks:
            if self._process is None or self._process.poll() is not None:
                raise UnavailableError(f"--peers {self.name}: the MPI job ended while it started{self._tail()}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(ranks)) - set(found))
                raise HerringTimeoutError(
                    f"--peers {self.name}: MPI ranks {missing} did not start within {_START_S:.0f} s{self._tail()}"
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = Lines(connection)
            try:
                hello = lines.receive(5.0)
                if not hmac.compare_digest(str(hello.get("token")), token):
                    raise ValueError("wrong token")
                rank, size = int(hello["rank"]), int(hello["size"])
            except (OSError, EOFError, ValueError, KeyError):
                lines.close()  # A stranger.
                continue
            if size != ranks:
                raise UnavailableError(
                    f"--peers {self.name}: MPI started worlds of {size} instead of one of {ranks}: mpi4py and the "
                    f"launcher {launcher} are of different MPI libraries"
                )
            found[rank] = lines
            self.version = str(hello["version"])
        self._lines = [found[rank] for rank in range(ranks)]

    def ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Sends a command to every MPI rank and returns their answers, by rank. Raises PeerLostError where one died or
        failed, HerringTimeoutError where one does not answer."""
        answers: list[dict[str, Any]] = []
        try:
            for lines in self._lines:
                lines.send(message)
            answers.extend(lines.receive(_ANSWER_S) for lines in self._lines)
        except TimeoutError:
            raise HerringTimeoutError(
                f"{self.name}: rank {len(answers)} did not answer {message['do']!r} in {_ANSWER_S:.0f} s{self._tail()}"
            ) from None
        except (OSError, EOFError, ValueError) as error:
            raise PeerLostError(f"{self.name}: rank {len(answers)} is gone ({error!r}){self._tail()}") from None
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise PeerLostError(f"{self.name}: rank {rank}: {answer['error']}")
        return answers

    def _tail(self) -> str:
        self._output.flush()
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        return f"; its output:\n{text}" if text else ""

    def close(self) -> None:
        """Ends the job: asks its ranks, then signals the launcher. Idempotent."""
        for lines in self._lines:
            with contextlib.suppress(OSError):
                lines.send({"do": "quit"})
        started, self._process = self._process, None
        if started is not None:
            steps = ([None] if self._lines else []) + [signal.SIGTERM, signal.SIGKILL]
            for number in steps:
                if number is not None:
                    started.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started.wait(_STOP_S)
                    break
        for lines in self._lines:
            lines.close()
        self._lines = []
        self._output.close()
