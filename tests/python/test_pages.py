"""What the pages show runs as it stands: README, docs/numpy.md, the elastic tutorial, docs/c-api.md."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import herring

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(herring.__file__).resolve().parent
HERRINGRUN = [sys.executable, "-m", "herring._launch", "-np", "2"]


def blocks(page: str, language: str) -> list[str]:
    """A page's pieces of code in this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def run_script(folder: Path, code: str, env: dict[str, str], *options: str) -> str:
    """Two ranks of a script that lies elsewhere than the checkout; what they printed."""
    (folder / "page.py").write_text(code)
    command = [*HERRINGRUN, *options, sys.executable, "page.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{code}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def env(clean_env: dict[str, str]) -> dict[str, str]:
    """With the package that is tested, wherever the script lies."""
    paths = [str(PACKAGE.parent), clean_env.get("PYTHONPATH", "")]
    return {**clean_env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def test_the_readme_averages_arrays(tmp_path: Path, env: dict[str, str]) -> None:
    (code,) = [each for each in blocks("README.md", "python") if "import torch" not in each]
    assert run_script(tmp_path, code, env).splitlines() == ["[0.5 0.5 0.5 0.5]"] * 2


def test_the_page_on_arrays(tmp_path: Path, env: dict[str, str]) -> None:
    first, *others = blocks("docs/numpy.md", "python")
    begin, mark, end = first.partition("herring.shutdown()")
    assert mark
    assert not end.strip()
    assert len(others) == 2, "a piece of code that this test does not know"
    told = "print(mean[0], sums[1][0], array.tolist(), gradients['w'][0, 0])\n"
    lines = run_script(tmp_path, "\n".join([begin, *others, told, mark]), env).splitlines()
    assert lines == ["1.0 4.0 [0.0, 0.0, 0.0, 0.0] 1.0"] * 2


def test_the_elastic_tutorials_script(tmp_path: Path, env: dict[str, str]) -> None:
    (code,) = blocks("docs/tutorials/elastic.md", "python")
    lines = run_script(tmp_path, code, env, "--elastic").splitlines()
    assert sorted(lines) == [f"rank {rank} of 2: step 100, weight -4.950" for rank in range(2)]


def test_the_program_in_c(tmp_path: Path, env: dict[str, str]) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    (code,) = blocks("docs/c-api.md", "c")
    (tmp_path / "program.c").write_text(code)
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'bindings' / 'c'}"]
    library = PACKAGE / "lib" / "libherring.so"
    command = [compiler, *flags, "program.c", "-o", "program", library, f"-Wl,-rpath,{library.parent}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        hub = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [*HERRINGRUN, "-x", f"HERRING_HUB={hub}", str(tmp_path / "program")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 0.5", "rank 1 of 2: 0.5"]
