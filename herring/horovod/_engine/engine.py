"""Runs operations keyed by name, in any order on each rank, within process sets; one engine from init to shutdown."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from herring import _composed as collectives
from herring._composed import Call
from herring._context import Session, process
from herring._errors import HerringError, InvalidArgumentError, MismatchError
from herring._operation import Operation, Steps
from herring.horovod._engine.fusion import Fusions
from herring.horovod._engine.join import Announcement, Joins, Outside
from herring.horovod._engine.stall import Stalls
from herring.horovod._engine.stall import settings as stall_settings
from herring.horovod._engine.timeline import Timeline, timeline_of_environment
from herring.horovod.common.exceptions import HorovodInternalError

# Names that are made up come again after so many operations: what the runtime remembers of names stays bounded.
_UNNAMED = 1 << 16
GLOBAL_SET = 0


@dataclass(frozen=True)
class Members:
    """A process set as the engine knows it."""

    set_id: int
    ranks: tuple[int, ...]
    index: int | None  # of this rank; None: not in it


class Engine:
    """Owns this process's part of every operation in flight. Safe from any thread."""

    def __init__(self, session: Session, owns_session: bool) -> None:
        self.session = session
        self.runtime = session.runtime
        self.rank, self.size = session.job.rank, session.job.size
        self.timeline: Timeline | None = None
        self.outside: Outside | None = None  # Operations that start elsewhere; for join().
        # Waits until operations whose data is still on its way (from a GPU) have started.
        self.late: Callable[[], None] | None = None
        self.closing: list[Callable[[], None]] = []  # called when it goes, once what was pending has ended
        self._owns_session = owns_session
        self._lock = threading.RLock()
        self._sets = {GLOBAL_SET: Members(GLOBAL_SET, tuple(range(self.size)), self.rank)}
        self._next_set = 1
        self._next_unnamed: dict[int, int] = {}
        self._uses: dict[tuple[int, str], int] = {}
        self._in_flight: dict[tuple[int, str], tuple[Operation, Announcement]] = {}
        self._generation = 0 if session.elastic is None else session.elastic.generation
        self.fusions = Fusions(self)
        self.fusions.open(GLOBAL_SET, range(self.size), self.rank)
        self.joins = Joins(self)
        self.stalls = Stalls(self)

    # -- operations ---------------------------------------------------------------------------------------------

    def start(
        self,
        kind: str,
        name: str | None,
        set_id: int,
        steps: Callable[[Call], Steps],
        *,
        waits: bool = False,
        single_step: bool = False,
        shadow: tuple[tuple[str, tuple[int, ...]], ...] = (),
        op: str = "",
    ) -> Operation:
        """Starts an operation of this process set; never blocks on other ranks.

        Args:
            kind: "allreduce"; with `name` what ranks are matched by. Without a name, calls match in the order they are
                made, of whatever kind they are.
            steps: Makes the generator of what is to be done.
            waits: The calling thread waits for it right away.
            single_step: Nothing has to be started after the first step.
            shadow: dtype and shape of each tensor, and `op`, where ranks that have joined can take part without data.

        Raises InvalidArgumentError where an operation of this name is in flight, or this rank is not in the set.
        """
        with self._lock:
            members = self.members(set_id)
            if members.index is None:
                raise InvalidArgumentError(
                    f"{kind}: rank {self.rank} is not in process set {set_id}, which has ranks {list(members.ranks)}"
                )
            unnamed = None
            if name is None:
                unnamed = self._next_unnamed.get(set_id, 0)
                self._next_unnamed[set_id] = unnamed + 1
            key = f"{kind}.{name}" if name is not None else f"noname.{(unnamed or 0) % _UNNAMED}"
            running = self._in_flight.get((set_id, key))
            # A name is free again when somebody has seen the end of its operation, not when that happens to end: so
            # starting one twice is an error on every run and every rank, not a matter of time.
            if running is not None and not (name is None and running[0].is_done()):
                raise InvalidArgumentError(
                    f"an operation named {key} is in flight already (duplicate name); synchronize it first, or choose "
                    "another name"
                )
            self.fusions.went_outside(set_id, kind, key, name)
            uses = self._uses[set_id, key] = self._uses.get((set_id, key), 0) + 1
            call = Call(self.runtime, set_id, members.ranks, members.index, key, uses, waits)
            announcement = Announcement(set_id, key, kind, uses, unnamed, op, shadow)
            operation = self._track(kind, key, announcement, steps(call), until_seen=name is not None)
            operation.on_done(lambda: self.fusions.came_back(set_id, kind, key, name))
            self.joins.announce(announcement)
            if self.timeline is not None and (set_id, key) not in self.fusions.going_alone:
                self.timeline.watch(operation.on_done, operation.is_done, kind, key)
            operation.begin(watched=not (waits or single_step) or self.timeline is not None)
            return operation

    def run(self, kind: str, name: str | None, set_id: int, steps: Callable[[Call], Steps], **options: Any) -> Any:
        """start() and wait."""
        return self.start(kind, name, set_id, steps, waits=True, **options).wait()

    def shadow(self, announcement: Announcement, steps: Callable[[Call], Steps]) -> None:
        """Takes part, for a rank that has joined, in what another rank has told of; not twice."""
        with self._lock:
            members = self._sets.get(announcement.set_id)
            place = (announcement.set_id, announcement.key)
            if members is None or members.index is None or announcement.use <= self._uses.get(place, 0):
                return
            if self.fusions.has_pending(announcement.set_id, announcement.key):
                return  # This rank called it before it joined, and is about to start it, with its data.
            self._uses[place] = announcement.use
            if announcement.unnamed is not None:
                known = self._next_unnamed.get(announcement.set_id, 0)
                self._next_unnamed[announcement.set_id] = max(known, announcement.unnamed + 1)
            call = Call(
                self.runtime, members.set_id, members.ranks, members.index, announcement.key, announcement.use, False
            )
            operation = self._track(announcement.kind, announcement.key, announcement, steps(call), until_seen=False)
            operation.begin(watched=True)

    def settle(self) -> None:
        """Returns when all that was called has started. Call without locks."""
        if self.late is not None:
            self.late()

    def in_flight(self) -> list[tuple[Operation, Announcement]]:
        """What has not ended. Call with the lock held where nothing may start meanwhile."""
        with self._lock:
            return [entry for entry in list(self._in_flight.values()) if not entry[0].is_done()]

    def uses(self) -> dict[tuple[int, str], int]:
        """How often each key of each process set has been used."""
        with self._lock:
            return dict(self._uses)

    def learn(self, uses: dict[tuple[int, str], int]) -> None:
        """They have been used so often outside of start()."""
        with self._lock:
            for place, count in uses.items():
                self._uses[place] = max(count, self._uses.get(place, 0))

    @property
    def lock(self) -> threading.RLock:
        """Held while operations start."""
        return self._lock

    def _track(self, kind: str, key: str, announcement: Announcement, steps: Steps, *, until_seen: bool) -> Operation:
        def explain(error: HerringError) -> Exception:
            joined = self.joins.joined()
            hint = ""
            if isinstance(error, MismatchError) and joined:
                hint = f" (ranks {sorted(joined)} have called join(), after which only allreduce and barrier work)"
            failure = HorovodInternalError(f"{key}: {error}{hint}")
            failure.__cause__ = error
            return failure

        operation = Operation(f"{kind} {key!r}", steps, self.session.config.timeout_s, explain)
        place = (announcement.set_id, key)
        entry = (operation, announcement)
        self._in_flight[place] = entry

        def forget() -> None:
            with self._lock:
                if self._in_flight.get(place) is entry:
                    del self._in_flight[place]

        if until_seen:
            operation.on_seen(forget)
        else:
            operation.on_done(forget)
        return operation

    # -- process sets -------------------------------------------------------------------------------------------

    def members(self, set_id: int) -> Members:
        """Raises InvalidArgumentError for a set that does not exist (any more)."""
        with self._lock:
            found = self._sets.get(set_id)
            if found is None:
                raise InvalidArgumentError(f"process set {set_id} does not exist (any more)")
            return found

    def sets(self) -> list[Members]:
        """All process sets, the global one first."""
        with self._lock:
            return [self._sets[set_id] for set_id in sorted(self._sets)]

    def add_set(self, ranks: Sequence[int]) -> Members:
        """Collective: every rank of the job calls it, in or out of the set. Raises InvalidArgumentError for bad ranks
        and for a set that is there already, HorovodInternalError where ranks say different things."""
        wanted = tuple(sorted(int(rank) for rank in ranks))
        if not wanted or len(set(wanted)) != len(wanted) or wanted[0] < 0 or wanted[-1] >= self.size:
            raise InvalidArgumentError(
                f"a process set of ranks {list(wanted)}: it takes different ranks from 0 to {self.size - 1}"
            )
        if any(each.ranks == wanted for each in self.sets()):
            raise InvalidArgumentError(f"Attempted to add a duplicate process set: {list(wanted)}")
        self._agree("add_process_set", [int(rank in wanted) for rank in range(self.size)])
        with self._lock:
            set_id, self._next_set = self._next_set, self._next_set + 1
            index = wanted.index(self.rank) if self.rank in wanted else None
            if index is not None:
                self.runtime.add_group(set_id, wanted)
                self.fusions.open(set_id, wanted, index)
            members = self._sets[set_id] = Members(set_id, wanted, index)
        self.run("process_set", f"added.{set_id}", GLOBAL_SET, collectives.barrier)
        return members

    def remove_set(self, set_id: int) -> None:
        """Collective, as add_set()."""
        members = self.members(set_id)
        self.settle()
        self._agree("remove_process_set", [set_id])
        self.fusions.close(set_id)
        with self._lock:
            del self._sets[set_id]
            if members.index is not None:
                self.runtime.remove_group(set_id)

    def _agree(self, what: str, mine: list[int]) -> None:
        row = np.asarray(mine, np.int64)
        table = np.empty((self.size, len(mine)), np.int64)

        def steps(call: Call) -> Steps:
            yield [call.submit("all_gather", row, table)]

        self.run("process_set", what, GLOBAL_SET, steps)
        if (table != row).any():
            told = ", ".join(f"rank {rank}: {table[rank].tolist()}" for rank in range(self.size))
            raise HorovodInternalError(f"{what}: ranks ask for different process sets: {told}")

    # -- elastic jobs -------------------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Whether the job has others in it than when this engine began, or will have now. Collective, in elastic jobs:
        the same on all ranks; new workers have come in where it returns True."""
        runtime = self.session.elastic
        if runtime is None:
            return False
        changed = np.array([int(runtime.generation != self._generation)], np.int64)
        # Who has contributed 1 is in the next generation, and so is who has got it.
        self.run(
            "elastic", "changed", GLOBAL_SET, lambda call: collectives.all_reduce(call, [changed], [changed], "max")
        )
        return runtime.let_in(self.session.config.join_timeout_s) or bool(changed[0])

    def drop_sets(self) -> None:
        """Process sets go with the engine."""
        with self._lock:
            for members in self._sets.values():
                if members.set_id != GLOBAL_SET and members.index is not None:
                    self.runtime.remove_group(members.set_id)

    # -- life ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the session too, where init() has begun it."""
        try:
            self.settle()
        finally:
            for callback in self.closing:
                callback()
        if self.timeline is not None:
            self.timeline.close()
            self.timeline = None
        self.stalls.close()
        self.joins.close()
        self.fusions.close_all()
        if self._owns_session and process.session() is self.session:
            process.stop()


class Home:
    """Where this process's engine lives between init and shutdown; one, `home` below, for all frameworks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._starts: list[Callable[[], None]] = []

    def on_start(self, callback: Callable[[], None]) -> None:
        """Calls it whenever there is another engine after an init(), from now on."""
        self._starts.append(callback)

    def start(self) -> Engine:
        """Joins the job; where that was done, returns the engine there is."""
        with self._lock:
            engine = self.peek()
            if engine is None:
                owns = process.session() is None
                engine = self._engine = Engine(process.start(stall_settings() if owns else {}), owns)
                try:
                    engine.timeline = timeline_of_environment(engine.rank)
                except InvalidArgumentError:
                    self.stop()
                    raise
                for callback in self._starts:
                    callback()
            return engine

    def restart(self, failed: bool) -> None:
        """Begins again in the same job, with the ranks that are there now. Collective, in elastic jobs.

        `failed`: operations may have been under way, and not the same on all ranks.
        """
        with self._lock:
            engine = self.current()
            runtime = engine.session.elastic
            if runtime is None:
                raise InvalidArgumentError("only an elastic job can start again: use herringrun --elastic")
            if failed:
                runtime.start_again(engine.session.config.join_timeout_s)
            engine.drop_sets()
            engine.stalls.close()
            engine.joins.close()
            self._engine = Engine(engine.session, engine._owns_session)
            self._engine.timeline = engine.timeline

    def peek(self) -> Engine | None:
        """The engine, if there is one whose session still runs."""
        engine = self._engine
        return engine if engine is not None and process.running is engine.session else None

    def current(self) -> Engine:
        """The engine. Raises InvalidArgumentError (a ValueError, as Horovod) before init() and after shutdown()."""
        engine = self._engine  # peek(), without the call: every small tensor comes here
        if engine is None or process.running is not engine.session:
            raise InvalidArgumentError("Horovod has not been initialized; use hvd.init().")
        return engine

    def stop(self) -> None:
        """Leaves the job. Idempotent."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                with contextlib.suppress(HerringError):
                    engine.close()


home = Home()
