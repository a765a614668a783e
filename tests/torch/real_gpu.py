"""A real GPU behind the calls that the tests make to the fake one (accelerator.cc): late kernels, streams, captures.

Used where GPU_TEST_ACCELERATOR=cuda is set (tests/gpu/run.sh).
"""

from __future__ import annotations

import ctypes
import threading

import torch

#: Lowest clock cycles that a late kernel is late: about 1 ms.
LATE_CYCLES = 2_000_000
#: A stalled stream goes on by itself after this time, so that a test that fails does not hang the device.
LONGEST_STALL_S = 30.0


class RealGpu:
    """What accelerator.load() gives on a machine with a GPU. The names are those of the fake's functions."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._streams: list[torch.cuda.Stream] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._stalls = 0
        self._timer: threading.Timer | None = None

    def _ask(self, call: str, *arguments: object) -> None:
        result = getattr(self._driver, call)(*arguments)
        assert result == 0, f"{call} gave {result}"

    def fake_fault(self) -> bytes:
        torch.cuda.synchronize()  # A failed device says so here.
        return b""

    def fake_run_all(self) -> None:
        torch.cuda.synchronize()

    def fake_allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def fake_new_stream(self) -> int:
        self._streams.append(torch.cuda.Stream())
        return len(self._streams) - 1

    def fake_set_stream(self, number: int) -> None:
        torch.cuda.set_stream(self._streams[number])

    def fake_fill_later(self, address: int, count: int, value: int) -> None:
        stream = torch.cuda.current_stream()
        torch.cuda._sleep(LATE_CYCLES)
        self._ask(
            "cuMemsetD8Async",
            ctypes.c_uint64(address),
            ctypes.c_ubyte(value),
            ctypes.c_size_t(count),
            ctypes.c_void_p(stream.cuda_stream),
        )

    def fake_capture(self, is_on: int) -> None:
        if is_on:
            self._streams.append(torch.cuda.current_stream())
            torch.cuda.synchronize()
            torch.cuda.set_stream(torch.cuda.Stream())
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin()
            return
        assert self._graph is not None
        self._graph.capture_end()
        self._graph = None
        torch.cuda.set_stream(self._streams.pop())

    def fake_stall(self, is_on: int) -> None:
        """The current stream stops where it is, until it is called with 0."""
        if is_on:
            self._stalls += 1
            self._ask(
                "cuStreamWaitValue32_v2",
                ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                ctypes.c_uint64(self._flag.data_ptr()),
                ctypes.c_uint32(self._stalls),
                ctypes.c_uint(0),  # CU_STREAM_WAIT_VALUE_GEQ
            )
            self._timer = threading.Timer(LONGEST_STALL_S, self._go_on)
            self._timer.daemon = True
            self._timer.start()
            return
        if self._timer:
            self._timer.cancel()
        self._go_on()

    def _go_on(self) -> None:
        self._flag.fill_(self._stalls)
