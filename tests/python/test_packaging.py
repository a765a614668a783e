"""What goes into a source distribution, and what the package says where it is not built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: nothing to compare with")
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def test_a_source_distribution_has_every_file_of_the_checkout_and_nothing_built(tmp_path: Path) -> None:
    """Without the sources `pip install herring-*.tar.gz` builds nothing."""
    checkout = tmp_path / "checkout"
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    built = checkout / "herring" / "lib" / "libherring.so"  # As after an editable install.
    built.parent.mkdir()
    built.write_bytes(b"not a source")
    command = [sys.executable, "-c", "from setuptools.build_meta import build_sdist; print(build_sdist('dist'))"]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=120)
    (archive,) = (checkout / "dist").glob("herring-*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
        info = packed.extractfile(archive.name.removesuffix(".tar.gz") + "/PKG-INFO").read().decode()
    assert tracked() - names <= {".gitignore"}
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
    assert "License-Expression: Apache-2.0" in info
    assert "Herring contributors" in info
    assert "# Herring" in info, "the README is the package's description"


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel()", "prepare_metadata_for_build_wheel(sys.argv[1])"])
def test_a_plain_install_writes_nothing_into_the_source_folder(tmp_path: Path, hook: str) -> None:
    """It may be read-only, or another user's. `make test-install` sees the whole of it."""
    checkout, target = tmp_path / "checkout", tmp_path / "metadata"
    target.mkdir()
    for name in tracked():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name)
    before = set(checkout.rglob("*"))
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook})"
    command = [sys.executable, "-c", code, str(target)]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True, timeout=120)
    assert set(checkout.rglob("*")) == before
    if "metadata" in hook:
        (info,) = target.glob("*.dist-info/METADATA")
        assert "Name: herring" in info.read_text()


def test_the_unbuilt_package_of_a_source_folder_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "herring", tmp_path / "herring", ignore=shutil.ignore_patterns("*.so", "__pycache__", "lib"))
    (tmp_path / "csrc").mkdir()
    (tmp_path / "CMakeLists.txt").touch()
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import herring"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"source folder {tmp_path}" in done.stderr
    assert "start Python in another folder" in done.stderr


def test_setup_builds_again_only_for_changed_sources() -> None:
    """What a build leaves in the folder is no source: a second setup would install again, beside tests that run."""
    listed = subprocess.run([ROOT / ".ci" / "setup", "--sources"], capture_output=True, text=True, check=True)
    names = set(listed.stdout.split())
    assert "csrc/core/types.h" in names
    assert names <= tracked()
