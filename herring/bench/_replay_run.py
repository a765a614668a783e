"""`herring bench replay`: joins the job, replays each model, prints and writes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

import herring
from herring._errors import InvalidArgumentError
from herring._start_line import counted
from herring.bench import _report, _run
from herring.bench._bounds import Links, emulated_cluster, lower_bound
from herring.bench._models import MODELS, Model
from herring.bench._replay import GlooReducer, HerringReducer, Reducer, Replay, ReplayRow, least, measure_replay
from herring.bench._replay_options import ReplayOptions, buckets_text, read_replay_options, row_name
from herring.bench._replay_schedule import Bucket, buckets, gradients
from herring.bench._table import links_text

# Of a host's free memory, what the buckets may take.
_MEMORY_SHARE = 0.85
_UNKNOWN_BYTES = 1 << 62
_COLUMNS = (
    ("model", -18),
    ("workers", 7),
    ("MB", 8),
    ("buckets", 7),
    ("who", -8),
    ("memory", -8),
    ("backward ms", 11),
    ("comm ms", 9),
    ("step ms", 9),
    ("p95 ms", 9),
    ("efficiency", 10),
    ("overlap", 8),
    ("comm t/t*", 9),
    ("wrong", 6),
)
_RATIO_WIDTH = 7


def main(args: argparse.Namespace) -> int:
    """Returns the exit code: 1 where a sum was wrong."""
    options = read_replay_options(args)
    if options.shared.json_file is not None:
        _report.check_writable(options.shared.json_file)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    herring.init()
    try:
        return _replay_all(options)
    finally:
        herring.shutdown()


def _cells(widths: Sequence[int], values: Sequence[str]) -> str:
    """Negative widths are left-justified."""
    cells = [f"{v:<{-w}}" if w < 0 else f"{v:>{w}}" for w, v in zip(widths, values, strict=True)]
    return "  ".join(cells).rstrip()


class Table:
    """Formats rows; `peers` get a column each: their step's time over Herring's."""

    def __init__(self, workers: int, links: Links, peers: Sequence[str]) -> None:
        self._workers = workers
        self._links = links
        self._peers = tuple(peers)
        self._widths = [width for _, width in _COLUMNS] + [_RATIO_WIDTH for _ in self._peers]

    def header(self) -> str:
        """Two lines: names, and a rule."""
        names = _cells(self._widths, [name for name, _ in _COLUMNS] + [f"x {peer}" for peer in self._peers])
        return f"{names}\n{'-' * len(names)}"

    def line(self, row: ReplayRow, rows: Sequence[ReplayRow]) -> str:
        """One contender's; `rows` are all of the same model."""
        found = step_ratios(row, rows)
        bound = times_bound(row, self._links)
        return _cells(
            self._widths,
            [
                row_name(row.model, row.scale),
                str(self._workers),
                f"{row.gradient_bytes / 2**20:.1f}",
                str(len(row.buckets)),
                row.name,
                row.memory,
                f"{row.backward_s * 1e3:.2f}",
                f"{row.communication_s * 1e3:.2f}",
                f"{row.step_s * 1e3:.2f}",
                f"{p95(row.step_times_s) * 1e3:.2f}",
                f"{row.efficiency:.1%}",
                "-" if self._workers == 1 else f"{row.overlap:.1%}",
                "-" if bound is None else f"{bound:.2f}",
                str(row.wrong),
                *(f"{found[peer]:.2f}" if peer in found else "" for peer in self._peers),
            ],
        )


def p95(times: Sequence[float]) -> float:
    """95 % of them are at most this (nearest rank)."""
    return sorted(times)[-(-95 * len(times) // 100) - 1]


def step_ratios(row: ReplayRow, rows: Sequence[ReplayRow]) -> dict[str, float]:
    """How many times longer each peer's median step takes than `row`'s; empty for a peer's own row."""
    if row.name != "herring":
        return {}
    return {each.name: each.step_s / row.step_s for each in rows if each.name != "herring"}


def times_bound(row: ReplayRow, links: Links) -> float | None:
    """t/t* of the communication alone; None without a bound."""
    bound = lower_bound(row.gradient_bytes, links)
    return None if bound is None else row.communication_s / bound


def row_json(row: ReplayRow, rows: Sequence[ReplayRow], links: Links, workers: int) -> dict[str, Any]:
    """One line of the table and what is behind it; milliseconds."""
    return {
        "model": row.model,
        "scale": row.scale,
        "source": MODELS[row.model]().source,
        "gradient_elements": row.gradient_elements,
        "gradient_bytes": row.gradient_bytes,
        "tensors": row.tensors,
        "buckets": [asdict(bucket) for bucket in row.buckets],
        "who": row.name,
        "memory": row.memory,
        "nominal_backward_ms": row.nominal_backward_s * 1e3,
        "backward_ms": row.backward_s * 1e3,
        "communication_ms": row.communication_s * 1e3,
        "step_ms": row.step_s * 1e3,
        "step_p95_ms": p95(row.step_times_s) * 1e3,
        "efficiency": row.efficiency,
        "overlap": None if workers == 1 else row.overlap,
        "times_bound": times_bound(row, links),
        "wrong": row.wrong,
        "copied_operations": row.copied,
        "ratios": step_ratios(row, rows),
        "backward_times_ms": [each * 1e3 for each in row.backward_times_s],
        "communication_times_ms": [each * 1e3 for each in row.communication_times_s],
        "step_times_ms": [each * 1e3 for each in row.step_times_s],
    }


def check_memory(gradient_bytes: int, copies: int, ranks: int, available: int) -> None:
    """Raises InvalidArgumentError where the buckets of `ranks` ranks, in `copies` kinds of memory, do not fit."""
    needed = gradient_bytes * copies * ranks
    if needed > available * _MEMORY_SHARE:
        raise InvalidArgumentError(
            f"the gradients of {ranks} ranks need {needed / 2**30:.1f} GB here, and {available / 2**30:.1f} GB are "
            "free: a smaller --scale, fewer ranks, or --buffers private"
        )


def _reducers(options: ReplayOptions) -> list[Reducer]:
    found: list[Reducer] = [HerringReducer(memory) for memory in options.shared.memories]
    if "gloo" in options.shared.peers:
        found.append(GlooReducer())
    return found


def _rows(
    options: ReplayOptions, model: Model, filled: Sequence[Bucket], reducers: Sequence[Reducer]
) -> list[ReplayRow]:
    element_bytes = np.dtype(options.shared.dtype).itemsize
    elements = sum(bucket.elements for bucket in filled)
    memories = {reducer.memory for reducer in reducers}
    told = emulated_cluster(os.environ)
    ranks = herring.size() if told else herring.local_size()  # emulated hosts share one machine's memory
    # What all agree on, and what was free before the first of them took any.
    available = least(_run.available_bytes() or _UNKNOWN_BYTES)
    check_memory(elements * element_bytes, len(memories), ranks, available)
    replay = Replay(filled, options.shared.dtype, memories)
    backward_s = options.backward_s
    if options.target is not None:
        who, efficiency = options.target
        backward_s = replay.backward_for(next(each for each in reducers if each.name == who), efficiency)
    assert backward_s is not None
    measured = measure_replay(replay, reducers, backward_s, options.shared.iterations, options.shared.warmup)
    return [
        ReplayRow(
            model=model.name,
            scale=options.scale,
            gradient_elements=elements,
            gradient_bytes=elements * element_bytes,
            tensors=sum(bucket.tensors for bucket in filled),
            buckets=tuple(filled),
            name=reducer.name,
            memory=reducer.memory,
            nominal_backward_s=backward_s,
            step_times_s=measured.steps[i],
            communication_times_s=measured.communications[i],
            backward_times_s=measured.backwards,
            wrong=measured.wrong[i],
            copied=measured.copied[i],
        )
        for i, reducer in enumerate(reducers)
    ]


def _replay_all(options: ReplayOptions) -> int:
    shared = options.shared
    links = _run.find_links(shared)
    reducers = _reducers(options)
    table = Table(herring.size(), links, shared.peers)
    rows: list[tuple[ReplayRow, dict[str, Any]]] = []

    def say(text: str) -> None:
        if herring.rank() == 0:
            print(text, flush=True)

    try:
        say(f"# herring {herring.__version__} bench replay: {counted(herring.size(), 'worker')}, {links_text(links)}")
        say(f"# {herring.description()}")
        say(f"# {buckets_text(options)}, {shared.dtype}; medians of {shared.iterations} after {max(shared.warmup, 1)}")
        for name in options.models:
            _replay_one(options, MODELS[name](), reducers, links, table, say, rows)
        if herring.rank() == 0 and shared.json_file is not None:
            _write(shared.json_file, options, links, [content for _, content in rows])
    finally:
        for reducer in reversed(reducers):
            reducer.close()
    return _verdict([row for row, _ in rows])


def _replay_one(
    options: ReplayOptions,
    model: Model,
    reducers: Sequence[Reducer],
    links: Links,
    table: Table,
    say: Callable[[str], None],
    rows: list[tuple[ReplayRow, dict[str, Any]]],
) -> None:
    element_bytes = np.dtype(options.shared.dtype).itemsize
    filled = buckets(gradients(model, options.scale), element_bytes, options.bucket_bytes)
    say(f"# {model.name}: {model.source}; {model.gradient_elements:,} gradients")
    if options.scale != 1:
        say(f"# {model.name}: scaled down, every gradient is {options.scale:g} of that")
    found = _rows(options, model, filled, reducers)
    if not rows:
        say(table.header())
    for row in found:
        say(table.line(row, found))
        rows.append((row, row_json(row, found, links, herring.size())))
    if any(row.copied for row in found if row.memory == "arena"):
        say("# of the arena's operations, some went through a copy: it is full; HERRING_ARENA_BYTES makes it larger")


def _write(path: str, options: ReplayOptions, links: Links, rows: list[dict[str, Any]]) -> None:
    settings = {"options": asdict(options), "herring": _run.given_settings()}
    content = _report.report([], links, _run.job_json(), settings)
    _report.write(path, {**content, "format": _report.REPLAY_FORMAT, "rows": rows})


def _verdict(rows: Sequence[ReplayRow]) -> int:
    return _run.verdict(
        [
            f"{row.name} ({row.memory} memory) gave {row.wrong} wrong elements in the gradients of "
            f"{row_name(row.model, row.scale)}"
            for row in rows
            if row.wrong
        ]
    )
