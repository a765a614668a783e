"""`pip install` from the checkout and from the source distribution, each in a bare virtual environment.

Both have to install the same files, write nothing into the source folder, and train: two ranks add two arrays, started
in another folder. Takes some minutes, for it compiles; once only where there is ccache, for the distribution is unpacked
at the checkout's place. Usage: python .ci/test_install.py
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Of this run alone: the first build compiles everything.
CCACHE = {"CCACHE_BASEDIR": tempfile.gettempdir(), "CCACHE_NOHASHDIR": "1", "CCACHE_SLOPPINESS": "pch_defines,time_macros"}
PROGRAM = """
import numpy, herring
herring.init()
total = herring.allreduce(numpy.full(1000, herring.rank() + 1.0, numpy.float32), op=herring.ReduceOp.SUM)
assert herring.size() == 2 and (total == 3).all(), (herring.size(), total)
print("herring", herring.__version__, "from", herring.__file__)
"""


def run(command: list[str | Path], folder: Path) -> str:
    """As in a shell of somebody who has only Python: nothing of this checkout is on a path."""
    foreign = ("PYTHON", "HERRING_", "VIRTUAL", "CCACHE_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | CCACHE
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"test-install: FAILED: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def copy_checkout(target: Path) -> None:
    """The files that git knows, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def state_of(folder: Path) -> dict[str, str]:
    """Every file with its content's hash; folders too."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def installed(source: Path, folder: Path) -> set[str]:
    """The files that `pip install` puts into a new environment, after two ranks have worked with them there."""
    folder.mkdir()
    run([sys.executable, "-m", "venv", "env"], folder)
    bin_folder = folder / "env" / "bin"
    run([bin_folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", source], folder)
    (folder / "program.py").write_text(PROGRAM)
    said = run([bin_folder / "herringrun", "-np", "2", bin_folder / "python", "program.py"], folder)
    if said.count("herring ") != 2 or str(folder) not in said:
        sys.exit(f"test-install: FAILED: two ranks said {said!r}")
    run([bin_folder / "herring", "config"], folder)
    listed = run([bin_folder / "python", "-m", "pip", "show", "--files", "herring"], folder).partition("Files:")[2]
    names = {line.strip() for line in listed.splitlines() if line.strip()}
    return {name for name in names if not re.search(r"__pycache__|direct_url\.json$", name)}


def main() -> None:
    """Both ways, and their difference."""
    # .ci/run ends it so where something else has failed: its folder goes all the same.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("test-install: stopped"))
    with tempfile.TemporaryDirectory(prefix="herring-install-") as name:
        folder = Path(name)
        CCACHE["CCACHE_DIR"] = str(folder / "ccache")
        checkout, dist = folder / "checkout", folder / "dist"
        copy_checkout(checkout)
        before = state_of(checkout)
        from_checkout = installed(checkout, folder / "from-checkout")
        print(f"test-install: from the checkout: {len(from_checkout)} files, two ranks have worked", flush=True)
        written = {path for path, content in state_of(checkout).items() if before.get(path) != content}
        if written or len(state_of(checkout)) != len(before):
            sys.exit(f"test-install: FAILED: `pip install` wrote into the source folder: {sorted(written)}")
        build = f"from setuptools.build_meta import build_sdist; build_sdist({str(dist)!r})"
        run([sys.executable, "-c", build], checkout)
        (archive,) = dist.glob("herring-*.tar.gz")
        checkout.rename(folder / "first-checkout")
        shutil.unpack_archive(archive, folder)
        (folder / archive.name.removesuffix(".tar.gz")).rename(checkout)
        from_archive = installed(checkout, folder / "from-archive")
        print(f"test-install: from {archive.name}: {len(from_archive)} files, two ranks have worked", flush=True)
        if from_checkout != from_archive:
            sys.exit(f"test-install: FAILED: these come with one only: {sorted(from_checkout ^ from_archive)}")
    print("test-install: OK")


if __name__ == "__main__":
    main()
