"""What is printed and written is what was measured."""

import json
import os

import pytest
from rows import CASE, MB, row, run

from herring import InvalidArgumentError
from herring.bench import _report
from herring.bench._bounds import Links
from herring.bench._contender import Case
from herring.bench._measure import Schedule
from herring.bench._profile import Costs
from herring.bench._table import Table, links_text, ratios

ROWS = [row("herring", "arena", 500, 400, 600, costs=Costs(0.3, 60, 9)), row("gloo", "private", 1000, 1000, 1000)]


def cells(line):
    return line.split()


def test_columns_of_a_line():
    table = Table(Links(8, 8, 500e6), 8, ["gloo"])
    names, rule = table.header().splitlines()
    ours, peer = table.lines(ROWS)
    assert set(rule) == {"-"}
    assert len(rule) == len(names)
    assert cells(ours)[:7] == ["25MB", "6553600", "float32", "sum", "in", "herring", "arena"]
    smallest, median, p95, algbw, busbw, processor, bound, wrong, ratio = cells(ours)[7:]
    assert (float(smallest), float(median), float(p95)) == (400e3, 500e3, 600e3)
    assert float(algbw) == pytest.approx(25 * MB / 0.5 / 1e9, rel=1e-2)
    assert float(busbw) == pytest.approx(25 * MB / 0.5 / 1e9 * 14 / 8, rel=1e-2)
    assert float(processor) == pytest.approx(0.1 / (25 * MB / 1e9), rel=1e-2), "three iterations took 0.3 s"
    assert float(bound) == pytest.approx(500 / 419.43, abs=0.005)
    assert (wrong, ratio) == ("0", "2.00")
    assert cells(peer)[-1] == "0", "a peer's row has no ratio to itself"


def test_without_a_rate_there_is_no_bound():
    (line,) = Table(Links(8, 8, None), 8, []).lines(ROWS[:1])
    assert cells(line)[-2:] == ["-", "0"]


def test_small_figures_keep_their_digits():
    case = Case(8, "float32", "sum", True)
    (line,) = Table(Links(1, 0, None), 4, []).lines([row("herring", "arena", 0.0123, case=case)])
    assert cells(line)[8] == "12.3"
    assert float(cells(line)[10]) == pytest.approx(8 / 12.3e-6 / 1e9, rel=0.01)


def test_ratios_are_of_medians_in_the_same_case():
    other = row("gloo", "private", 1, case=Case(8, "float32", "sum", True))
    assert ratios(ROWS[0], [*ROWS, other]) == {"gloo": 2.0}
    assert ratios(ROWS[1], ROWS) == {}


def test_percentiles_of_a_row():
    many = row("herring", "arena", *range(1, 101))
    assert (many.minimum_s, many.p95_s) == pytest.approx((0.001, 0.095))
    assert many.median_s == pytest.approx(0.0505)
    assert row("herring", "arena", 3, 1, 2).p95_s == pytest.approx(0.003), "of few iterations, the slowest"


def test_turns_cover_all_iterations():
    assert list(Schedule(7, 2).turns(25 * MB)) == [1] * 7
    assert list(Schedule(7, 2).turns(8)) == [5, 2]
    assert list(Schedule(500, 2).turns(8)) == [50] * 10
    assert list(Schedule(7, 2, turn=3).turns(8)) == [3, 3, 1]


def test_turns_are_led_in_for_50_ms():
    assert [Schedule(7, 2).lead_in_of(8, seconds) for seconds in (0, 1e-6, 100e-6, 10e-3, 1)] == [
        5000,
        5000,
        500,
        20,
        20,
    ]
    assert [Schedule(7, 2).lead_in_of(MB, seconds) for seconds in (100e-6, 10e-3, 51e-3)] == [500, 5, 0]
    assert [Schedule(7, 2, lead_in=0).lead_in_of(size, 1e-3) for size in (8, MB)] == [0, 0]
    assert [Schedule(7, 2, lead_in=3).lead_in_of(size, 1e-3) for size in (8, MB)] == [3, 3]


def test_the_links_in_words():
    assert links_text(Links(8, 8, 500e6)) == "8 worker hosts + 8 server hosts, links of 500 Mbit/s"
    assert links_text(Links(1, 0, None)) == "1 worker host"


def test_a_count_fits_the_size():
    assert (Case(10, "float64", "sum", True).count, Case(10, "float64", "sum", True).nbytes) == (1, 8)
    assert CASE.count == 25 * MB // 4


def test_the_file_says_where_and_how(tmp_path):
    path = tmp_path / "out.json"
    _report.write(str(path), run())
    content = _report.read(str(path))
    assert os.listdir(tmp_path) == ["out.json"], "nothing beside it is left"
    assert content["machine"]["cores"] >= 1
    assert content["versions"]["herring"]
    assert content["links"] == {"worker_hosts": 8, "server_hosts": 8, "rate": 500e6, "burst_bytes": 0}
    ours, gloo = content["rows"]
    assert ours["median_us"] == pytest.approx(500e3)
    assert ours["times_us"] == pytest.approx([500e3])
    assert ours["times_bound"] == pytest.approx(1.192, abs=0.001)
    assert ours["ratios"] == {"gloo": pytest.approx(2.0)}
    assert (gloo["who"], gloo["ratios"]) == ("gloo", {})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda content: content.update(format="else"), "not a file of herring bench"),
        (lambda content: content.update(version=99), "version 99"),
        (lambda content: content.pop("links"), "links is missing"),
        (lambda content: content["rows"][1].pop("median_us"), "row 1 has no median_us"),
        (lambda content: content.update(rows=None), "rows are missing"),
    ],
)
def test_a_file_that_is_something_else_is_refused_by_name(tmp_path, change, names):
    content = run()
    change(content)
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgumentError, match=names):
        _report.read(str(path))


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path):
    (tmp_path / "text").write_text("{")
    for path, names in (("text", "not JSON"), ("absent", "No such file")):
        with pytest.raises(InvalidArgumentError, match=names):
            _report.read(str(tmp_path / path))
    with pytest.raises(InvalidArgumentError, match="folder"):
        _report.check_writable(str(tmp_path / "nowhere" / "out.json"))
    with pytest.raises(InvalidArgumentError, match="folder"):
        _report.check_writable(str(tmp_path))
