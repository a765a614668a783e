"""A job over several hosts: an agent on each, which starts the processes there. Asked the same as Job is."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herring._launch._agent_link import Link, Stream, prepare_child
from herring._launch._commands import Command
from herring._launch._hosts import Host
from herring._launch._input import Input
from herring._launch._job import Interrupted, Member, Requests, StartError, interrupts
from herring._launch._output import Outputs
from herring._launch._protocol import VERSION, Kind, ProtocolError, binary, fields_of, message, split_binary
from herring._launch._rsh import Shell, agent_command, remote_command, why_not
from herring._version import __version__

__all__ = ["HostsJob", "RemoteProcess", "Setup"]

_PING_S = 1.0
_PIECE = 1 << 20
_GOODBYE_S = 2.0


@dataclass(frozen=True)
class Setup:
    """How agents are started, and what all of them are told."""

    hosts: Sequence[Host]
    shell: Shell
    python: str
    is_local: Callable[[Host], bool]
    start_s: float = 60.0  #: For all agents to come.
    silence_s: float = 30.0  #: After which a host counts as lost, and an agent ends what it has started.
    stage: Path | None = None  #: Files for all hosts, and for what comes back.


class RemoteProcess(Member):
    """A process of another host."""

    def __init__(self, name: str, number: int, link: Link) -> None:
        super().__init__(name)
        self.number = number
        self.link = link
        self.remote_pid = 0
        self.is_lost = False

    @property
    def pid(self) -> int:
        """On its host."""
        return self.remote_pid

    @property
    def place(self) -> str:
        """As Member's."""
        return f" on {self.link.name}"

    @property
    def how(self) -> str:
        """As Member's."""
        return f"was lost with its host {self.link.name}" if self.is_lost else f"({self.link.name}) {super().how}"

    def note_stopped(self, now: float) -> float:
        """As Member's: its agent looks."""
        return 0.0 if self.stopped_since is None else now - self.stopped_since


class HostsJob:
    """Owns the agents, and knows of their processes what they say."""

    def __init__(self, outputs: Outputs, control: Requests, setup: Setup, verbose: bool) -> None:
        self.outputs = outputs
        self._control = control
        self._setup = setup
        self._verbose = verbose
        self._selector = selectors.EpollSelector()
        self._links = [Link(index, host, self._selector) for index, host in enumerate(setup.hosts)]
        self._processes: list[RemoteProcess] = []
        self._environment: Mapping[str, str] = {}
        self._input = Input(outputs)
        self._next_ping = 0.0
        self._interrupted_at: float | None = None
        self._refused: StartError | None = None
        outputs.watch(self._selector.fileno())

    def say(self, text: str) -> None:
        """A line on stderr."""
        self.outputs.say(text)

    def connect(self) -> list[dict[str, Any]]:
        """Starts the agents; what each says of its host. Raises StartError, having started no process of the job."""
        for link in self._links:
            python = self._setup.python
            if self._setup.is_local(link.host):
                command, environment = agent_command(python), None
            else:
                shell = self._setup.shell
                command = shell.command_line(link.host.address, remote_command(python))
                environment = shell.environment
            try:
                link.open(command, prepare_child, environment)
            except OSError as error:
                text = f"{link.name}: cannot start {command[0]} here: {error.strerror}"
                raise StartError(
                    text + ("; apt-get install openssh-client" if command[0] == "ssh" else ""), 2
                ) from error
        self._await(lambda link: link.hello is not None, "did not answer")
        return [link.hello or {} for link in self._links]

    def set_up(self, environment: Mapping[str, str], folder: str, master: str, commands: Mapping[str, Command]) -> None:
        """Tells the agents what all processes have in common; asks them whether it can be there. Raises StartError."""
        self._environment = environment
        stage = self._setup.stage
        programs = {each.host: each.arguments for name, each in commands.items() if name.startswith("rank ")}
        for link in self._links:
            for path in sorted(stage.iterdir()) if stage is not None else []:
                self._send_file(link, path)
            frame = message(
                Kind.SETUP,
                environment=dict(environment),
                folder=folder,
                master=master,
                command=programs.get(link.index, []),
                silence_s=self._setup.silence_s,
                terminals=self.outputs.terminals,
                is_merged=self.outputs.is_merged,
                size=self.outputs.size,
            )
            link.send(frame)
        self._await(lambda link: link.is_ready, "did not answer")

    def _send_file(self, link: Link, path: Path) -> None:
        name = path.name.encode()
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                link.send(binary(Kind.FILE, len(name), name + piece))

    def _await(self, is_so: Callable[[Link], bool], what: str) -> None:
        deadline = time.monotonic() + self._setup.start_s
        while not all(map(is_so, self._links)):
            self.forward()
            if self._refused is not None:
                raise self._refused
            if time.monotonic() > deadline:
                late = ", ".join(link.name for link in self._links if not is_so(link))
                text = f"{late}: {what} within {self._setup.start_s:g} s (--start-timeout)"
                raise StartError(text, 1)
            for link in self._links:
                if link.is_lost:
                    raise StartError(self._why_lost(link), 1)
            self._turn(0.05)

    def _why_lost(self, link: Link) -> str:
        code = link.exit_code()
        said = link.said.decode(errors="replace")
        if link.hello is None and link.why == "the connection has ended":
            shell = Shell(("the agent",)) if self._setup.is_local(link.host) else self._setup.shell
            return why_not(link.name, shell, self._setup.python, code, said)
        return f"{link.name}: {link.why}" + (f" ({said.strip().splitlines()[-1]})" if said.strip() else "")

    def start(self, name: str, command: Command) -> RemoteProcess:
        """Starts one. What prevents it is found later, by poll(). Raises StartError."""
        link = self._links[command.host]
        process = RemoteProcess(name, len(self._processes) + 1, link)
        try:
            out, err = self.outputs.open(name, pipes=True)
        except OSError as error:
            raise StartError(f"cannot start {name}: {error.strerror}", 1) from error
        link.add_stream(2 * process.number, out)
        if err != out:
            link.add_stream(2 * process.number + 1, err)
        own = {key: value for key, value in command.environment.items() if self._environment.get(key) != value}
        self._processes.append(process)
        if command.takes_input:
            self._input.send_to(link)
        frame = message(
            Kind.START,
            number=process.number,
            name=name,
            arguments=command.arguments,
            environment=own,
            takes_input=command.takes_input,
        )
        link.send(frame)
        if link.is_lost:
            self._note_lost(link)
        return process

    def may_start(self, name: str) -> bool:
        """Whether that one can be started again: its host is there."""
        links = [process.link for process in self._processes if process.name == name]
        return not links or links[-1].is_open

    def running(self) -> list[RemoteProcess]:
        """Who has not ended."""
        return [process for process in self._processes if process.code is None]

    def forward(self) -> None:
        """Looks at what was printed and asked for, and waits for nothing. Raises Interrupted."""
        self._turn(0)

    def poll(self, seconds: float) -> list[RemoteProcess]:
        """Waits at most this long, forwarding output; returns the processes that ended, the killed ones first. Raises
        Interrupted, StartError."""
        before = set(map(id, self.running()))
        self._turn(seconds)
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        ended = [process for process in self._processes if id(process) in before and process.code is not None]
        return sorted(ended, key=lambda process: process.code is not None and process.code >= 0)

    def _turn(self, seconds: float) -> None:
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + _PING_S
            for link in self._links:
                link.send(message(Kind.PING))
        ready = self.outputs.turn(seconds)
        self._handle_links()
        self._input.turn(ready)
        self._look_for_silence()
        self._heed(ready)

    def _handle_links(self) -> None:
        for key, _ in self._selector.select(0):
            if isinstance(key.data, Link):
                link = key.data
                for kind, body in link.handle(key.fd):
                    try:
                        self._take(link, kind, body)
                    except (ProtocolError, KeyError, ValueError, OSError) as error:
                        link.lose(f"what it sent could not be used ({error})")
                if link.hello is not None:
                    for line in link.take_errors():
                        if line.strip() not in self._setup.shell.noise:
                            self.say(f"{link.name}: {line}")
            else:
                link, stream = key.data
                assert isinstance(stream, Stream)
                link.pump(stream)
        for link in self._links:
            if link.is_lost:
                self._note_lost(link)

    def _look_for_silence(self) -> None:
        now = time.monotonic()
        for link in self._links:
            if link.is_open and link.hello is not None and now - link.heard > self._setup.silence_s:
                link.lose(f"nothing was heard from it for {self._setup.silence_s:g} s")

    def _note_lost(self, link: Link) -> None:
        lost = [process for process in self.running() if process.link is link]
        if lost:
            self.say(self._why_lost(link) + "; the processes there end by themselves")
        for process in lost:
            process.code, process.is_lost = 1, True

    def _take(self, link: Link, kind: Kind, body: bytes) -> None:
        if kind == Kind.DATA:
            number, data = split_binary(body)
            if number == 0:
                self._input.stop()
            else:
                link.deliver(number, data)
            return
        if kind == Kind.GRANT:
            self._input.grant(int(split_binary(body)[1]))
            return
        if kind == Kind.FILE:
            self._take_file(*split_binary(body))
            return
        fields = fields_of(body)
        if kind == Kind.HELLO:
            link.hello = fields
            self._check_version(link, fields)
        elif kind == Kind.READY:
            link.is_ready = True
            if fields["problem"]:
                self._refused = self._refused or StartError(f"{link.name}: {fields['problem']}", 2)
        elif kind == Kind.SAY:
            self.say(f"{link.name}: {fields['text']}")
        elif kind == Kind.BYE:
            link.is_done = True
            link.close()
        elif kind != Kind.PING:
            self._take_of_process(link, kind, fields)

    def _check_version(self, link: Link, fields: dict[str, Any]) -> None:
        there = fields.get("version"), fields.get("protocol")
        if there != (__version__, VERSION):
            self._refused = self._refused or StartError(
                f"{link.name} has Herring {there[0]} and this machine has {__version__}: install the same on all hosts",
                1,
            )
        elif self._verbose:
            self.say(f"{link.name}: Herring {there[0]}, Python {fields.get('python')}, {fields.get('cores')} cores")

    def _take_of_process(self, link: Link, kind: Kind, fields: dict[str, Any]) -> None:
        process = self._processes[int(fields["number"]) - 1]
        if process.link is not link:
            raise ValueError("it speaks of another host's process")
        if kind == Kind.STARTED:
            process.remote_pid = int(fields["pid"])
            if self._verbose:
                self.say(f"{process.name} is process {process.pid} on {link.name}")
        elif kind == Kind.NOT_STARTED:
            process.code = int(fields["code"])
            self._refused = self._refused or StartError(f"{link.name}: {fields['text']}", int(fields["code"]))
        elif kind == Kind.ENDED:
            if process.code is None:
                process.code = int(fields["code"])
                if self._verbose:
                    self.say(f"{process.name} {process.how}")
        elif kind == Kind.STANDS:
            process.stopped_since = time.monotonic() if fields["stands"] else None
            process.stop_is_said = process.stop_is_said and bool(fields["stands"])

    def _take_file(self, size: int, rest: bytes) -> None:
        name = rest[:size].decode()
        if self._setup.stage is None or os.path.basename(name) != name or not name.startswith("result-"):
            raise ValueError(f"a file named {name!r}")
        with (self._setup.stage / name).open("ab") as file:
            file.write(rest[size:])

    def _heed(self, ready: list[int]) -> None:
        for number in self._control.requests(ready):
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                self._send_all(message(Kind.SIGNAL, number=int(number)))
            elif number == signal.SIGWINCH:
                self._send_all(message(Kind.RESIZE, size=self.outputs.size))
            elif number == signal.SIGTSTP:
                self._pause()
            elif number != signal.SIGCONT:
                first, self._interrupted_at = self._interrupted_at, self._interrupted_at or time.monotonic()
                if interrupts(first):
                    raise Interrupted(number)

    def _pause(self) -> None:
        """Ctrl-Z, until fg or bg."""
        self._send_all(message(Kind.PAUSE))
        self._control.await_resume()
        self._send_all(message(Kind.RESUME))
        for link in self._links:
            link.heard = time.monotonic()
        for process in self._processes:
            process.stopped_since = None

    def _send_all(self, frame: bytes) -> None:
        for link in self._links:
            link.send(frame)

    def bury(self, process: RemoteProcess) -> None:
        """As Job's."""
        process.link.send(message(Kind.BURY, number=process.number))

    def stop(self, first: int = signal.SIGTERM) -> None:
        """As Job's: the agents ask the processes to end, and make them."""
        self._send_all(message(Kind.STOP, number=int(first)))
        self._await_goodbyes(is_stopping=True)

    def leave(self) -> None:
        """As Job's."""
        self._send_all(message(Kind.LEAVE))
        self._await_goodbyes(is_stopping=False)

    def _await_goodbyes(self, is_stopping: bool) -> None:
        """Agents have limits of their own; who is silent counts as lost."""
        waits = [link for link in self._links if link.hello is not None]
        while any(link.is_open for link in waits):
            try:
                self._turn(0.05)
            except Interrupted as again:
                if again.number == signal.SIGINT and is_stopping:
                    self.say("SIGINT again: killing the processes that are left")
                self._send_all(message(Kind.STOP, number=int(again.number)))
                is_stopping = True
        for link in self._links:
            link.end()
        for process in self.running():
            process.code = -signal.SIGKILL

    def finish_output(self, reader_limit_s: float) -> None:
        """As Job's."""
        self._input.stop()
        self.outputs.drain(_GOODBYE_S, reader_limit_s, self._go_on)

    def _go_on(self, ready: list[int]) -> None:
        self._handle_links()
        self._heed(ready)
