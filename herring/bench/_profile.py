"""What an operation costs besides time: system calls and sleeps of a whole process, counted by the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from herring._errors import UnavailableError

# perf_event_open has no wrapper in the C library. Its numbers and its structure are the kernel's interface.
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_TYPE_TRACEPOINT = 2
_INHERIT = 1 << 1
_ATTRIBUTE_BYTES = 112
_CLOEXEC = 1 << 3
_ROOTS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_EVENT = "events/raw_syscalls/sys_enter/id"


@dataclass(frozen=True)
class Costs:
    """Of this process, all threads: processor seconds (user and system), system calls, and how often a thread went to
    sleep, each of which costs a wake-up. `syscalls`: None where nobody counts them."""

    processor_s: float = 0.0
    syscalls: int | None = None
    sleeps: int = 0

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.processor_s + other.processor_s,
            None if self.syscalls is None or other.syscalls is None else self.syscalls + other.syscalls,
            self.sleeps + other.sleeps,
        )

    def __sub__(self, other: Costs) -> Costs:
        return Costs(
            self.processor_s - other.processor_s,
            None if self.syscalls is None or other.syscalls is None else self.syscalls - other.syscalls,
            self.sleeps - other.sleeps,
        )

    def scaled(self, factor: float) -> Costs:
        """Of so many times as much."""
        return Costs(
            self.processor_s * factor,
            None if self.syscalls is None else round(self.syscalls * factor),
            round(self.sleeps * factor),
        )


def tracepoint() -> int:
    """The kernel's number of the event "a system call begins".

    Raises UnavailableError that says what is missing: --profile needs root, or CAP_PERFMON and a readable tracefs.
    """
    if platform.machine() not in _PERF_EVENT_OPEN:
        raise UnavailableError(f"--profile is for {' and '.join(_PERF_EVENT_OPEN)}, not {platform.machine()}")
    for root in _ROOTS:
        with contextlib.suppress(OSError, ValueError):
            return int((root / _EVENT).read_text())
    raise UnavailableError(
        "--profile counts system calls and cannot: /sys/kernel/tracing/events/raw_syscalls is not readable here. "
        "Run as root, with tracefs mounted: mount -t tracefs none /sys/kernel/tracing"
    )


def _open_counter(event: int, thread: int) -> int:
    attribute = bytearray(_ATTRIBUTE_BYTES)
    struct.pack_into("=IIQ", attribute, 0, _TYPE_TRACEPOINT, _ATTRIBUTE_BYTES, event)
    struct.pack_into("=Q", attribute, 40, _INHERIT)
    library = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_PERF_EVENT_OPEN[platform.machine()])
    buffer = (ctypes.c_char * len(attribute)).from_buffer(attribute)
    descriptor = library.syscall(number, buffer, ctypes.c_int(thread), -1, -1, ctypes.c_ulong(_CLOEXEC))
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(descriptor)


class Meter:
    """Reads Costs. `event`: of tracepoint(), or None for no count of system calls."""

    def __init__(self, event: int | None = None) -> None:
        self._counters: list[int] = []
        self._is_counting = event is not None
        if event is None:
            return
        try:
            for thread in os.listdir("/proc/self/task"):
                # A thread may have ended meanwhile. What a counted thread starts is counted with it.
                with contextlib.suppress(ProcessLookupError):
                    self._counters.append(_open_counter(event, int(thread)))
        except OSError as error:
            self.close()
            raise UnavailableError(
                f"--profile: the kernel does not let this process count its system calls ({error.strerror}). Run as "
                "root, or with CAP_PERFMON"
            ) from error

    def read(self) -> Costs:
        """Since some moment before this meter."""
        # The counters' own reads are of this thread, and the same number each time.
        syscalls = None
        if self._is_counting:
            syscalls = sum(struct.unpack("=Q", os.read(each, 8))[0] for each in self._counters)
        return Costs(time.process_time(), syscalls, resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw)

    def overhead(self) -> int:
        """System calls of one read() that are inside what two of them enclose."""
        if not self._is_counting:
            return 0
        calls = []
        for _ in range(3):
            begin = self.read()
            calls.append(self.read() - begin)
        return min(each.syscalls or 0 for each in calls)

    def close(self) -> None:
        """Idempotent."""
        while self._counters:
            os.close(self._counters.pop())
