"""A change that makes Herring slower against its peers does not pass unseen; a slower machine is not one."""

import json

import pytest
from rows import run

from herring import _cli
from herring.bench._bounds import Links

NO_RATE = Links(8, 8, None)


@pytest.fixture
def compare(tmp_path, capsys):
    def call(old, new, *options):
        paths = []
        for name, content in (("old", old), ("new", new)):
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps(content))
            paths.append(str(path))
        code = _cli.main(["bench", "--compare", *paths, *options])
        return code, capsys.readouterr()

    return call


def test_equal_runs_pass(compare):
    code, printed = compare(run(), run())
    assert code == 0
    assert "0 of 2 figures got worse" in printed.out


def test_a_ratio_that_got_worse_fails_and_is_marked(compare):
    code, printed = compare(run(500, 1000), run(600, 1000))
    assert code == 1
    (line,) = [line for line in printed.out.splitlines() if "x gloo" in line]
    assert line.endswith("20.0 % worse  WORSE")


def test_a_bound_that_got_further_away_fails(compare):
    code, printed = compare(run(500, 1000), run(600, 1200))
    assert code == 1, "the ratio is the same, t/t* is not"
    assert "1 of 2 figures" in printed.out


def test_better_passes(compare):
    code, printed = compare(run(600), run(500))
    assert code == 0
    assert "better" in printed.out


def test_what_passes_is_the_threshold(compare):
    assert compare(run(500), run(540))[0] == 0
    assert compare(run(500), run(540), "--threshold", "5")[0] == 1


def test_a_slower_machine_alone_is_not_worse(compare):
    code, _ = compare(run(500, 1000, links=NO_RATE), run(1000, 2000, links=NO_RATE))
    assert code == 0


def test_times_count_where_there_is_nothing_better(compare):
    old, new = run(500, links=NO_RATE), run(600, links=NO_RATE)
    for content in (old, new):
        content["rows"] = [dict(row, ratios={}) for row in content["rows"] if row["who"] == "herring"]
    code, printed = compare(old, new)
    assert code == 1
    assert "median us" in printed.out


def test_wrong_results_fail_however_fast(compare):
    code, printed = compare(run(), run(100, wrong=3))
    assert code == 1
    assert "3 wrong elements" in printed.out


def test_another_setting_is_said(compare):
    _, printed = compare(run(ranks=4), run(ranks=8))
    assert "ranks: 4 and 8" in printed.out


def test_nothing_in_common_is_an_error(compare):
    code, printed = compare(run(sizes=(8192,)), run())
    assert code == 2
    assert "no row of Herring in common" in printed.err


def test_a_bad_threshold_is_named(compare):
    code, printed = compare(run(), run(), "--threshold", "-1")
    assert code == 2
    assert "--threshold" in printed.err


def test_a_file_that_is_not_there_is_named(capsys):
    assert _cli.main(["bench", "--compare", "/nonexistent/old.json", "/nonexistent/new.json"]) == 2
    assert "/nonexistent/old.json" in capsys.readouterr().err
