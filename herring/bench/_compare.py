"""`herring bench --compare OLD NEW`: which figures got worse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from herring._errors import InvalidArgumentError
from herring.bench import _report
from herring.bench._units import format_size

_KEYS = {
    _report.FORMAT: ("size_bytes", "dtype", "op", "place", "who", "memory"),
    _report.REPLAY_FORMAT: ("model", "scale", "who", "memory"),
}


@dataclass(frozen=True)
class Change:
    """One figure of one row in both files; more is better for a ratio, less for t/t* and time."""

    row: str
    what: str
    old: float
    new: float
    more_is_better: bool

    @property
    def worse_percent(self) -> float:
        """How much worse the new one is; negative where it is better."""
        if self.more_is_better:
            return (self.old / self.new - 1) * 100
        return (self.new / self.old - 1) * 100


def _by_key(content: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[name] for name in _KEYS[content["format"]]): row for row in content["rows"]}


def _row_name(row: dict[str, Any]) -> str:
    if "model" in row:
        return f"{row['model']} x {row['scale']:g} {row['who']} {row['memory']}"
    return f"{format_size(row['size_bytes'])} {row['dtype']} {row['op']} {row['place']} {row['who']} {row['memory']}"


def same_setting(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between the places of measuring; times of different ones say nothing about the code."""
    pairs = [(name, old["machine"].get(name), new["machine"].get(name)) for name in ("processor", "cores")]
    pairs += [(name, old["job"].get(name), new["job"].get(name)) for name in ("ranks", "ranks_per_host", "servers")]
    pairs += [(name, old["links"].get(name), new["links"].get(name)) for name in old["links"]]
    return [f"{name}: {before} and {after}" for name, before, after in pairs if before != after]


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """Of Herring's rows in both files: the ratio to every peer, and t/t*; the time only where there is neither.

    Ratios are what a comparison can rest on: both sides of one were measured in one run, on one machine.
    """
    before = _by_key(old)
    for key, row in _by_key(new).items():
        was = before.get(key)
        if was is None or row["who"] != "herring":
            continue
        name, found = _row_name(row), False
        for peer in sorted(set(was["ratios"]) & set(row["ratios"])):
            found = True
            yield Change(name, f"x {peer}", was["ratios"][peer], row["ratios"][peer], more_is_better=True)
        if was.get("times_bound") is not None and row.get("times_bound") is not None:
            found = True
            yield Change(name, "t/t*", was["times_bound"], row["times_bound"], more_is_better=False)
        if not found:
            field = "step_ms" if "model" in row else "median_us"
            yield Change(name, field.replace("_", " "), was[field], row[field], more_is_better=False)


def main(old_path: str, new_path: str, threshold: float) -> int:
    """Prints every common figure and flags the worse ones; 1 where there is one, or a result of NEW was wrong, else 0.

    Raises InvalidArgumentError for files that cannot be compared.
    """
    if not threshold >= 0:
        raise InvalidArgumentError(f"--threshold {threshold:g}: it must be a percentage, 0 or more")
    old, new = _report.read(old_path), _report.read(new_path)
    if old["format"] != new["format"]:
        raise InvalidArgumentError(f"{old_path} and {new_path}: one is of allreduce, the other of a replay")
    for difference in same_setting(old, new):
        print(f"# not the same setting: {difference}")
    found = list(changes(old, new))
    if not found:
        raise InvalidArgumentError(f"{old_path} and {new_path} have no row of Herring in common")
    width = max(len(change.row) for change in found)
    bad = 0
    for change in found:
        is_worse = change.worse_percent > threshold
        bad += is_worse
        word = "worse" if change.worse_percent > 0 else "better"
        line = f"{change.row:<{width}}  {change.what:<10} {change.old:>10.4g} -> {change.new:>10.4g}"
        print(f"{line}  {abs(change.worse_percent):5.1f} % {word}{'  WORSE' if is_worse else ''}")
    wrong = [row for row in new["rows"] if row["wrong"]]
    for row in wrong:
        print(f"{_row_name(row)}: {row['wrong']} wrong elements in {new_path}")
    print(f"{bad} of {len(found)} figures got worse by more than {threshold:g} %")
    return 1 if bad or wrong else 0
