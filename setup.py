"""Runs CMake and puts what it builds into the package; everything else is in pyproject.toml."""

from __future__ import annotations

import atexit
import functools
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parent
# What works in the source folder on purpose: an editable install, a source distribution, commands given by hand.
IN_SOURCE_FOLDER = {"editable_wheel", "sdist", "develop", "build_ext", "build"}

# Runs in the target environment's interpreter with -I, which pip's build isolation does not reach: argv is the folder
# that holds the package `herring` and the folder that takes the binding. Loaded by path: importing herring.torch would
# itself look for a binding.
BUILD_TORCH_BINDING = """
import importlib.util, sys
from pathlib import Path
package_parent, target = sys.argv[1:]
sys.path.insert(0, package_parent)
source = Path(package_parent, "herring", "torch", "_build.py")
spec = importlib.util.spec_from_file_location("herring_torch_build", source)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
print(module.build_into(Path(target), sys.executable))
"""


@functools.cache
def scratch() -> str | None:
    """A folder that goes with this process, for what a plain `pip install` would leave in the source folder, which may
    not be writable, or another user's. None for commands that work there."""
    if IN_SOURCE_FOLDER & set(sys.argv):
        return None
    folder = tempfile.mkdtemp(prefix="herring-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Build(build):
    """As setuptools', outside of the source folder for a plain install."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_base = scratch() or self.build_base


class EggInfo(egg_info):
    """Likewise."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.egg_base = scratch() or self.egg_base


class CMakeBuild(build_ext):
    """Builds libherring.so, TensorFlow's operations and herring._core with CMake, and the torch binding where torch is
    installed."""

    def run(self) -> None:
        is_in_place = self.inplace or getattr(self, "editable_mode", False)
        package = ROOT / "herring" if is_in_place else Path(self.build_lib).resolve() / "herring"
        built = self.build_native()
        (package / "lib").mkdir(parents=True, exist_ok=True)
        for library in [*built.glob("lib/*.so"), *built.glob("_core.*.so")]:
            target = package / library.relative_to(built)
            target.unlink(missing_ok=True)  # A process that has the old one loaded keeps it.
            shutil.copy2(library, target)
        (package / "include").mkdir(exist_ok=True)
        shutil.copy2(ROOT / "bindings" / "c" / "herring.h", package / "include")
        if not is_in_place:
            self.copy_sources(package)
        self.build_torch_binding(package)

    def build_native(self) -> Path:
        """Runs CMake; returns the folder with lib/*.so and _core.*.so."""
        # An editable install gets a temporary build_temp; a lasting one makes the next install quick.
        kept = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        build = (kept if getattr(self, "editable_mode", False) else Path(self.build_temp).resolve()) / "cmake"
        build.mkdir(parents=True, exist_ok=True)
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DHERRING_PYTHON=ON"]
        configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={self.pybind11_folder()}"]
        # These lie in pip's build environment, another one each time: what an earlier run remembers is gone.
        configure += [f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja') or 'ninja'}"]
        configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
        try:
            subprocess.run(configure, check=True)
            targets = ["herring_shared", "herring_tensorflow", "herring_python"]
            subprocess.run(["ninja", "-C", str(build), *targets], check=True)
        except FileNotFoundError as missing:
            raise SystemExit(f"{missing.filename} was not found: pip install {missing.filename}") from None
        except subprocess.CalledProcessError as failed:
            raise SystemExit(f"building Herring's native parts failed (exit {failed.returncode}); see above") from None
        return build / "bindings" / "package"

    @staticmethod
    def pybind11_folder() -> str:
        import pybind11

        return pybind11.get_cmake_dir()

    @staticmethod
    def copy_sources(package: Path) -> None:
        """Headers and sources of what is built later, against the user's torch and TensorFlow."""
        builder = runpy.run_path(str(ROOT / "herring" / "torch" / "_build.py"))
        units, headers = ROOT / "bindings" / "torch", ROOT / "csrc"
        for file in builder["Sources"](units, headers, package / "lib").files():
            is_header = file.is_relative_to(headers)
            target = (
                package / ("include" if is_header else "_torch_src") / file.relative_to(headers if is_header else units)
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)
        (package / "_tensorflow_src").mkdir(exist_ok=True)
        for file in (ROOT / "bindings" / "tensorflow").glob("gpu_stream.*"):
            shutil.copy2(file, package / "_tensorflow_src")

    def build_torch_binding(self, package: Path) -> None:
        """Best effort: the backend's first use builds it as well."""
        if not (package / "torch" / "_build.py").exists():
            return
        python = [sys.executable, "-IB", "-c"]
        probe = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        if subprocess.run([*python, probe], check=False).returncode != 0:
            return
        command = [*python, BUILD_TORCH_BINDING, str(package.parent), str(package / "torch")]
        outcome = subprocess.run(command, check=False)
        if outcome.returncode != 0:
            self.warn("the torch binding could not be built now (see above); the backend's first use tries again")

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The extension only tells setuptools that the wheel is not pure; CMake knows its sources.
setup(
    ext_modules=[Extension("herring._core", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild, "egg_info": EggInfo},
)
