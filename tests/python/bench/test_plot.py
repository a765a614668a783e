"""Pictures: all that the files allow, and a clear word where matplotlib or data are missing."""

import json
import sys

import pytest
from rows import MB, run

from herring import _cli
from herring.bench._bounds import Links
from herring.bench._plot import _MEASURES, against_size, against_workers, kind_of

TIME = _MEASURES[0]


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


def test_lines_against_size_have_herring_first():
    lines = against_size(run(sizes=(MB, 25 * MB)), TIME, "in")
    assert [(line.who, line.memory) for line in lines] == [("herring", "arena"), ("gloo", "private")]
    assert lines[0].points == ((MB, pytest.approx(20.0)), (25 * MB, pytest.approx(500.0)))


def test_lines_against_workers_join_runs():
    contents = [run(800, ranks=8), run(200, ranks=2), run(400, ranks=4)]
    (ours, _) = against_workers(contents, TIME, 25 * MB, "in")
    assert ours.points == ((2, pytest.approx(200)), (4, pytest.approx(400)), (8, pytest.approx(800)))


def test_only_like_placements_share_a_picture():
    assert kind_of(run(ranks=4)) == kind_of(run(ranks=8))
    kinds = {kind_of(run(ranks=8, links=Links(8, k, 500e6))) for k in (0, 2, 4, 8)}
    assert len(kinds) == 4
    assert kind_of(run(links=Links(1, 0, None))) == "one host"


def test_pictures_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    files = [write(tmp_path, f"n{n}.json", run(100 * n, ranks=n, sizes=(MB, 25 * MB))) for n in (2, 8)]
    out = tmp_path / "out"
    assert _cli.main(["bench", "--plot", *files, "--out", str(out)]) == 0
    names = {path.name for path in out.iterdir()}
    assert {"n2-time.png", "n2-time.svg", "n8-busbw.png", "n8-bound.svg"} <= names
    workers = "workers-a-server-host-per-worker-host-500-mbit-s-links-25MB-"
    assert {f"{workers}{what}.{kind}" for what in ("time", "busbw", "bound") for kind in ("png", "svg")} <= names
    assert (out / "n2-time.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "n2-time.svg").read_text()
    assert len(capsys.readouterr().out.splitlines()) == len(names)


def test_one_size_and_one_run_is_nothing_to_draw(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    assert _cli.main(["bench", "--plot", write(tmp_path, "one.json", run()), "--out", str(tmp_path)]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _cli.main(["bench", "--plot", write(tmp_path, "one.json", run()), "--out", str(tmp_path)]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
