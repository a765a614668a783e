"""`herring bench --plot`: pictures of one or more --json files. Needs matplotlib, and nothing else here does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from herring._errors import InvalidArgumentError, UnavailableError
from herring.bench import _report
from herring.bench._units import format_rate, format_size

# Colours that are told apart by the colour-blind (Okabe and Ito); Herring is the strong one.
_COLOURS = {"herring": "#0072B2", "gloo": "#E69F00", "mpi": "#009E73", "mpich": "#CC79A7", "tcp": "#999999"}
_NAMES = {"herring": "Herring", "gloo": "gloo", "mpi": "Open MPI", "mpich": "MPICH", "tcp": "plain TCP"}
_OTHER_COLOUR = "#666666"
_FIGURE_INCHES = (7.0, 4.2)
_PNG_DPI = 150
_GROUP_WIDTH = 0.8


@dataclass(frozen=True)
class Measure:
    """One thing to draw: the field of a row times `scale`, and how the axis reads."""

    name: str
    field: str
    label: str
    scale: float


_MEASURES = (
    Measure("time", "median_us", "time (ms), median of the slowest rank", 1e-3),
    Measure("busbw", "busbw_gb_s", "bus bandwidth (GB/s)", 1.0),
    Measure("bound", "times_bound", "t / t* (1 is the bound)", 1.0),
)
# More than this between the least and the most, and the axis is logarithmic.
_LINEAR_RANGE = 12.0
# Against workers: only sizes from here, where the network counts.
_WORKERS_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Line:
    """One contender's points, in the order of x."""

    who: str
    memory: str
    points: tuple[tuple[float, float], ...]

    @property
    def label(self) -> str:
        """For the legend."""
        name = _NAMES.get(self.who, self.who)
        return f"{name} ({self.memory})" if self.who == "herring" else name


@dataclass(frozen=True)
class Group:
    """Bars side by side, each a line of one point."""

    name: str
    bars: tuple[Line, ...]


def lines_of(found: list[tuple[dict[str, Any], float, float]]) -> list[Line]:
    """Lines of (row, x, y): one for each contender; peers after Herring."""
    keys = sorted(
        {(row["who"], row["memory"]) for row, _, _ in found}, key=lambda key: (key[0] != "herring", key[0], key[1])
    )
    lines = []
    for who, memory in keys:
        points = sorted((x, y) for row, x, y in found if (row["who"], row["memory"]) == (who, memory))
        lines.append(Line(who, memory, tuple(points)))
    return lines


def kind_of(content: dict[str, Any]) -> str:
    """What must be equal for runs to share a picture against the number of workers, as its title says it."""
    links, job = content["links"], content["job"]
    rate = "" if links["rate"] is None else f", {format_rate(links['rate'])} links"
    if links["worker_hosts"] == 1:
        return "one host"
    per_host = "" if job["ranks_per_host"] == 1 else f", {job['ranks_per_host']} ranks per host"
    if links["server_hosts"] == 0:
        servers = "servers in the workers"
    elif links["server_hosts"] == links["worker_hosts"]:
        servers = "a server host per worker host"
    else:
        servers = f"{links['server_hosts']} server hosts"
    return servers + rate + per_host


def against_size(content: dict[str, Any], measure: Measure, place: str) -> list[Line]:
    """Of one run: x is bytes."""
    rows = [row for row in content["rows"] if row["place"] == place and row.get(measure.field) is not None]
    return lines_of([(row, row["size_bytes"], row[measure.field] * measure.scale) for row in rows])


def against_workers(contents: Sequence[dict[str, Any]], measure: Measure, size: int, place: str) -> list[Line]:
    """Of several runs: x is the number of workers, at one size."""
    found = [
        (row, content["job"]["ranks"], row[measure.field] * measure.scale)
        for content in contents
        for row in content["rows"]
        if row["size_bytes"] == size and row["place"] == place and row.get(measure.field) is not None
    ]
    return lines_of(found)


def _title(content: dict[str, Any]) -> str:
    ranks, first = content["job"]["ranks"], content["rows"][0]
    return f"allreduce ({first['dtype']}, {first['op']}), {ranks} workers, {kind_of(content)}"


class Painter:
    """Draws and writes pictures; holds matplotlib."""

    def __init__(self, folder: Path) -> None:
        try:
            import matplotlib as mpl

            mpl.use("Agg")  # Files only: no display is needed.
            from matplotlib import pyplot
        except ImportError as error:
            raise UnavailableError(f"--plot needs matplotlib ({error}): pip install matplotlib") from error
        self._pyplot = pyplot
        self._folder = folder
        self.written: list[Path] = []

    def draw(self, name: str, title: str, lines: Sequence[Line], measure: Measure, sizes: bool) -> None:
        """NAME.png and NAME.svg; nothing where there are no points. `sizes`: x is bytes, else workers."""
        if not any(line.points for line in lines):
            return
        figure, axes = self._pyplot.subplots(figsize=_FIGURE_INCHES, layout="constrained")
        for line in lines:
            xs, ys = zip(*line.points, strict=True)
            is_ours = line.who == "herring"
            axes.plot(
                xs,
                ys,
                label=line.label,
                color=_COLOURS.get(line.who, _OTHER_COLOUR),
                linestyle="--" if is_ours and line.memory == "private" else "-",
                linewidth=2.4 if is_ours else 1.6,
                marker="o" if is_ours else "s",
                markersize=5 if is_ours else 4,
                zorder=3 if is_ours else 2,
            )
        self._axes(axes, lines, measure, sizes)
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=9, frameon=False)
        self._save(figure, name)

    def bars(self, name: str, title: str, groups: Sequence[Group], label: str) -> None:
        """NAME.png and NAME.svg: a group of bars for each of `groups`, values written above them; shares of 1."""
        figure, axes = self._pyplot.subplots(figsize=_FIGURE_INCHES, layout="constrained")
        series = list(dict.fromkeys((bar.who, bar.memory) for group in groups for bar in group.bars))
        width = _GROUP_WIDTH / len(series)
        for number, key in enumerate(series):
            found = [
                (x + (number - (len(series) - 1) / 2) * width, bar)
                for x, group in enumerate(groups)
                for bar in group.bars
                if (bar.who, bar.memory) == key
            ]
            drawn = axes.bar(
                [x for x, _ in found],
                [bar.points[0][1] for _, bar in found],
                width * 0.92,
                label=found[0][1].label,
                color=_COLOURS.get(key[0], _OTHER_COLOUR),
                alpha=0.55 if key == ("herring", "private") else 1.0,
            )
            axes.bar_label(drawn, fmt=lambda share: f"{share:.0%}", fontsize=8)
        axes.set_xticks(range(len(groups)), [group.name for group in groups])
        axes.set_ylim(0, 1.12)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=9, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(series))
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        self._save(figure, name)

    def _save(self, figure: Any, name: str) -> None:
        for suffix in ("png", "svg"):
            path = self._folder / f"{name}.{suffix}"
            figure.savefig(path, dpi=_PNG_DPI)
            self.written.append(path)
        self._pyplot.close(figure)

    @staticmethod
    def _axes(axes: Any, lines: Sequence[Line], measure: Measure, sizes: bool) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

        if sizes:
            axes.set_xscale("log", base=2)
            axes.set_xlabel("size per rank")
        else:
            axes.set_xlabel("workers")
        ticks = sorted({x for line in lines for x, _ in line.points})
        shown = ticks[:: math.ceil(len(ticks) / 12)]
        axes.set_xticks(shown, [format_size(int(x)) if sizes else f"{x:g}" for x in shown])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_ylabel(measure.label)
        values = [y for line in lines for _, y in line.points]
        if max(values) > _LINEAR_RANGE * min(values) > 0:
            decades = math.log10(max(values) / min(values))
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < 3 else (1.0,)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_ylim(bottom=0)
        if measure.field == "times_bound":
            axes.axhline(1.0, color="black", linewidth=1, linestyle=":")
        axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)


def _check_out(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"--out {text}: {error.strerror}") from None
    return folder


def _places(contents: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({row["place"] for content in contents for row in content["rows"]})


def main(paths: Sequence[str], out: str) -> int:
    """Reads the files and writes all pictures that their rows allow; prints what was written.

    Against size: one set for each file with several sizes, named after it. Against workers: one for each kind of
    placement measured with several numbers of workers. Raises InvalidArgumentError for bad files and where there is
    nothing to draw, UnavailableError without matplotlib. Of a replay: the efficiencies, always and against workers.
    """
    from herring.bench._replay_plot import draw as draw_replays

    files = {path: _report.read(path) for path in paths}
    contents = {path: content for path, content in files.items() if content["format"] == _report.FORMAT}
    painter = Painter(_check_out(out))
    draw_replays(painter, {path: content for path, content in files.items() if path not in contents})
    for path, content in contents.items():
        if len({row["size_bytes"] for row in content["rows"]}) < 2:
            continue
        places = _places([content])
        for place in places:
            suffix = f"-{place}" if len(places) > 1 else ""
            for measure in _MEASURES:
                lines = against_size(content, measure, place)
                painter.draw(f"{Path(path).stem}-{measure.name}{suffix}", _title(content), lines, measure, sizes=True)
    _draw_workers(painter, list(contents.values()))
    if not painter.written:
        raise InvalidArgumentError(
            "nothing to draw: give a file with several sizes, or several files with different numbers of workers"
        )
    for written in painter.written:
        print(written)
    return 0


def by_kind(contents: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Those that may share a picture against the number of workers."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for content in contents:
        kinds.setdefault(kind_of(content), []).append(content)
    return kinds


def words_of(text: str) -> str:
    """For the name of a file."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in text.lower()).split())


def _draw_workers(painter: Painter, contents: list[dict[str, Any]]) -> None:
    for kind, alike in by_kind(contents).items():
        sizes = sorted({row["size_bytes"] for content in alike for row in content["rows"]})
        places = _places(alike)
        for size in [size for size in sizes if size >= _WORKERS_FROM_BYTES] or sizes[-1:]:
            for place in places:
                suffix = f"-{place}" if len(places) > 1 else ""
                for measure in _MEASURES:
                    lines = against_workers(alike, measure, size, place)
                    if any(len(line.points) > 1 for line in lines):
                        name = f"workers-{words_of(kind)}-{format_size(size)}-{measure.name}{suffix}"
                        painter.draw(name, f"allreduce of {format_size(size)}, {kind}", lines, measure, sizes=False)
