"""Where what is built at its first use is kept, and how the ranks of a host build it once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from herring._errors import HerringTimeoutError, UnavailableError
from herring._version import __version__

_LOCK_LIMIT_S = 900.0


def folder(*belongs_to: str) -> Path:
    """Of what was built from and for these: nothing in it is ever stale. Raises UnavailableError if there is none."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # A user that the system does not know, as in containers, and no HOME.
        raise UnavailableError(
            f"no folder to build in ({error}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return root / "herring" / "-".join([__version__, *belongs_to])


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a file lock, so that the ranks of a host build once; makes the folder. The lock ends with the process that
    holds it. Raises OSError, and HerringTimeoutError where another process holds it for long."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    deadline = time.monotonic() + _LOCK_LIMIT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HerringTimeoutError(
                        f"another process has held {path} for {_LOCK_LIMIT_S:.0f} s; "
                        "remove the file if none is building"
                    ) from None
                time.sleep(0.1)
        yield
