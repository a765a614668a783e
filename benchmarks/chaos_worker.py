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

MARK = "@@chaos "
WRONG_SUM = 97
DTYPES = ("float32", "float64", "int64")


def say(what: str, **details: object) -> None:
    line = json.dumps({"what": what, "at": time.monotonic(), "pid": os.getpid(), **details})
    # One write: under a launcher several processes share the pipe.
    os.write(1, f"{MARK}{line}\n".encode())


def main() -> None:
    steps, sizes = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    say("start")
    import numpy as np

    import herring

    # Another one in each of two jobs that start side by side: a sum says whose it is.
    job = int(os.environ.get("CHAOS_JOB", "0"))

    def term(size: int, dtype: str) -> np.ndarray:
        return (np.arange(size) % 7 + 7 * job).astype(dtype)

    # Every worker brings a power of ten: a sum says who is in it. In an elastic job it may be fewer than all.
    name = int(os.environ["RANK"])
    everybody = sum(10**rank for rank in range(int(os.environ["WORLD_SIZE"])))
    is_elastic = os.environ.get("HERRING_ELASTIC") == "on"
    sums: list[int] = []

    def check(step: int, got: np.ndarray, size: int, dtype: str) -> None:
        unit = step + 1 + term(size, dtype)
        contributors = int(got[0]) // (step + 1 + 7 * job)
        digits = f"{contributors:d}".zfill(len(str(everybody)))
        whole = contributors == everybody or (is_elastic and set(digits) <= {"0", "1"} and digits[-1 - name] == "1")
        if not whole or not np.array_equal(got, contributors * unit):
            say("wrong", step=step, size=size, dtype=dtype, contributors=contributors)
            os._exit(WRONG_SUM)
        sums.append(contributors)

    try:
        say("connect")
        herring.init()
        say("connected", how=herring.description())
        for step in range(steps):
            say("step", step=step)
            pending = []
            for number, size in enumerate(sizes):
                dtype = DTYPES[(step + number) % len(DTYPES)]
                mine = (10**name * (step + 1 + term(size, dtype))).astype(dtype)
                pending.append((herring.allreduce(mine, "sum", async_op=True), size, dtype))
            for handle, size, dtype in pending:
                check(step, handle.wait(), size, dtype)
        say("shutdown")
        herring.shutdown()
        say("done", sums=sums)
    except herring.HerringError as error:
        say("error", kind=type(error).__name__, text=str(error))
        raise


if __name__ == "__main__":
    main()
