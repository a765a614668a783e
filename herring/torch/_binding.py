"""Finds the compiled binding for this interpreter's torch: installed, cached, or built now."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch

from herring import (
    _build_cache,
    _core,  # noqa: F401  (loads libherring.so, which the binding links to)
)
from herring._errors import UnavailableError
from herring._log import say
from herring.torch import _build

_INSTALLED = Path(__file__).resolve().parent


class Binding(Protocol):
    """The compiled module (bindings/torch/module.cc)."""

    torch_version: str

    def Process(  # noqa: N802
        self,
        runtime_capsule: object,
        takes_accelerators: bool,
        on_host: str,
        device_memory_bytes: int,
        device_blocks: int,
        nccl: str,
        gpudirect: str,
        eager_bytes: int,
    ) -> Any:
        """Holds the runtime for all groups of this process."""

    def create_backend(
        self,
        process: Any,
        group_id: int,
        name: str,
        rank: int,
        job_ranks: list[int],
        timeout_ms: int,
        is_world: bool,
        released: Any,
    ) -> Any:
        """A torch.distributed Backend; calls released() once, when it is destroyed."""

    def Stager(self) -> Any:  # noqa: N802
        """What looks after the copies of hand()."""

    def HostMemory(self, runtime_capsule: object) -> Any:  # noqa: N802
        """Where the host tensors of hand() are."""

    def hand(self, stager: Any, memory: Any, device: torch.device, call: str, timeout_s: float) -> Any:
        """Copies between tensors on a device and host tensors (bindings/torch/handed.h)."""

    def moment(self, device: torch.device) -> Any:
        """What the current stream has now, for other streams to wait for."""


def load() -> Binding:
    """The binding for this torch; builds it where there is none yet, which takes a minute and says so on stderr.

    Raises UnavailableError that says what to install where it cannot be built.
    """
    name = _build.module_name(torch.__version__)
    loaded = sys.modules.get(f"herring.torch.{name}")
    if loaded is not None:
        return cast(Binding, loaded)
    try:
        sources = _build.Sources.find()
        return _import(name, _find_or_build(sources, name))
    except _build.BuildError as error:
        raise UnavailableError(str(error)) from error


def describe() -> tuple[str, str]:
    """Whether the binding for this torch is "there", is "to build" or is "impossible", and what there is to say; builds
    and loads nothing."""
    name = _build.module_name(torch.__version__)
    try:
        digest = _build.Sources.find().digest()
        wanted = _build.stamp(torch.__version__, digest).encode()
        for folder in (_INSTALLED, cache_folder(digest)):
            if _has_stamp(folder / f"{name}.so", wanted):
                return "there", f"the binding for it is there ({folder})"
        _build.check_build(torch.__version__, bool(torch._C._GLIBCXX_USE_CXX11_ABI))
    except (_build.BuildError, UnavailableError) as error:
        return "impossible", str(error)
    return "to build", "no binding for it yet: its first use builds one in about 25 s, or now: herring build torch"


def cache_folder(digest: str) -> Path:
    """Where a first import builds: by Herring, torch, Python and sources, so that nothing in it is ever stale."""
    return _build_cache.folder(torch.__version__, _build.python_tag(), digest)


def _find_or_build(sources: _build.Sources, name: str) -> Path:
    digest = sources.digest()
    wanted = _build.stamp(torch.__version__, digest).encode()
    folder = cache_folder(digest)
    for candidate in (_INSTALLED / f"{name}.so", folder / f"{name}.so"):
        if _has_stamp(candidate, wanted):
            return candidate
    try:
        with _build_cache.locked(folder):
            if _has_stamp(folder / f"{name}.so", wanted):  # Another process built it meanwhile.
                return folder / f"{name}.so"
            _say_why(name, folder)
            return _build.build_into(folder)
    except OSError as error:
        raise UnavailableError(
            f"the torch binding cannot be built in {folder} ({error}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _has_stamp(file: Path, wanted: bytes) -> bool:
    try:
        return wanted in file.read_bytes()
    except OSError:
        return False


def _say_why(name: str, folder: Path) -> None:
    found = sorted(_INSTALLED.glob("_torch_*_cp*.so"))
    others = sorted({_build.stamped_release(file) or "something else" for file in found if file.stem != name})
    if any(file.stem == name for file in found):
        release = _build.stamped_release(_INSTALLED / f"{name}.so")
        is_other = release != torch.__version__.partition("+")[0]
        others.insert(0, f"torch {release}, whatever its name says" if is_other else "other sources of Herring")
    reason = f" (the installed binding is for {', '.join(others)})" if others else ""
    say(
        logging.WARNING,
        f"building the torch {torch.__version__} binding once, about 25 s, in {folder}{reason}",
        "herring",
    )


def _import(name: str, path: Path) -> Binding:
    _check_release(path)
    full_name = f"herring.torch.{name}"
    spec = importlib.util.spec_from_file_location(full_name, path)
    if spec is None or spec.loader is None:
        raise UnavailableError(f"{path} is not a Python extension")
    try:
        module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise UnavailableError(
            f"{path} does not load with torch {torch.__version__}: {error}. Was torch replaced by another build of the "
            "same release? Remove the file; the next import builds it again"
        ) from error
    sys.modules[full_name] = module
    return cast(Binding, module)


def _check_release(path: Path) -> None:
    """Raises UnavailableError where `path` was built for another torch. Reads it, never loads it."""
    running = torch.__version__.partition("+")[0]
    built_for = _build.stamped_release(path)
    if built_for != running:
        what = "is no torch binding of Herring" if built_for is None else f"was built for torch {built_for}"
        raise UnavailableError(
            f"{path} {what}, but this is torch {running}; remove the file, the next import builds the right one"
        )
