"""How the members of a new group settle on something over a store that may hold an earlier run's entries.

A file:// store often does: torch's FileStore leaves its file behind where two processes end at the same moment, and the
next run finds every key there already. So nothing counts that does not answer what was written in this run: each member
says something with a fresh mark; the first member's verdict repeats the marks that it read; a member that finds its own
mark in it says so under the verdict's mark; and when all have, the first member says go.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

_POLL_S = 0.01
_LOOK_AGAIN_S = 0.25  # Between two looks at what may have been an earlier run's.
_VERDICT_MARGIN_S = 5.0  # The first member knows who is missing, and says so a moment after the timeout.


def settle(
    store: Any, prefix: str, rank: int, size: int, said: dict[str, Any], decide: Callable[[list[Any]], dict[str, Any]],
    deadline: float,
) -> dict[str, Any]:  # fmt: skip
    """The verdict, the same on all members, with a "mark" that no other run has.

    Member 0 calls `decide` with what all members said, in their order; again where some of it was an earlier run's.
    `deadline` is on time.monotonic(). Raises TimeoutError with the ranks that have not come, or [0], on all members.
    """
    said = {**said, "mark": secrets.token_hex(8)}
    store.set(f"{prefix}{rank}", json.dumps(said))
    if rank == 0:
        return _lead(store, prefix, size, decide, deadline)
    deadline += _VERDICT_MARGIN_S
    while True:
        verdict = json.loads(store.get(f"{prefix}verdict")) if store.check([f"{prefix}verdict"]) else {"heard": []}
        if verdict["heard"][rank : rank + 1] == [said["mark"]]:
            if "late" in verdict:
                raise TimeoutError(verdict["late"])
            here = f"{prefix}{verdict['mark']}/"
            try:
                store.set(f"{here}{rank}", "1")
                if _wait(store, [f"{here}go"], min(deadline, time.monotonic() + _LOOK_AGAIN_S)):
                    return verdict
            except RuntimeError:  # torch's DistNetworkError among them.
                # The first member ends with the same error, and its store with it.
                if "error" in verdict:
                    return verdict
                raise
        elif not verdict["heard"]:
            _wait(store, [f"{prefix}verdict"], deadline)
        if time.monotonic() > deadline:
            raise TimeoutError([0])
        time.sleep(_POLL_S)


def _lead(
    store: Any, prefix: str, size: int, decide: Callable[[list[Any]], dict[str, Any]], deadline: float
) -> dict[str, Any]:
    keys = [f"{prefix}{rank}" for rank in range(size)]
    if not _wait(store, keys, deadline):
        raise _late(store, prefix, keys, _absent(store, keys))
    heard: list[str] = []
    verdict: dict[str, Any] = {}
    while True:
        said = [json.loads(value) for value in _get_all(store, keys)]
        marks = [each["mark"] for each in said]
        if marks != heard:
            heard = marks
            verdict = {**decide(said), "heard": heard, "mark": secrets.token_hex(8)}
            store.set(f"{prefix}verdict", json.dumps(verdict))
        here = f"{prefix}{verdict['mark']}/"
        answers = [f"{here}{rank}" for rank in range(1, size)]
        if _wait(store, answers, min(deadline, time.monotonic() + _LOOK_AGAIN_S)):
            store.set(f"{here}go", "1")
            return verdict
        if time.monotonic() > deadline:
            raise _late(store, prefix, keys, [rank + 1 for rank in _absent(store, answers)])


def _late(store: Any, prefix: str, keys: list[str], missing: list[int]) -> TimeoutError:
    """Says it to those who have come, too."""
    here = [json.loads(store.get(key))["mark"] if store.check([key]) else None for key in keys]
    store.set(f"{prefix}verdict", json.dumps({"heard": here, "late": missing}))
    return TimeoutError(missing)


def _wait(store: Any, keys: list[str], deadline: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError:  # torch's DistStoreError among them.
        return bool(store.check(keys))
    return True


def _absent(store: Any, keys: list[str]) -> list[int]:
    return [index for index, key in enumerate(keys) if not store.check([key])]


def _get_all(store: Any, keys: list[str]) -> list[bytes]:
    """In one round trip where the store can."""
    return list(store.multi_get(keys)) if store.has_extended_api() else [store.get(key) for key in keys]
