"""The stall check: a warning that names the operations which wait for ranks that have not started them, and the ranks.

A thread looks at what is in flight. What has been for HOROVOD_STALL_CHECK_TIME_SECONDS is asked about: every other rank
answers which of it is not in flight there. Nothing is sent before that, and nothing where nothing stalls.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from herring._errors import HerringError
from herring._job import read_settings
from herring._log import say
from herring.horovod._engine.environment import is_set, read_number

if TYPE_CHECKING:
    from herring.horovod._engine.engine import Engine

_WARN_AFTER_S = 60.0
# So many times in that time it is looked; so long an answer may take.
_LOOKS = 8
_ANSWER_S = 2.0
_LONGEST_LIST = 5
_LONGEST_S = 4_000_000.0  # As HERRING_STALL_WARNING_S's.

Place = tuple[int, str]  # process set and key


def settings() -> dict[str, object]:
    """For init(): of what is not looked at here (TensorFlow's operations, elastic jobs), and of what still waits, the
    runtime warns after twice the time. Its own setting wins."""
    name = "HERRING_STALL_WARNING_S"
    if any(setting == name and source != "default" for setting, _, source in read_settings({}).origins):
        return {}
    if is_set("HOROVOD_STALL_CHECK_DISABLE"):
        return {"stall_warning_s": 0.0}
    return {"stall_warning_s": min(2 * _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", _WARN_AFTER_S), _LONGEST_S)}


class Stalls:
    """Asks and answers for one engine, from a thread of its own where there are others to wait for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._warn_after_s = _seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", _WARN_AFTER_S)
        self._shut_down_after_s = _seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0) or math.inf
        self._since: dict[Place, tuple[object, float]] = {}
        self._warned: set[object] = set()
        self._question = 0
        self._answers: dict[int, set[Place]] = {}  # by rank: what is not in flight there; guarded by the engine's lock
        self._stop = threading.Event()
        is_off = is_set("HOROVOD_STALL_CHECK_DISABLE") or self._warn_after_s == 0
        if engine.size > 1 and engine.session.elastic is None and not is_off:
            threading.Thread(target=self._run, name="herring-stalls", daemon=True).start()

    def close(self) -> None:
        """Nothing is said from now on."""
        self._stop.set()

    def take(self, source: int, message: dict[str, Any]) -> None:
        """A message of another rank's Stalls. Call with the engine's lock held."""
        if "stalled" in message:
            here = set(self._pending())
            missing = [place for place in map(tuple, message["stalled"]) if place not in here]
            self._engine.joins.tell(source, {"question": message["question"], "missing": missing})
        elif message["question"] == self._question:
            self._answers[source] = {(set_id, key) for set_id, key in message["missing"]}

    def _run(self) -> None:
        while not self._stop.wait(self._warn_after_s / _LOOKS):
            late = self._late()
            if not late:
                continue
            # The job's end shows in the operations themselves.
            with contextlib.suppress(HerringError):
                self._look_into(late)

    def _pending(self) -> dict[Place, object]:
        """What has not ended here, each with what tells it from a later one of the same name."""
        found: dict[Place, object] = {}
        for operation, announcement in self._engine.in_flight():
            found[announcement.set_id, announcement.key] = operation
        found.update(self._engine.fusions.pending())
        return found

    def _late(self) -> dict[Place, float]:
        """What has been in flight too long and was not said, and for how long."""
        now = time.monotonic()
        pending = self._pending()
        known = self._since
        self._since = {}
        for place, which in pending.items():
            before = known.get(place)
            self._since[place] = before if before is not None and before[0] == which else (which, now)
        self._warned &= set(pending.values())
        return {
            place: now - begun
            for place, (which, begun) in self._since.items()
            if now - begun >= (self._shut_down_after_s if which in self._warned else self._warn_after_s)
        }

    def _look_into(self, late: dict[Place, float]) -> None:
        engine = self._engine
        members = {set_id: engine.members(set_id).ranks for set_id in {set_id for set_id, _ in late}}
        asked = set().union(*members.values()) - {engine.rank}
        with engine.lock:
            self._question += 1
            self._answers.clear()
            for rank in asked:
                mine = [place for place in late if rank in members[place[0]]]
                engine.joins.tell(rank, {"question": self._question, "stalled": mine})
        last = time.monotonic() + _ANSWER_S
        while not asked <= self._answers.keys() and time.monotonic() < last:
            if self._stop.wait(_ANSWER_S / 40):
                return
        with engine.lock:
            answers = dict(self._answers)
        self._tell(late, members, answers)

    def _tell(
        self, late: dict[Place, float], members: dict[int, tuple[int, ...]], answers: dict[int, set[Place]]
    ) -> None:
        """One rank says it: the first of those that have it in flight."""
        engine = self._engine
        still = self._pending()
        # Operations that wait for the same ranks are one line.
        lines: defaultdict[tuple[tuple[int, ...], tuple[int, ...]], list[Place]] = defaultdict(list)
        for place in late:
            if place not in still or still[place] != self._since[place][0]:
                continue
            ranks = [rank for rank in members[place[0]] if rank != engine.rank]
            silent = tuple(rank for rank in ranks if rank not in answers)
            missing = tuple(rank for rank in ranks if place in answers.get(rank, ()))
            self._warned.add(still[place])
            has_it = [rank for rank in members[place[0]] if rank not in silent and rank not in missing]
            if (missing or silent) and has_it[0] == engine.rank:
                lines[missing, silent].append(place)
        for (missing, silent), places in lines.items():
            longest = max(late[place] for place in places)
            text = _text(missing, silent, sorted(key for _, key in places), longest)
            say(logging.WARNING, text, f"herring: rank {engine.rank}")
            if longest >= self._shut_down_after_s:
                engine.runtime.abort(f"{text} (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS)")


def _text(missing: tuple[int, ...], silent: tuple[int, ...], keys: list[str], seconds: float) -> str:
    who = []
    if missing:
        who.append(f"{_ranks(missing)}, which {'has' if len(missing) == 1 else 'have'} not started it")
    if silent:
        who.append(f"{_ranks(silent)}, which {'does' if len(silent) == 1 else 'do'} not answer")
    names = ", ".join(keys[:_LONGEST_LIST])
    more = f" and {len(keys) - _LONGEST_LIST} more" if len(keys) > _LONGEST_LIST else ""
    return f"stalled for {seconds:.0f} s: {names}{more}: waiting for {' and for '.join(who)}"


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def _seconds(name: str, otherwise: float) -> float:
    return read_number(name, otherwise, "a number of seconds, 0 for never", float, 1e9)
