"""Builds the torch binding (bindings/torch) against the torch of the running interpreter.

c10d promises no ABI between torch releases, so a binding belongs to the torch whose headers built it. It is built when
Herring is installed where torch already is, else at the backend's first use, into a cache.

setup.py loads this file by path, where the package itself cannot be imported yet: it needs the standard library alone.
"""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

_PACKAGE = Path(__file__).resolve().parent.parent
if TYPE_CHECKING:
    from herring import _compiler

    BuildError = _compiler.BuildError
    compiler = _compiler.compiler
    run_compilers = _compiler.run
else:
    _compiler = runpy.run_path(str(_PACKAGE / "_compiler.py"))
    BuildError, compiler, run_compilers = _compiler["BuildError"], _compiler["compiler"], _compiler["run"]
_WHAT = "the torch binding"
_OLDEST_TORCH = (2, 9)
_STAMP = "herring-torch-binding"
_UNITS = ("module.cc", "process_group.cc")  # Compiled at the same time; each includes several files.


@dataclass(frozen=True)
class Sources:
    """Where the binding's sources, Herring's public headers and libherring.so are."""

    folder: Path
    headers: Path
    library_folder: Path

    @staticmethod
    def find(package: Path = _PACKAGE) -> Sources:
        """Of an installed package, else of the source checkout around it."""
        checkout = package.parent
        candidates = (
            (package / "_torch_src", package / "include"),
            (checkout / "bindings" / "torch", checkout / "csrc"),
        )
        for folder, headers in candidates:
            if _files_of(folder, headers) is not None:
                break
        else:
            looked = " or ".join(str(folder) for folder, _ in candidates)
            raise BuildError(f"the torch binding's sources are not there (looked in {looked}): install Herring again")
        library = package / "lib"
        if not (library / "libherring.so").is_file():
            raise BuildError(f"{library}/libherring.so is not there: install Herring again")
        return Sources(folder, headers, library)

    def files(self) -> list[Path]:
        """All that a build reads of Herring: the units and what they include, in an order that does not depend on where
        it lies. Raises BuildError where one of them is not there."""
        files = _files_of(self.folder, self.headers)
        if files is None:
            raise BuildError(f"the torch binding's sources in {self.folder} are not complete: install Herring again")
        return files

    def digest(self) -> str:
        """Changes with the sources (16 hex digits)."""
        content = hashlib.sha256()
        for file in self.files():
            content.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        return content.hexdigest()[:16]


def _files_of(folder: Path, headers: Path) -> list[Path] | None:
    """The units in `folder` and all that they include from there and from `headers`; None where one is not there."""
    waiting, found = [folder / unit for unit in _UNITS], dict[str, Path]()
    while waiting:
        file = waiting.pop()
        try:
            included = re.findall(r'^#include "(.+)"', file.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            return None
        found[file.name if file.parent == folder else str(file.relative_to(headers))] = file
        new = [name for name in included if name not in found]
        waiting += [folder / name if (folder / name).is_file() else headers / name for name in new]
    return [found[name] for name in sorted(found)]


def python_tag() -> str:
    """The interpreter's binary interface, "cp311"."""
    return f"cp{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"


def module_name(torch_version: str) -> str:
    """A binding for another torch or Python has another name and is never loaded: `_torch_2_13_0_cp311`."""
    release = torch_version.partition("+")[0]
    return f"_torch_{re.sub(r'[^0-9A-Za-z]', '_', release)}_{python_tag()}"


def stamp(torch_version: str, digest: str) -> str:
    """Stands in the binding's file, so that what a file was built from can be seen without loading it."""
    return f"{_STAMP}:{torch_version.partition('+')[0]}:{digest}:"


def stamped_release(file: Path) -> str | None:
    """The torch release that a binding was built for, read without loading it; None where the file is no binding.

    Raises OSError where it cannot be read.
    """
    found = re.search(rb"%s:([^:\x00]+):[0-9a-f]{16}:" % _STAMP.encode(), file.read_bytes())
    return found.group(1).decode() if found else None


def check_torch(torch_version: str, has_new_strings: bool) -> None:
    """Raises BuildError where c10d's interface is another than the binding's, or torch's std::string than Herring's."""
    oldest = ".".join(map(str, _OLDEST_TORCH))
    release = re.match(r"(\d+)\.(\d+)", torch_version)
    if release is not None and (int(release[1]), int(release[2])) < _OLDEST_TORCH:
        raise BuildError(f"torch {torch_version} is too old for Herring, which needs {oldest} or newer: upgrade torch")
    if not has_new_strings:
        raise BuildError(
            f"torch {torch_version} was built with _GLIBCXX_USE_CXX11_ABI=0 and does not link with libherring.so: "
            f"install a build with 1, which PyPI's from {oldest} on are"
        )


def check_build(torch_version: str, has_new_strings: bool) -> None:
    """As check_torch; also where there is no compiler."""
    check_torch(torch_version, has_new_strings)
    compiler(_WHAT)


def build_into(directory: Path, python: str | None = None) -> Path:
    """Compiles the binding for this interpreter's torch into `directory` and returns its path.

    `python` is there for callers that want to be sure in which interpreter they run. Raises BuildError.
    """
    if python is not None and Path(python).resolve() != Path(sys.executable).resolve():
        raise BuildError(f"asked to build for {python}, but this is {sys.executable}")
    import torch

    check_torch(torch.__version__, bool(torch._C._GLIBCXX_USE_CXX11_ABI))
    sources = Sources.find(_PACKAGE if (_PACKAGE / "lib").is_dir() else directory.resolve().parent)
    name = module_name(torch.__version__)
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"{name}.so"
    with tempfile.TemporaryDirectory(dir=directory, prefix=".build-") as scratch:
        output = Path(scratch) / target.name
        objects = [Path(scratch) / f"{unit}.o" for unit in _UNITS]
        run_compilers(compile_commands(sources, name, objects, torch.__version__), _WHAT)
        run_compilers([link_command(sources, objects, output, directory)], _WHAT)
        os.replace(output, target)  # A reader sees the old file or the whole new one.
    return target


def compile_commands(sources: Sources, name: str, objects: list[Path], torch_version: str) -> list[list[str]]:
    """One compiler run for each unit."""
    import torch
    from torch.utils import cpp_extension

    python_headers = sysconfig.get_paths()["include"]
    if not Path(python_headers, "Python.h").is_file():
        raise BuildError(f"{python_headers}/Python.h is not there: apt-get install python3-dev")
    common = [
        *compiler(_WHAT),
        *("-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-pthread"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-DHERRING_TORCH_MODULE={name}",
        f'-DHERRING_TORCH_STAMP="{stamp(torch_version, sources.digest())}"',
        *(f"-isystem{path}" for path in [*cpp_extension.include_paths(), python_headers]),
        *(f"-I{path}" for path in (sources.headers, sources.folder)),
    ]
    return [
        [*common, "-c", str(sources.folder / unit), "-o", str(file)] for unit, file in zip(_UNITS, objects, strict=True)
    ]


def link_command(sources: Sources, objects: list[Path], output: Path, directory: Path) -> list[str]:
    """What makes the module of them."""
    from torch.utils import cpp_extension

    library_paths = cpp_extension.library_paths()
    # Found where the package stays together, and (for a binding in a cache) where it is now.
    run_paths = [f"$ORIGIN/{os.path.relpath(sources.library_folder, directory.resolve())}", str(sources.library_folder)]
    libraries = ["herring", "torch", "torch_cpu", "c10", "torch_python"]
    return [
        *(*compiler(_WHAT), "-shared", "-pthread"),
        *(*map(str, objects), "-o", str(output)),
        *(f"-L{path}" for path in [*map(str, [sources.library_folder]), *library_paths]),
        *(f"-l{library}" for library in libraries),
        *(f"-Wl,-rpath,{path}" for path in run_paths),
    ]
