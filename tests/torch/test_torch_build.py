"""Finding and building the compiled binding."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from herring import UnavailableError
from herring.torch import _binding, _build

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_name_says_which_torch_and_python() -> None:
    tag = _build.python_tag()
    assert _build.module_name("2.13.0+cpu") == f"_torch_2_13_0_{tag}"
    assert _build.module_name("2.14.0.dev20260101") == f"_torch_2_14_0_dev20260101_{tag}"
    assert tag.startswith(f"cp{sys.version_info.major}{sys.version_info.minor}")


def test_any_change_of_a_source_asks_for_another_binding(tmp_path: Path) -> None:
    sources = _build.Sources.find()
    copy = tmp_path / "sources"
    shutil.copytree(sources.folder, copy)
    changed = _build.Sources(copy, sources.headers, sources.library_folder)
    assert changed.digest() == sources.digest()
    (copy / "backend.cc").write_text((copy / "backend.cc").read_text() + "\n")
    assert changed.digest() != sources.digest()
    assert _binding.cache_folder(changed.digest()) != _binding.cache_folder(sources.digest())


def test_what_a_wheel_carries_is_all_that_the_binding_includes(tmp_path: Path) -> None:
    """An installed Herring has no checkout around it to find the rest in."""
    setup = ROOT / "setup.py"
    copying = "import setuptools; setuptools.setup = lambda **_: None; import runpy, sys, pathlib; "
    copying += f"runpy.run_path({str(setup)!r})['CMakeBuild'].copy_sources(pathlib.Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", copying], check=True, cwd=ROOT)
    folders = [tmp_path / "_torch_src", tmp_path / "include"]
    waiting, seen = [folders[0] / unit for unit in _build._UNITS], set()
    while waiting:
        source = waiting.pop()
        for name in re.findall(r'^#include "(.+)"', source.read_text(), re.MULTILINE):
            found = [folder / name for folder in folders if (folder / name).is_file()]
            assert found, f"{source.name} includes {name}, which the wheel does not carry"
            if found[0] not in seen:
                seen.add(found[0])
                waiting.append(found[0])
    assert len(seen) > 10
    carried = _build.Sources(*folders, tmp_path / "lib")
    there = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert set(carried.files()) == there
    assert {path.name for path in (tmp_path / "_tensorflow_src").iterdir()} == {"gpu_stream.cc", "gpu_stream.h"}
    (tmp_path / "include" / "core" / "status.h").unlink()
    with pytest.raises(_build.BuildError, match="not complete"):
        carried.files()


def test_a_binding_for_another_torch_is_not_taken(tmp_path: Path) -> None:
    file = tmp_path / "binding.so"
    file.write_bytes(b"\x7fELF..." + _build.stamp("2.12.0", "0123456789abcdef").encode())
    assert _binding._has_stamp(file, _build.stamp("2.12.0+cpu", "0123456789abcdef").encode())
    assert not _binding._has_stamp(file, _build.stamp("2.13.0", "0123456789abcdef").encode())
    assert not _binding._has_stamp(file, _build.stamp("2.12.0", "fedcba9876543210").encode())
    assert not _binding._has_stamp(tmp_path / "absent.so", b"")


def test_a_binding_under_another_torchs_name_is_named_and_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a copied environment may have it: loading it could end the process without a word."""
    release = torch.__version__.partition("+")[0]
    name = _build.module_name(torch.__version__)
    _binding.load()  # Of this torch, which stands for one of another torch once its stamp says so.
    own = Path(str(sys.modules[f"herring.torch.{name}"].__file__)).read_bytes()
    assert _build.stamped_release(Path(str(sys.modules[f"herring.torch.{name}"].__file__))) == release
    other = "9" * len(release)
    wrong = tmp_path / f"{name}.so"
    wrong.write_bytes(own.replace(f"{_build._STAMP}:{release}:".encode(), f"{_build._STAMP}:{other}:".encode()))
    with pytest.raises(UnavailableError, match=rf"built for torch {other}, but this is torch {release}; remove"):
        _binding._import(name, wrong)
    (tmp_path / "junk.so").write_bytes(b"\x7fELF")
    with pytest.raises(UnavailableError, match="no torch binding of Herring"):
        _binding._import(name, tmp_path / "junk.so")
    monkeypatch.setattr(_binding, "_INSTALLED", tmp_path)
    _binding._say_why(name, tmp_path)
    assert f"is for torch {other}, whatever its name says" in caplog.text


def test_a_torch_build_that_does_not_fit_gets_an_error_that_says_so(tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF" + _build.stamp(torch.__version__, "0123456789abcdef").encode())
    with pytest.raises(UnavailableError, match=r"does not load with torch (.|\n)*another build of the same release"):
        _binding._import("_torch_broken", broken)


def test_a_torch_that_cannot_be_served_is_refused_before_the_compiler_runs() -> None:
    with pytest.raises(_build.BuildError, match=r"torch 2\.6\.0\+cu124 is too old"):
        _build.check_torch("2.6.0+cu124", has_new_strings=False)
    with pytest.raises(_build.BuildError, match="_GLIBCXX_USE_CXX11_ABI=0"):
        _build.check_torch("2.13.0", has_new_strings=False)
    for version in ("2.12.0+cpu", "2.13.0", "2.14.0.dev20260101", "3.0.0"):
        _build.check_torch(version, has_new_strings=True)


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(_build.BuildError, match=r"apt-get install g\+\+"):
        _build.build_into(tmp_path / "out")
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(_build.BuildError, match="no-such-compiler"):
        _build.build_into(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: out of luck' >&2\nexit 4\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(_build.BuildError, match=r"exit 4(.|\n)*out of luck"):
        _build.build_into(tmp_path / "out")


def test_the_unit_that_fails_is_quoted_and_no_compiler_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are compiled at the same time."""
    compiler = tmp_path / "compiler"
    other = tmp_path / "other"
    compiler.write_text(f"""#!/bin/sh
case "$*" in
  *{_build._UNITS[0]}*) while [ ! -s {other} ]; do sleep 0.05; done; echo 'error: in the first' >&2; exit 4;;
  *) sleep 100 & echo $! > {other}; wait;;
esac
""")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    start = time.monotonic()
    with pytest.raises(_build.BuildError, match=r"exit 4(.|\n)*in the first(.|\n)*" + _build._UNITS[0]):
        _build.build_into(tmp_path / "out")
    assert time.monotonic() - start < 60
    status = Path(f"/proc/{other.read_text().strip()}/status")
    deadline = time.monotonic() + 10
    while status.exists() and "(zombie)" not in status.read_text():
        assert time.monotonic() < deadline, "what the other one has started goes on"
        time.sleep(0.05)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(_binding, "_INSTALLED", tmp_path)
    with pytest.raises(UnavailableError, match="XDG_CACHE_HOME"):
        _binding._find_or_build(_build.Sources.find(), "_torch_none")


def test_the_binding_of_this_torch_loads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = _binding.load()
    assert binding.torch_version.partition("+")[0] == torch.__version__.partition("+")[0]
    monkeypatch.setattr(_build, "build_into", lambda *_: pytest.fail("built again"))
    assert _binding.load() is binding
