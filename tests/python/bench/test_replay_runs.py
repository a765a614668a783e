"""`herring bench replay`: the pace of a step under a clock of the test's own, then real jobs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from rows import run as allreduce_run
from surroundings import is_installed
from test_runs import BENCH, HERRINGRUN, call

import herring
from herring import _cli
from herring.bench import _replay, _replay_run, _report
from herring.bench._bounds import Links
from herring.bench._models import MODELS
from herring.bench._replay import HerringReducer, Replay, ReplayRow, measure_replay
from herring.bench._replay_plot import against_workers, groups
from herring.bench._replay_schedule import Bucket, backward_for, buckets, expected_step, gradients

needs_torch = pytest.mark.skipif(not is_installed("torch"), reason="needs torch")
LAN = Links(8, 8, 500e6)


class Line:
    """A virtual clock, and a reducer that reduces one array after the other at so many elements per second of it."""

    def __init__(self, elements_per_s: float) -> None:
        self.now = 100.0
        self.starts: list[float] = []
        self._rate = elements_per_s
        self._free = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def start(self, elements: int):
        self.starts.append(self.now)
        done = self._free = max(self._free, self.now) + elements / self._rate

        def wait() -> None:
            self.now = max(self.now, done)

        return wait


@pytest.mark.parametrize("communication_s", [0.01, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_starts_buckets_when_backward_has_made_them(monkeypatch, name, communication_s):
    filled = buckets(gradients(MODELS[name](), 0.3), 4, [1 << 20, 25 << 20])
    elements = [bucket.elements for bucket in filled]
    line = Line(sum(elements) / communication_s)
    monkeypatch.setattr(_replay, "time", line)
    assert _replay.backward_alone(filled, 0.7) == pytest.approx(0.7)
    assert _replay.communication_alone(line, elements) == pytest.approx(communication_s)
    begin, line.starts = line.now, []
    seconds = _replay.step(line, filled, elements, 0.7)
    assert seconds == pytest.approx(expected_step(filled, 0.7, communication_s))
    assert line.starts == pytest.approx([begin + bucket.ready * 0.7 for bucket in filled])
    backward_s = backward_for(filled, communication_s, 0.6)
    assert backward_s / _replay.step(line, filled, elements, backward_s) == pytest.approx(0.6)


def row(who: str, memory: str, backward: float, communication: float, step: float, *, model="resnet50", wrong=0):
    return ReplayRow(
        model=model,
        scale=0.5,
        gradient_elements=250_000_000,
        gradient_bytes=1_000_000_000,
        tensors=3,
        buckets=(Bucket(250_000_000, 3, 1.0),),
        name=who,
        memory=memory,
        nominal_backward_s=backward,
        step_times_s=(step, step * 9, step / 2),
        communication_times_s=(communication,) * 3,
        backward_times_s=(backward,) * 3,
        wrong=wrong,
        copied=0,
    )


def file_of(*rows: ReplayRow, workers: int = 8, links: Links = LAN):
    """A --json file's content."""
    job = {"ranks": workers, "ranks_per_host": 1, "servers": workers, "transport": "tcp"}
    found = [_replay_run.row_json(each, rows, links, workers) for each in rows]
    return {**_report.report([], links, job, {}), "format": _report.REPLAY_FORMAT, "rows": found}


def test_figures_of_a_row():
    # Half of the 20 s of communication is hidden by backward; the peer hides nothing of 30 s.
    ours, theirs = row("herring", "arena", 10, 20, 20), row("gloo", "private", 10, 30, 40)
    assert (ours.efficiency, ours.overlap, theirs.overlap) == (0.5, 0.5, 0.0)
    found = _replay_run.row_json(ours, [ours, theirs], LAN, 8)
    assert found["ratios"] == {"gloo": 2.0}
    assert found["times_bound"] == pytest.approx(20 / (1e9 * 8 / 500e6))
    assert (found["step_ms"], found["step_p95_ms"], found["backward_ms"]) == (20e3, 180e3, 10e3)
    assert _replay_run.row_json(ours, [ours], LAN, 1)["overlap"] is None, "one worker has nothing to hide"
    line = _replay_run.Table(8, LAN, ["gloo"]).line(ours, [ours, theirs])
    assert line.split()[-8:] == ["20000.00", "20000.00", "180000.00", "50.0%", "50.0%", "1.25", "0", "2.00"]


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(json.dumps(content))
    return str(path)


def test_comparing_two_replays(tmp_path, capsys):
    def content(step):
        return file_of(row("herring", "arena", 10, 20, step), row("gloo", "private", 10, 30, 40))

    old, new = written(tmp_path, "old.json", content(20)), written(tmp_path, "new.json", content(25))
    assert _cli.main(["bench", "--compare", old, old]) == 0
    assert _cli.main(["bench", "--compare", old, new]) == 1
    assert "resnet50 x 0.5 herring arena  x gloo              2 ->        1.6" in capsys.readouterr().out
    other = written(tmp_path, "other.json", allreduce_run())
    assert _cli.main(["bench", "--compare", old, other]) == 2
    assert "one is of allreduce" in capsys.readouterr().err


def test_points_of_the_pictures():
    two, eight = (
        file_of(row("gloo", "private", 10, 30, 40), row("herring", "arena", 10, 20, step), workers=n)
        for n, step in ((2, 12.5), (8, 20))
    )
    (group,) = groups(eight)
    assert group.name == "resnet50 x 0.5"
    assert [(bar.who, bar.points[0][1]) for bar in group.bars] == [("herring", 0.5), ("gloo", 0.25)]
    ours, _ = against_workers([eight, two], "resnet50 x 0.5")
    assert ours.points == ((2, 80.0), (8, 50.0))


def test_pictures_are_written(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    files = []
    for n in (2, 8):
        rows = [
            row(*who, 10, 20, 20 + n, model=model)
            for model in ("resnet50", "t5-3b")
            for who in (("herring", "arena"), ("herring", "private"), ("gloo", "private"))
        ]
        files.append(written(tmp_path, f"n{n}.json", file_of(*rows, workers=n, links=Links(n, n, 500e6))))
    out = tmp_path / "out"
    assert _cli.main(["bench", "--plot", *files, "--out", str(out)]) == 0
    workers = "workers-a-server-host-per-worker-host-500-mbit-s-links-"
    names = ["n2-efficiency", "n8-efficiency"]
    names += [f"{workers}{model}-x-0-5-efficiency" for model in ("resnet50", "t5-3b")]
    assert {path.name for path in out.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert "<svg" in (out / "n2-efficiency.svg").read_text()


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ([], "--model resnet50,bert-large,maskrcnn,t5-3b"),
        (["--model", "vgg", "--backward-ms", "5"], "'vgg' is not one of resnet50"),
        (["--model", "resnet50,resnet50", "--backward-ms", "5"], "twice"),
        (["--model", "resnet50"], "--backward-ms T and --backward-for"),
        (["--model", "resnet50", "--backward-ms", "5", "--backward-for", "herring=50%"], "give one of"),
        (["--model", "resnet50", "--backward-ms", "nan"], "--backward-ms nan"),
        (["--model", "resnet50", "--backward-for", "gloo=50%"], "gloo is not measured; add it to --peers"),
        (["--model", "resnet50", "--backward-for", "herring=100%"], "below 100 %"),
        (["--model", "resnet50", "--backward-ms", "5", "--scale", "2"], "--scale 2"),
        (["--model", "resnet50", "--backward-ms", "5", "--peers", "mpi"], "--peers mpi"),
        (["--model", "resnet50", "--backward-ms", "5", "--sizes", "1MB"], "--sizes is for allreduce"),
        (["--model", "resnet50", "--backward-ms", "5", "--profile"], "--profile is for allreduce"),
        (["--model", "resnet50", "--backward-ms", "5", "--dtype", "int8"], "--dtype int8"),
        (["--model", "resnet50", "--backward-ms", "5", "--op", "max"], "--op"),
        (["--model", "resnet50", "--backward-ms", "5", "--json", "/nonexistent/out.json"], "--json"),
    ],
)
def test_a_bad_option_is_named_before_anything_starts(bare_environment, capsys, options, names):
    assert _cli.main(["bench", "replay", *options]) == 2
    assert names in capsys.readouterr().err
    assert not herring.is_initialized()


def test_an_allreduce_refuses_what_only_a_replay_heeds(bare_environment, capsys):
    assert _cli.main(["bench", "allreduce", "--scale", "0.1"]) == 2
    assert "--scale is for herring bench replay" in capsys.readouterr().err


def test_too_much_for_the_memory_is_refused():
    _replay_run.check_memory(1 << 30, 2, 4, 16 << 30)
    with pytest.raises(herring.InvalidArgumentError, match=r"4 ranks need 8\.0 GB here, and 8\.0 GB are free"):
        _replay_run.check_memory(1 << 30, 2, 4, 8 << 30)


def replay(tmp_path, launcher, *options):
    path = tmp_path / "out.json"
    code, output, errors = call([*launcher, *BENCH, "replay", *options, "--iters", "2", "--json", str(path)])
    assert code == 0, errors
    content = json.loads(path.read_text())
    assert [each["wrong"] for each in content["rows"]] == [0] * len(content["rows"])
    return content, output


def test_all_models_over_servers(tmp_path):
    options = ["--model", ",".join(MODELS), "--scale", "0.01", "--bucket", "64KB,128KB,256KB", "--backward-ms", "40"]
    content, output = replay(tmp_path, [*HERRINGRUN, "--servers", "1"], *options)
    assert [(each["model"], each["memory"]) for each in content["rows"]] == [
        (name, memory) for name in MODELS for memory in ("arena", "private")
    ]
    for each in content["rows"]:
        found = gradients(MODELS[each["model"]](), 0.01)
        assert each["gradient_elements"] == sum(gradient.elements for gradient in found)
        assert each["tensors"] == len(found)
        assert len(each["buckets"]) > 2
        assert each["copied_operations"] == 0 or each["memory"] == "private"
        assert len(each["step_times_ms"]) == 2
        assert min(each["step_times_ms"]) >= 40, "a step cannot end before its backward pass"
    assert "scaled down, every gradient is 0.01 of that" in output
    assert sum(line.startswith("bert-large x 0.01 ") for line in output.splitlines()) == 2, "only one rank prints"


@needs_torch
def test_backward_as_long_as_gloo_needs(tmp_path):
    options = ["--model", "resnet50", "--scale", "0.05", "--peers", "gloo", "--backward-for", "gloo=50%"]
    content, output = replay(tmp_path, HERRINGRUN, *options)
    assert [(each["who"], each["memory"]) for each in content["rows"]] == [
        ("herring", "arena"),
        ("herring", "private"),
        ("gloo", "private"),
    ]
    assert "# 1280KB buckets, the first of 51KB" in output, "a model made smaller overlaps as the whole one does"
    assert len({each["nominal_backward_ms"] for each in content["rows"]}) == 1, "one backward time for all of them"
    assert content["rows"][0]["ratios"].keys() == {"gloo"}


def test_one_worker_has_no_efficiency_to_aim_for():
    launcher = [*HERRINGRUN[:-1], "1"]
    code, _, errors = call([*launcher, *BENCH, "replay", "--model", "resnet50", "--backward-for", "herring=50%"])
    assert code != 0
    assert "with one, give --backward-ms" in errors


class Liar(HerringReducer):
    """Answers fast: "idle" reduces nothing; "mixed" gives the sums of one bucket for those of another; "early" says
    that it is done when it has begun."""

    name = "liar"

    def __init__(self, kind: str) -> None:
        super().__init__("private")
        self._kind = kind
        self._begun: list = []

    def start(self, array):
        if self._kind == "idle":
            return lambda: None
        if self._kind == "early":
            # Reduced, but by then the step has been checked.
            self._begun.append(array.copy())
            return super().start(self._begun[-1])
        wait = super().start(array)
        self._begun.append(array)

        def swapped() -> None:
            wait()
            if array is self._begun[-1]:  # the last one that is waited for: nothing is in flight any more
                first, second = self._begun
                first[:], second[:] = second.copy(), first.copy()
                self._begun.clear()

        return swapped


def measure_liar(kind):
    herring.init()
    filled = [Bucket(70_000, 1, 0.3), Bucket(70_000, 2, 1.0)]
    measured = measure_replay(
        Replay(filled, "float32", {"private"}), [HerringReducer("private"), Liar(kind)], 0.01, 1, 1
    )
    herring.shutdown()
    return measured.wrong


@pytest.mark.parametrize("kind", ["idle", "early", "mixed"])
def test_a_reducer_that_lies_is_found_out_on_every_rank(job, kind):
    results = job.run(measure_liar, 2, {"kind": kind})
    assert results[0] == results[1]
    honest, liar = results[0]
    assert honest == 0
    assert liar > 0


def test_wrong_sums_are_an_exit_code_and_a_name(monkeypatch, capsys):
    monkeypatch.setattr(_replay_run._run, "herring", SimpleNamespace(rank=lambda: 0))
    assert _replay_run._verdict([row("herring", "arena", 1, 2, 2)]) == 0
    assert _replay_run._verdict([row("gloo", "private", 1, 2, 2, wrong=3)]) == 1
    assert "gloo (private memory) gave 3 wrong elements in the gradients of resnet50 x 0.5" in capsys.readouterr().err
