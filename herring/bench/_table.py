"""The table that people read."""

from __future__ import annotations

from collections.abc import Sequence

from herring.bench._bounds import Links, algbw, busbw, lower_bound
from herring.bench._contender import Case
from herring.bench._measure import Row
from herring.bench._units import format_rate, format_size

_COLUMNS = (
    ("size", 8),
    ("count", 10),
    ("type", 8),
    ("op", 8),
    ("place", 6),
    ("who", 8),
    ("memory", 8),
    ("min us", 10),
    ("median us", 10),
    ("p95 us", 10),
    ("algbw GB/s", 11),
    ("busbw GB/s", 11),
    ("cpu s/GB", 9),
    ("t/t*", 7),
    ("wrong", 8),
)
_PROFILE_COLUMNS = (("calls/op", 9), ("sleeps/op", 10))
_LEFT = {"type", "op", "place", "who", "memory"}
_RATIO_WIDTH = 9


def ratios(row: Row, rows: Sequence[Row]) -> dict[str, float]:
    """How many times longer each peer's median takes than `row`'s, in the same case; empty for a peer's own row."""
    if row.name != "herring":
        return {}
    return {
        each.name: each.median_s / row.median_s for each in rows if each.name != "herring" and each.case == row.case
    }


def times_bound(row: Row, links: Links) -> float | None:
    """t/t* of the median; None without a bound."""
    bound = lower_bound(row.case.nbytes, links)
    return None if bound is None else row.median_s / bound


def _cells(names: Sequence[tuple[str, int]], values: Sequence[str]) -> str:
    cells = [
        f"{value:<{width}}" if name in _LEFT else f"{value:>{width}}"
        for (name, width), value in zip(names, values, strict=True)
    ]
    return "  ".join(cells).rstrip()


def _number(value: float, digits: int) -> str:
    """At least three significant digits, however small."""
    return f"{value:.{digits}f}" if value == 0 or value >= 10.0**-digits * 100 else f"{value:.3g}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


class Table:
    """Formats rows. `with_profile` adds two columns of costs; `peers` get a column each with what their time is of
    Herring's."""

    def __init__(self, links: Links, ranks: int, peers: Sequence[str], *, with_profile: bool = False) -> None:
        self._links = links
        self._ranks = ranks
        self._peers = tuple(peers)
        self._profile_columns = _PROFILE_COLUMNS if with_profile else ()
        self._columns = (*_COLUMNS, *self._profile_columns, *((f"x {peer}", _RATIO_WIDTH) for peer in self._peers))

    def header(self) -> str:
        """Two lines: names, and a rule."""
        names = _cells(self._columns, [name for name, _ in self._columns])
        return f"{names}\n{'-' * len(names)}"

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """One line for each row of a case."""
        return [self._line(row, rows) for row in rows]

    def _line(self, row: Row, rows: Sequence[Row]) -> str:
        case = row.case
        bound = times_bound(row, self._links)
        found = ratios(row, rows)
        return _cells(
            self._columns,
            [
                format_size(case.nbytes),
                str(case.count),
                case.dtype,
                case.op,
                place_name(case),
                row.name,
                row.memory,
                _number(row.minimum_s * 1e6, 1),
                _number(row.median_s * 1e6, 1),
                _number(row.p95_s * 1e6, 1),
                _number(algbw(case.nbytes, row.median_s) / 1e9, 3),
                _number(busbw(case.nbytes, row.median_s, self._ranks) / 1e9, 3),
                _number(row.processor_s_per_gb, 2),
                "-" if bound is None else f"{bound:.{2 if bound < 100 else 0}f}",
                str(row.wrong),
                *([_count(row.syscalls), _count(row.sleeps)] if self._profile_columns else []),
                *(f"{found[peer]:.2f}" if peer in found else "" for peer in self._peers),
            ],
        )


def place_name(case: Case) -> str:
    """ "in" or "out" of place."""
    return "in" if case.in_place else "out"


def links_text(links: Links) -> str:
    """ "8 worker hosts + 8 server hosts, links of 500 Mbit/s"."""
    text = f"{links.worker_hosts} worker host{'s' * (links.worker_hosts != 1)}"
    if links.server_hosts:
        text += f" + {links.server_hosts} server host{'s' * (links.server_hosts != 1)}"
    return text if links.rate is None else f"{text}, links of {format_rate(links.rate)}"
