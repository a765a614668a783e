"""The standard streams, as this process was given them."""

from __future__ import annotations

import os


def open_standard_descriptors() -> None:
    """Who has closed one of them must not get a socket or a pipe of ours in its place: what some library then writes to
    stderr would be bytes of a gradient."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
