"""Pictures of `herring bench replay`: how much of a step is backward, for each model, and against workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from herring.bench._plot import Group, Line, Measure, Painter, by_kind, kind_of, lines_of, words_of
from herring.bench._replay_options import row_name

_LABEL = "scaling efficiency: backward / step"
_EFFICIENCY = Measure("efficiency", "efficiency", f"{_LABEL} (%)", 100.0)


def groups(content: Mapping[str, Any]) -> list[Group]:
    """Of one run: a group for each model, Herring's bars first."""
    rows = content["rows"]
    names = dict.fromkeys(_name(row) for row in rows)
    return [
        Group(name, tuple(lines_of([(row, 0, row["efficiency"]) for row in rows if _name(row) == name])))
        for name in names
    ]


def against_workers(contents: Sequence[Mapping[str, Any]], name: str) -> list[Line]:
    """Of several runs: x is the number of workers, y the efficiency of one model in percent."""
    return lines_of(
        [
            (row, content["job"]["ranks"], row[_EFFICIENCY.field] * _EFFICIENCY.scale)
            for content in contents
            for row in content["rows"]
            if _name(row) == name
        ]
    )


def _name(row: Mapping[str, Any]) -> str:
    return row_name(row["model"], row["scale"])


def draw(painter: Painter, contents: Mapping[str, dict[str, Any]]) -> None:
    """One picture for each file, and one for each model and kind of placement with several numbers of workers."""
    for path, content in contents.items():
        title = f"steps of real models, {content['job']['ranks']} workers, {kind_of(content)}"
        painter.bars(f"{Path(path).stem}-efficiency", title, groups(content), _LABEL)
    for kind, alike in by_kind(list(contents.values())).items():
        for name in dict.fromkeys(_name(row) for content in alike for row in content["rows"]):
            lines = against_workers(alike, name)
            if any(len({x for x, _ in line.points}) > 1 for line in lines):
                title = f"steps of {name}, {kind}"
                painter.draw(f"workers-{words_of(kind)}-{words_of(name)}-efficiency", title, lines, _EFFICIENCY, False)
