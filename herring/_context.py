"""The one job that this process may be in: its start and end, and what happens at exit, fork and fatal errors."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from herring import _core
from herring._errors import HerringError, InvalidArgumentError, ShutdownError, text_of
from herring._job import ElasticJob, WorkerJob, is_elastic, join_as_worker, join_elastic, read_settings
from herring._log import say
from herring._membership import listeners
from herring._rendezvous import Store
from herring._start_line import announce
from herring._streams import open_standard_descriptors

_ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class NameUses:
    """Of the numpy library: which names its operations in several steps have, and the numbers of its groups."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.groups = 0  # how many there have been, here or elsewhere
        self.closed: set[int] = set()
        self.counts: dict[tuple[int, str], int] = {}
        self.unnamed: dict[int, int] = {}
        self.in_flight: dict[tuple[int, str], object] = {}


@dataclass(frozen=True)
class Session:
    """A worker from init() to shutdown()."""

    job: WorkerJob | ElasticJob
    runtime: _core.Runtime
    uses: NameUses = field(default_factory=NameUses)
    ranks: range | None = field(init=False)  # of a job whose ranks stay: those of the job
    timeout_s: float = field(init=False)

    def __post_init__(self) -> None:
        # What each small operation asks for.
        object.__setattr__(self, "ranks", None if self.elastic is not None else range(self.job.size))
        object.__setattr__(self, "timeout_s", self.job.config.timeout_s)

    @property
    def config(self) -> _core.Config:
        """The settings in force."""
        return self.job.config

    @property
    def elastic(self) -> _core.ElasticRuntime | None:
        """The runtime where the job may lose and gain workers."""
        job = self.job
        return job.runtime if isinstance(job, ElasticJob) and job.config.elastic == "on" else None

    @property
    def local_rank(self) -> int:
        """As the launcher counts, else as the runtime does (workers that share this host's memory)."""
        told = self.job.placement.local_rank
        return self.runtime.local_rank if told is None or self.elastic else told

    @property
    def local_size(self) -> int:
        """Workers on this host, counted likewise."""
        told = self.job.placement.local_size
        return self.runtime.local_size if told is None or self.elastic else told


class Process:
    """Owns this process's session. There is one, `process` below: a process is a worker of one job at a time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.running: Session | None = None  # as session(), where a call is too slow
        self._ended = False
        self._has_warned = False
        self._pid = os.getpid()
        self._forked_from: int | None = None
        self._hooks_installed = False
        self._previous_excepthook: _ExceptHook | None = None
        self._starts: list[Callable[[], object]] = []

    def on_start(self, callback: Callable[[], object]) -> None:
        """Calls it whenever this process has joined a job, from now on."""
        self._starts.append(callback)

    def session(self) -> Session | None:
        """The running session, if any."""
        return self.running

    def current(self) -> Session:
        """The running session. Raises ShutdownError that says why there is none."""
        session = self.running
        if session is not None:
            return session
        self.refuse_in_child()
        if self._ended:
            raise ShutdownError("herring.shutdown() was called; call herring.init() again first")
        raise ShutdownError("herring.init() has not been called in this process; call it first")

    def start(
        self,
        settings: Mapping[str, object],
        *,
        rank: int | None = None,
        size: int | None = None,
        store: Store | None = None,
        generation: int = 0,
    ) -> Session:
        """Joins the job and connects; where that was done, checks that nothing else is asked for and returns it."""
        with self._lock:
            self.refuse_in_child()
            if self.running is not None:
                _check_same(self.running, settings, rank, size)
                return self.running
            _refuse_second_import()
            open_standard_descriptors()
            config = read_settings(settings)
            self._warn_of_ignored(config)
            job: WorkerJob | ElasticJob
            if is_elastic(config):
                job = join_elastic(config, rank=rank, size=size, store=store)
            else:
                job = join_as_worker(config, rank=rank, size=size, store=store, generation=generation)
            try:
                runtime = job.start_runtime()
            except BaseException:
                job.close()
                raise
            self.running = Session(job, runtime)
            if self.running.elastic is not None:
                listeners.listen_to(self.running.elastic)
            self._ended = False
            self._install_hooks()
            announce(self.running)
            for callback in self._starts:
                callback()
            return self.running

    def stop(self) -> None:
        """Finishes what is pending and leaves the job. Idempotent; nothing in a forked child."""
        with self._lock:
            session, self.running = self.running, None
            if session is None:
                return
            self._ended = True
            self._remove_excepthook()
            try:
                session.runtime.shutdown()
            finally:
                session.job.close()

    def _warn_of_ignored(self, config: _core.Config) -> None:
        if not config.ignored or self._has_warned or config.log_level == "error":
            return
        self._has_warned = True
        text = (
            f"{', '.join(config.ignored)}: not settings of Herring, and ignored. Kubernetes sets them for "
            "a service whose name begins with herring; enableServiceLinks: false in the pod ends this"
        )
        say(logging.WARNING, text, "herring")

    def refuse_in_child(self) -> None:
        """Raises ShutdownError where this process, or one that it descends from, was forked out of a running job."""
        if self._forked_from is not None:
            raise ShutdownError(
                f"process {os.getpid()} was forked from process {self._forked_from} while that was in a job, whose "
                "connections and threads it does not have. Start it with the spawn method, or fork before "
                "herring.init() or after herring.shutdown(), and call herring.init() in it"
            )

    def _install_hooks(self) -> None:
        if not self._hooks_installed:
            atexit.register(self.stop)
            os.register_at_fork(after_in_child=self._after_fork_in_child)
            self._hooks_installed = True
        self._previous_excepthook = sys.excepthook
        sys.excepthook = self._excepthook

    def _remove_excepthook(self) -> None:
        # Somebody may have wrapped ours since; theirs then stays, and ours passes through.
        if sys.excepthook == self._excepthook and self._previous_excepthook is not None:
            sys.excepthook = self._previous_excepthook

    def _excepthook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Tells the other processes at once that this one goes down; then everything goes on as it would have."""
        session = self.running
        if session is not None:
            text = text_of(error)
            with contextlib.suppress(HerringError):
                session.job.client.report_failure(text)
            with contextlib.suppress(HerringError):
                session.runtime.abort(text)
        (self._previous_excepthook or sys.__excepthook__)(kind, error, traceback)

    def _after_fork_in_child(self) -> None:
        # The native objects notice by themselves that this is another process, and let go of nothing.
        if self.running is not None:
            self._forked_from = self._pid
            self.running = None
        self._pid = os.getpid()
        self._lock = threading.RLock()


def _refuse_second_import() -> None:
    """A spawned child that imports the script would come for its parent's place, which ends the job of both."""
    child = sys.modules.get("multiprocessing.process")
    if child is not None and getattr(child.current_process(), "_inheriting", False):
        raise InvalidArgumentError(
            f"herring.init() is called while process {os.getpid()}, a child of multiprocessing, imports the script "
            f'that started process {os.getppid()}: put what the script does under if __name__ == "__main__":'
        )


def _check_same(session: Session, settings: Mapping[str, object], rank: int | None, size: int | None) -> None:
    """A second init() may repeat what the first one said, or say nothing."""
    for name, asked, now in (("rank", rank, session.job.rank), ("size", size, session.job.size)):
        if asked is not None and asked != now:
            raise InvalidArgumentError(
                f"herring.init() was called before with {name} {now}, not {asked}; call shutdown() first"
            )
    given = {name: value for name, value in settings.items() if value is not None}
    wanted, running = read_settings(given), session.config
    values = {name: value for name, value, _ in running.origins}
    for name, value, _ in wanted.origins:
        if name.removeprefix("HERRING_").lower() in given and values[name] != value:
            raise InvalidArgumentError(
                f"herring.init() was called before with {name}={values[name]}, not {value}; call shutdown() first"
            )
    if given.get("secret") not in (None, running.secret):
        raise InvalidArgumentError("herring.init() was called before with another secret; call shutdown() first")


process = Process()
