"""One worker of a chaos job: sums whose results are known, each step checked bit by bit (see chaos.py).

What it does is told on stdout, one JSON object a line with the monotonic time: start, connect, step, shutdown, done,
and error with the class and text of what Herring raised. Exit status 97: a sum was wrong.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

MARK = "@@chaos "
WRONG_SUM = 97
DTYPES = ("float32", "float64", "int64")


def say(what: str, **details: object) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **details})
    # One write: under a launcher several processes share the pipe.
    os.write(1, f"{MARK}{line}\n".encode())


class Sums:
    """What this worker brings and what it must get; each sum is checked bit by bit."""

    def __init__(self) -> None:
        # Another one in each of two jobs that start side by side: a sum says whose it is.
        self.job = int(os.environ.get("CHAOS_JOB", "0"))
        # Every worker brings a power of ten: a sum says who is in it. In an elastic job it may be fewer than all.
        self.name = int(os.environ["RANK"])
        self.everybody = sum(10**rank for rank in range(int(os.environ["WORLD_SIZE"])))
        self.is_elastic = os.environ.get("HERRING_ELASTIC") == "on"
        self.seen: list[int] = []

    def term(self, size: int, dtype: str) -> Any:
        return (np.arange(size) % 7 + 7 * self.job).astype(dtype)

    def mine(self, step: int, size: int, dtype: str) -> Any:
        return (10**self.name * (step + 1 + self.term(size, dtype))).astype(dtype)

    def check(self, step: int, got: Any, size: int, dtype: str) -> int:
        """Who is in it, as a sum of their powers."""
        contributors = int(got[0]) // (step + 1 + 7 * self.job)
        digits = f"{contributors:d}".zfill(len(str(self.everybody)))
        some = self.is_elastic and set(digits) <= {"0", "1"} and digits[-1 - self.name] == "1"
        whole = contributors == self.everybody or some
        if not whole or not np.array_equal(got, contributors * (step + 1 + self.term(size, dtype))):
            wrong(step=step, size=size, dtype=dtype, contributors=contributors)
        return contributors

    def take_step(self, step: int, sizes: list[int], *, with_same_names: bool) -> None:
        pending = []
        for number, size in enumerate(sizes):
            dtype = DTYPES[(step + number) % len(DTYPES)]
            handle = herring.allreduce(self.mine(step, size, dtype), "sum", async_op=True)
            pending.append((handle, size, dtype))
        later = [step + 1000 * (1 + number) for number in range(chaos_deeds.SAME)] if with_same_names else []
        same = chaos_deeds.submit_same_names([self.mine(each, sizes[0], "float64") for each in later])
        for handle, size, dtype in pending:
            self.seen.append(self.check(step, handle.wait(), size, dtype))
        for each, handle in zip(later, same, strict=True):
            self.check(each, handle.wait(), sizes[0], "float64")


def wrong(**details: object) -> None:
    say("wrong", **details)
    os._exit(WRONG_SUM)


def main() -> None:
    steps, sizes = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    deeds, sums = chaos_deeds.chosen(), Sums()
    try:
        say("connect")
        herring.init()
        say("connected", how=herring.description())
        for step in range(steps):
            say("step", step=step)
            sums.take_step(step, sizes, with_same_names=chaos_deeds.NAMES in deeds)
        say("shutdown")
        if chaos_deeds.LATE not in deeds:
            herring.shutdown()
        elif complaint := chaos_deeds.shut_down_under_calls(sums.mine(0, 10, "float32")):
            wrong(deed=complaint)
        say("done", sums=sums.seen)
    except herring.HerringError as error:
        say("error", kind=type(error).__name__, text=str(error))
        if chaos_deeds.LATE in deeds and (complaint := chaos_deeds.calls_after_a_failure(sums.mine(0, 10, "float32"))):
            wrong(deed=complaint)
        raise


if __name__ == "__main__":
    if "--help" in sys.argv:
        sys.exit(print(__doc__))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    say("start")  # What takes time comes after this.
    import chaos_deeds
    import numpy as np

    import herring

    main()
