"""The timeline's file, where operations end while it is closed."""

import json
from collections.abc import Callable
from pathlib import Path

from herring.horovod._engine.timeline import Timeline


def test_what_has_ended_when_it_is_closed_has_an_end(tmp_path: Path) -> None:
    """Who waits for an operation may go on before what is called at its end has been called."""
    ends: list[Callable[[], object]] = []
    timeline = Timeline(str(tmp_path / "timeline.json"), 0)
    timeline.watch(ends.append, lambda: True, "allreduce", "told.late")
    timeline.watch(ends.append, lambda: True, "allreduce", "told")
    ends[1]()
    timeline.watch(ends.append, lambda: False, "allgather", "in.flight")
    timeline.close()
    for end in ends:
        end()
    events = json.loads((tmp_path / "timeline.json").read_text())
    rows = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    spans = [(rows[each["tid"]], each["ph"]) for each in events if each["ph"] in "BE"]
    assert spans == [
        ("told.late", "B"), ("told", "B"), ("told", "E"), ("in.flight", "B"), ("told.late", "E"),
    ]  # fmt: skip
