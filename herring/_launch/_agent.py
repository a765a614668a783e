"""What herringrun starts on each host of a job: it starts the processes there, forwards what they print, and ends them
with all that they have started, also where the connection breaks or falls silent.

Its stdin and stdout are the connection (herring._launch._protocol). It is two processes, as herringrun is
(herring._launch._keeper): one that is killed is missed by the other.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from herring._launch._agent_streams import Streams
from herring._launch._commands import STAGE, Command, free_ports
from herring._launch._job import Interrupted, Job, Process, StartError
from herring._launch._keeper import Control, run
from herring._launch._options import program_problem
from herring._launch._protocol import (
    MAGIC,
    VERSION,
    Decoder,
    Kind,
    ProtocolError,
    Writer,
    binary,
    fields_of,
    message,
    split_binary,
)
from herring._version import __version__

__all__ = ["main"]

PING_S = 1.0
READER_S = 1.0
# Before herringrun has said how long its silence may be.
_SILENCE_S = 120.0
_LOOK_S = 0.5
_TURN_S = 0.05
_FLUSH_S = 0.002
_READ = 1 << 16
_PIECE = 1 << 20


class Requests:
    """The keeper's signals, and what herringrun says."""

    def __init__(self, control: Control, reader: int, writer: Writer, streams: Streams) -> None:
        self._control = control
        self._writer = writer
        self._next_ping = 0.0
        self._reader = reader
        self._streams = streams
        self._decoder = Decoder(awaits_magic=False)
        self.frames: list[tuple[Kind, bytes]] = []
        self.silence_s = _SILENCE_S
        self.is_paused = False
        self._heard = time.monotonic()

    def requests(self, ready: list[int]) -> list[int]:
        """As Control's; raises EOFError also where herringrun is gone or silent."""
        numbers = self._control.requests(ready)
        if self._reader in ready:
            data = _read(self._reader)
            self._heard = time.monotonic()
            for kind, body in self._decoder.feed(data):
                if kind == Kind.GRANT:
                    number, text = split_binary(body)
                    self._streams.grant(number, int(text))
                elif kind == Kind.STOP:
                    numbers.append(int(fields_of(body)["number"]))
                elif kind != Kind.PING:
                    self.frames.append((kind, body))
        now = time.monotonic()
        if now - self._heard > self.silence_s and not self.is_paused:
            raise EOFError
        if now >= self._next_ping:  # Here, as whatever the agent waits for it asks for requests.
            self._next_ping = now + PING_S
            self._writer.put(message(Kind.PING))
        return numbers

    def await_resume(self) -> None:
        """An agent gets no SIGTSTP: herringrun says PAUSE."""


def _read(fd: int) -> bytes:
    try:
        data = os.read(fd, _READ)
    except BlockingIOError:
        return b""
    if not data:
        raise EOFError
    return data


class Agent:
    """Does what herringrun says until it is done or gone."""

    def __init__(self, control: Control, reader: int, writer: Writer) -> None:
        self._writer = writer
        self._streams = Streams(writer)
        self._requests = Requests(control, reader, writer, self._streams)
        for fd in (*control.descriptors, reader):
            self._streams.watch(fd)
        self.job = Job(self._streams, self._requests, verbose=False)
        self._environment: dict[str, str] = {}
        self._folder: str | None = None
        self._numbers: dict[Process, int] = {}
        self._stands: set[int] = set()
        self._stage: Path | None = None
        self._next_look = 0.0
        self._done = False

    def serve(self) -> int:
        """Until the job's processes here have ended and herringrun knows all about them."""
        self._writer.put(MAGIC)
        hello = {"version": __version__, "python": sys.version.split()[0], "host": socket.gethostname()}
        cores = len(os.sched_getaffinity(0))
        self._writer.put(message(Kind.HELLO, protocol=VERSION, ports=free_ports(), cores=cores, **hello))
        try:
            while not self._done:
                self._turn()
        except Interrupted as interrupted:  # herringrun says so, or somebody here: this host is shut down, perhaps.
            self.job.stop(interrupted.number)
        finally:
            self._remove_stage(send=self._done)
        self._tell_ended()
        with contextlib.suppress(Interrupted):
            # As herringrun's own: who has ended the job wants the prompt back, whoever reads or not.
            self.job.finish_output(math.inf if self._done else READER_S)
        self._writer.put(message(Kind.BYE))
        while self._writer.size:
            with contextlib.suppress(Interrupted):
                self.job.forward()
            time.sleep(_FLUSH_S)
        return 0

    def _turn(self) -> None:
        self.job.poll(_TURN_S)
        self._tell_ended()
        frames, self._requests.frames = self._requests.frames, []
        for kind, body in frames:
            self._obey(kind, body)
        now = time.monotonic()
        if now >= self._next_look and not self._requests.is_paused:
            self._next_look = now + _LOOK_S
            self._tell_stopped(now)

    def _tell_ended(self) -> None:
        for process, number in list(self._numbers.items()):
            if process.code is not None:
                self._writer.put(message(Kind.ENDED, number=number, code=process.code))
                del self._numbers[process]

    def _tell_stopped(self, now: float) -> None:
        for process in self._numbers:
            process.note_stopped(now)
        stands = {number for process, number in self._numbers.items() if process.stopped_since is not None}
        for number in stands ^ self._stands:
            self._writer.put(message(Kind.STANDS, number=number, stands=number in stands))
        self._stands = stands

    def _obey(self, kind: Kind, body: bytes) -> None:
        if kind == Kind.DATA:
            self._streams.take_input(split_binary(body)[1])
        elif kind == Kind.FILE:
            self._take_file(*split_binary(body))
        elif kind in (Kind.PAUSE, Kind.RESUME):
            self._requests.is_paused = kind == Kind.PAUSE
            (self.job.stand_still if kind == Kind.PAUSE else self.job.go_on)()
        elif kind == Kind.LEAVE:
            self.job.leave()
            self._done = True
        else:
            fields = fields_of(body)
            if kind == Kind.SETUP:
                self._set_up(fields)
            elif kind == Kind.START:
                self._start(fields)
            elif kind == Kind.SIGNAL:
                self.job.send_signal(int(fields["number"]))
            elif kind == Kind.BURY:
                for process, number in list(self._numbers.items()):
                    if number == fields["number"]:
                        self.job.bury(process)
            elif kind == Kind.RESIZE:
                self._streams.set_size(fields["size"])

    def _set_up(self, fields: dict[str, Any]) -> None:
        """Answers with what is wrong here; empty for nothing."""
        self._requests.silence_s = float(fields["silence_s"])
        self._streams.set_up(fields["terminals"], bool(fields["is_merged"]), fields["size"])
        own = {name: value for name, value in os.environ.items() if not name.startswith("HERRING_")}
        self._environment = {**own, **fields["environment"]}
        self._folder = fields["folder"]
        if self._stage is not None:
            self._environment[STAGE] = str(self._stage)
        self._writer.put(message(Kind.READY, problem=self._problem(fields)))

    def _problem(self, fields: dict[str, Any]) -> str:
        folder = self._folder
        if folder is not None:
            try:
                os.chdir(folder)
            except OSError as error:
                return f"cannot start in {folder} there ({error.strerror}); --wdir names another folder"
            self._environment["PWD"] = folder
        if fields["command"] and (problem := program_problem(fields["command"], self._environment.get("PATH"))):
            return problem
        try:
            socket.getaddrinfo(fields["master"], None)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no host can be called so"
            return (
                f"cannot find worker 0's host by the name {fields['master']!r} ({why}): name hosts as all "
                "of them know them, or give worker 0's address with --master-addr"
            )
        return ""

    def _start(self, fields: dict[str, Any]) -> None:
        number, name = int(fields["number"]), str(fields["name"])
        command = Command(fields["arguments"], {**self._environment, **fields["environment"]}, folder=self._folder)
        self._streams.next_number = number
        stdin = self._streams.open_input() if fields["takes_input"] else None
        try:
            process = self.job.start(name, command, stdin)
        except StartError as error:
            self._writer.put(message(Kind.NOT_STARTED, number=number, text=str(error), code=error.code))
            return
        finally:
            if stdin is not None:
                os.close(stdin)
        self._numbers[process] = number
        self._writer.put(message(Kind.STARTED, number=number, pid=process.pid))

    def _take_file(self, size: int, rest: bytes) -> None:
        name = rest[:size].decode()
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ProtocolError(f"a file named {name!r}")
        if self._stage is None:
            self._stage = Path(tempfile.mkdtemp(prefix="herringrun-"))
        with (self._stage / name).open("ab") as file:
            file.write(rest[size:])

    def _remove_stage(self, send: bool) -> None:
        """Sends back what the processes have put there beside what was sent, and removes it."""
        if self._stage is None:
            return
        for path in sorted(self._stage.glob("result-*")) if send else []:
            name = path.name.encode()
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    self._writer.put(binary(Kind.FILE, len(name), name + piece))
        shutil.rmtree(self._stage, ignore_errors=True)


def _take_connection() -> tuple[int, Writer]:
    """stdin and stdout are herringrun's; who prints here by mistake prints on stderr."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    os.set_blocking(reader, False)
    return reader, Writer(writer)


def main() -> int:
    """What herringrun runs on a host."""
    reader, writer = _take_connection()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)

    def keep(control: Control) -> int:
        agent = Agent(control, reader, writer)
        with contextlib.suppress(BrokenPipeError):
            return agent.serve()
        return 1

    return run(keep)
