"""A GPU for torch where there is none (accelerator.cc): builds it once for the installed torch, and loads it.

With GPU_TEST_ACCELERATOR=cuda the same tests run on a real GPU (real_gpu.py).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.utils import cpp_extension

if TYPE_CHECKING:
    from real_gpu import RealGpu

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from compiled import DOUBLES, ROOT, compiled

HERE = Path(__file__).resolve().parent
IS_REAL = os.environ.get("GPU_TEST_ACCELERATOR") == "cuda"
DEVICE = "cuda" if IS_REAL else "privateuseone"


def prepare() -> None:
    """What takes long, before ranks with a time limit want it: for tests, a fixture of their module. Raises
    RuntimeError where the fake does not compile."""
    if IS_REAL:
        return
    build()


def build() -> Path:
    """The fake's library, compiled where it is not there yet."""
    doubles = ("fake_gpu", "fake_device", "fake_collectives", "locked_device")
    sources = [HERE / "accelerator.cc", *(DOUBLES / f"{name}.h" for name in doubles)]
    sources += [ROOT / "csrc" / "core" / "device.h", ROOT / "csrc" / "cuda" / "kernels" / "twins.h"]
    sources += [ROOT / "csrc" / "core" / "device_collectives.h", ROOT / "csrc" / "cuda" / "nccl_prototypes.h"]
    flags = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        *(f"-L{path}" for path in cpp_extension.library_paths()),
        *("-ltorch", "-ltorch_cpu", "-lc10"),
    ]
    return compiled("accelerator", torch.__version__, sources, flags)


def load() -> ctypes.CDLL | RealGpu:
    """Makes torch know the device, and backend herring take its tensors."""
    if IS_REAL:
        from real_gpu import RealGpu

        return RealGpu()
    library = ctypes.CDLL(str(build()))
    library.fake_fault.restype = ctypes.c_char_p
    library.fake_allocated.restype = ctypes.c_uint64
    library.fake_copies.restype = ctypes.c_int64
    library.fake_launches.restype = ctypes.c_int64
    library.fake_collectives.restype = ctypes.c_int64
    library.fake_new_stream.restype = ctypes.c_int64
    library.fake_set_stream.restype = ctypes.c_int64
    library.fake_set_stream.argtypes = [ctypes.c_int64]
    library.fake_fill_later.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
    module = types.ModuleType("fake_accelerator")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module.is_available = module.is_initialized = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    torch._register_device_module(DEVICE, module)
    import herring.torch  # noqa: F401

    dist.Backend.backend_capability["herring"] = ["cpu", DEVICE]
    return library


def expect_freed(gpu: ctypes.CDLL | RealGpu, most: int) -> None:
    """No more than so many bytes stay allocated: the thread that looks after copies drops what they were made from, in
    its own time."""
    deadline = time.monotonic() + 20
    while gpu.fake_allocated() > most and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gpu.fake_allocated() <= most, "tensors are kept for ever"
