"""What a careless script does, in a worker of chaos.py: several operations of one name at once, calls after the end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import herring

NAMES, LATE = "names", "late"
SAME = 3  # So many operations of one name, pending at once.
_THREADS = 3
_LONG_S = 20.0


def chosen() -> set[str]:
    """Of NAMES and LATE."""
    return {deed for deed in os.environ.get("CHAOS_DEEDS", "").split(",") if deed}


def submit_same_names(arrays: Sequence[Any]) -> list[Any]:
    """Handles of sums that are all called alike: in this order on every rank they are one operation after the other."""
    return [herring.allreduce(array, "sum", name="twice", async_op=True) for array in arrays]


def shut_down_under_calls(array: Any) -> str:
    """herring.shutdown() while other threads look on, then call. Empty, or what they got that was no ShutdownError."""
    complaints: list[str] = []
    from herring._context import process

    runtime = process.current().runtime

    def look_on() -> None:
        deadline = time.monotonic() + _LONG_S
        while herring.is_initialized() and time.monotonic() < deadline:
            runtime.stats()
            time.sleep(0.001)
        # All ranks make this one, so it may end well where shutdown() has not begun below: it must not crash.
        with contextlib.suppress(herring.HerringError):
            runtime.run("all_reduce", array, array.copy(), "sum", 0, "late", 5.0, False)
        complaints.extend(calls_that_pass(array))

    threads = [threading.Thread(target=look_on, daemon=True) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    herring.shutdown()
    complaints.extend(calls_that_pass(array, runtime))
    for thread in threads:
        thread.join(_LONG_S)
        if thread.is_alive():
            complaints.append(f"a call after shutdown() did not end within {_LONG_S:g} s")
    return "; ".join(sorted(set(complaints)))


def calls_that_pass(array: Any, runtime: Any = None) -> list[str]:
    """Of calls when there is no job: those that did not say so."""
    calls: dict[str, Callable[[], object]] = {
        "allreduce": lambda: herring.allreduce(array, "sum"),
        "allreduce with async_op": lambda: herring.allreduce(array, "sum", name="late", async_op=True),
        "broadcast": lambda: herring.broadcast(array, 0),
        "barrier": herring.barrier,
        "stats": herring.stats,
    }
    wrong = [f"{name} after shutdown(): {text}" for name, call in calls.items() if (text := _answer(call))]
    if runtime is not None:  # What a thread holds that was in a call when another one called shutdown().
        with contextlib.suppress(herring.HerringError):
            runtime.run("all_reduce", array, array.copy(), "sum", 0, "late", None, False)
            wrong.append("the runtime's own call after shutdown() returned")
    return wrong


def _answer(call: Callable[[], object]) -> str:
    try:
        call()
    except herring.ShutdownError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def calls_after_a_failure(array: Any) -> str:
    """The job has failed, or was never joined: a call says so at once, and so does one after shutdown()."""
    began = time.monotonic()
    complaint = ""
    try:
        herring.allreduce(array, "sum")
        complaint = "an allreduce after the job had failed returned"
    except herring.HerringError:
        pass
    herring.shutdown()
    seconds = time.monotonic() - began
    if seconds > _LONG_S:
        complaint = f"a call after the failure, and shutdown(), took {seconds:.1f} s"
    return complaint or "; ".join(calls_that_pass(array))
