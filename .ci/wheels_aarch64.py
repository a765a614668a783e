"""The wheel for aarch64, cross-compiled on x86-64 (`make wheels WHEELS=--aarch64`), and tried under qemu-user.

What is not native code is taken from the wheel for this machine. The torch binding is compiled with the headers of the
same release's torch that is here, and linked with the libraries of its wheel for aarch64.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from wheels import KEPT, ROOT, binding_code, binding_python, compiler, run, say

TRIPLE = "aarch64-linux-gnu"
# What the binding is linked with.
TORCH_LIBRARIES = ("libtorch.so", "libtorch_cpu.so", "libc10.so", "libtorch_python.so")
# A Python for aarch64, and what numpy and Herring load. Names as in Debian 12.
PACKAGES = (
    "python{0}-minimal libpython{0}-minimal libpython{0}-stdlib libc6 libstdc++6 libgcc-s1 zlib1g libexpat1 libssl3 "
    "libffi8 libbz2-1.0 liblzma5 libcrypt1 libuuid1 libatomic1"
)


def check_tools() -> None:
    """Says what has to be installed."""
    if platform.machine() == "aarch64":
        sys.exit("wheels: FAILED: --aarch64 cross-compiles; this machine is one: leave the option out")
    needed = {f"{TRIPLE}-g++": f"g++-{TRIPLE}", "qemu-aarch64": "qemu-user"}
    missing = [package for command, package in needed.items() if shutil.which(command) is None]
    if missing:
        sys.exit(f"wheels: FAILED: --aarch64 needs these packages: apt-get install {' '.join(missing)}")


def pip_download(folder: Path, package: str) -> Path:
    """The package's wheel for aarch64 and this Python."""
    tags = [f"--platform=manylinux_2_{minor}_aarch64" for minor in (17, 27, 28)] + ["--platform=manylinux2014_aarch64"]
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder, *tags]
    run([sys.executable, "-m", "pip", "download", *options, package])
    (wheel,) = folder.glob(f"{package.partition('=')[0]}-*.whl")
    return wheel


def torch_libraries(release: str) -> Path:
    """The folder with the libraries of torch's wheel for aarch64, kept."""
    kept = KEPT / f"aarch64-torch-{release}-cp{sys.version_info.major}{sys.version_info.minor}"
    if not (kept / ".ready").exists():
        say(f"fetching torch {release} for aarch64")
        kept.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept) as name:
            content = zipfile.ZipFile(pip_download(Path(name), f"torch=={release}"))
            for library in TORCH_LIBRARIES:
                (kept / library).write_bytes(content.read(f"torch/lib/{library}"))
        (kept / ".ready").touch()
    return kept


def build_native(package: Path) -> None:
    """libherring.so, TensorFlow's operations and herring._core, into the package."""
    import pybind11

    build = KEPT / f"aarch64-{sys.implementation.cache_tag}"
    include = build / "include"
    include.mkdir(parents=True, exist_ok=True)
    rdma = next((each for each in ("/usr/include/rdma", "/opt/amazon/efa/include/rdma") if Path(each).is_dir()), None)
    if rdma is None:
        sys.exit("wheels: FAILED: no rdma/fabric.h: apt-get install libfabric-dev")
    # libfabric's headers are the same everywhere; the rest of /usr/include is not.
    (include / "rdma").unlink(missing_ok=True)
    (include / "rdma").symlink_to(rdma)
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DHERRING_PYTHON=ON"]
    toolchain = ROOT / ".ci" / "aarch64.cmake"
    configure += [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
    configure += [f"-DCMAKE_CXX_FLAGS=-isystem {include} {older_flags()}", f"-DHERRING_LIBFABRIC_INCLUDE={include}"]
    tag = f"{sys.implementation.cache_tag}-{TRIPLE}"
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DPYTHON_MODULE_EXTENSION=.{tag}.so"]
    # The interpreter is this machine's: CMake must not start it under qemu. Its headers serve both processors.
    configure += ["-DCMAKE_CROSSCOMPILING_EMULATOR=", f"-DPython_INCLUDE_DIR={sysconfig.get_paths()['include']}"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run(configure, PATH=path)
    run(["ninja", "-C", build, "herring_shared", "herring_tensorflow", "herring_python"], PATH=path)
    built = build / "bindings" / "package"
    for library in [*built.glob("lib/*.so"), *built.glob("_core.*.so")]:
        shutil.copy2(library, package / library.relative_to(built))


def older_flags() -> str:
    """The compiler's arguments without its name."""
    return shlex.join(shlex.split(compiler("g++"))[1:])


def build(unpacked: Path, folder: Path, releases: list[str]) -> Path:
    """The unpacked wheel for aarch64, made of the one for this machine."""
    target = folder / "aarch64" / unpacked.name
    shutil.copytree(unpacked, target, ignore=shutil.ignore_patterns("*.so"))
    say("cross-compiling for aarch64")
    build_native(target / "herring")
    for release in releases:
        chosen = f"{compiler(TRIPLE + '-g++')} -L{torch_libraries(release)}"
        python = binding_python(release)
        say(f"building the binding for torch {release} on aarch64")
        run([python, "-IB", "-c", binding_code(), target, target / "herring" / "torch"], CXX=chosen)
    (tags,) = target.glob("*.dist-info/WHEEL")
    tags.write_text(tags.read_text().replace(platform.machine(), "aarch64"))
    return target


def debian_root() -> Path | None:
    """A folder with Debian's Python for aarch64, kept; None where this Debian has not this Python."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    root = KEPT / f"aarch64-root-{version}"
    if (root / ".ready").exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    for name in ("state/lists/partial", "cache/archives/partial", "debs"):
        (root / "apt" / name).mkdir(parents=True)
    (root / "apt" / "state" / "status").touch()
    places = {"Dir::State": "state", "Dir::State::status": "state/status", "Dir::Cache": "cache"}
    options = [f"-o{name}={root / 'apt' / place}" for name, place in places.items()]
    options += ["-oAPT::Architecture=arm64", "-oAPT::Architectures=arm64", "-oAPT::Sandbox::User="]
    packages = PACKAGES.format(version).split()
    debs = root / "apt" / "debs"
    for words in (["update", "-qq"], ["download", "-qq", *packages]):
        if subprocess.run(["apt-get", *options, *words], cwd=debs, capture_output=True, check=False).returncode != 0:
            return None
    for deb in debs.glob("*.deb"):
        run(["dpkg-deb", "-x", deb, root])
    shutil.rmtree(root / "apt")
    (root / ".ready").touch()
    return root


def attempt(wheel: Path, program: str) -> None:
    """Two ranks run the program under qemu-user."""
    root = debian_root() if shutil.which("apt-get") else None
    if root is None:
        say(f"not tried on aarch64: Debian's packages here have no Python {platform.python_version()}")
        return
    site = KEPT / f"aarch64-site-{sys.implementation.cache_tag}"
    with tempfile.TemporaryDirectory(prefix="herring-wheel-") as name:
        folder = Path(name)
        if not (site / ".ready").exists():
            site.mkdir(parents=True, exist_ok=True)
            run([sys.executable, "-m", "zipfile", "-e", pip_download(folder, "numpy"), site])
            (site / ".ready").touch()
        run([sys.executable, "-m", "zipfile", "-e", wheel, folder / "installed"])
        (folder / "program.py").write_text(program)
        # Nothing of this machine: no compiler, as elsewhere.
        env = {"PATH": name, "PYTHONPATH": f"{folder / 'installed'}:{site}", "PYTHONHOME": "/usr", "WORLD_SIZE": "2"}
        with socket.create_server(("127.0.0.1", 0)) as probe:
            hub = f"127.0.0.1:{probe.getsockname()[1]}"
        env |= {"LOCAL_WORLD_SIZE": "2", "HERRING_HUB": hub, "HERRING_SECRET": os.urandom(16).hex()}
        python = f"{root}/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        command = [shutil.which("qemu-aarch64") or "", "-L", str(root), python, "program.py"]
        ranks = [
            subprocess.Popen(
                command,
                cwd=folder,
                env={**env, "RANK": rank, "LOCAL_RANK": rank},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            for rank in "01"
        ]
        try:
            said = [each.communicate(timeout=300)[0] for each in ranks]
        finally:
            for each in ranks:
                each.kill()  # Nothing, where it has ended.
        if any(each.returncode != 0 for each in ranks):
            sys.exit(f"wheels: FAILED: on aarch64 two ranks said {said}")
    say("numpy: two ranks have worked on aarch64 (qemu-user)")
