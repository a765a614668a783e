"""What is built where it is used: which compiler, and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from herring import _build_cache
from herring._compiler import BuildError, compiler, run
from herring._errors import UnavailableError


@pytest.mark.parametrize(
    ("chosen", "words"),
    [("g++ '", "which is no command"), ("no-such-compiler -O2", "which is not there")],
)
def test_cxx_that_cannot_be(monkeypatch: pytest.MonkeyPatch, chosen: str, words: str) -> None:
    monkeypatch.setenv("CXX", chosen)
    with pytest.raises(BuildError, match=words):
        compiler("it")


def test_blank_cxx_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    usual = compiler("it")
    monkeypatch.setenv("CXX", "  ")
    assert compiler("it") == usual


def test_a_compiler_that_is_no_program(tmp_path: Path) -> None:
    program = tmp_path / "compiler"
    program.write_text("not a program")
    program.chmod(0o755)
    with pytest.raises(BuildError, match="does not start"):
        run([[str(program)]], "it")


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user that the system does not know."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(_build_cache.Path, "home", home)
    with pytest.raises(UnavailableError, match="set XDG_CACHE_HOME"):
        _build_cache.folder("it")
