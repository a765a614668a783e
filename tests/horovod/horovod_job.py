"""Runs all cases of a module in one job of several ranks, and says of each how it ended.

Starting the ranks takes longer than most cases, so they share a job; each has names of its own.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from ranks import clean_environment, run_ranks

HERE = Path(__file__).resolve().parent
MARK = "@@case "


def cases_of(module: str) -> list[str]:
    """Names of the module's cases, in the order in which they are defined; without importing torch."""
    lines = (HERE / f"{module}.py").read_text().splitlines()
    return [line.removeprefix("def ").partition("(")[0] for line in lines if line.startswith("def case_")]


@functools.cache
def outcomes(
    module: str, size: int, environment: tuple[tuple[str, str], ...] = (), only: str = ""
) -> dict[str, list[str]]:
    """Of each case (or of `only` one): what every rank says of it, "ok" or the exception."""
    paths = [str(HERE), str(HERE.parent / "torch"), *[path for path in sys.path if (Path(path) / "herring").is_dir()]]
    env = {"PYTHONPATH": os.pathsep.join(paths), "HERRING_TIMEOUT_S": "30", **dict(environment)}
    found: dict[str, list[str]] = {}
    for rank, output in enumerate(run_ranks(size, "horovod_job:run_all", module, only, timeout=150, env=env)):
        for part in output.split(MARK)[1:]:
            name, _, text = part.partition(" ")
            found.setdefault(name, []).append(f"rank {rank}: {text.strip()}")
    return found


def check(
    module: str, size: int, case: str, environment: tuple[tuple[str, str], ...] = (), *, alone: bool = False
) -> None:
    """Fails with what the ranks said. Alone: in a job without the module's other cases."""
    said = outcomes(module, size, environment, case if alone else "").get(case, [])
    told = "\n".join(said)
    assert len(said) == size, f"{case}: only {len(said)} of {size} ranks came to it: {told}"
    assert all(each.partition(": ")[2].splitlines()[0] == "ok" for each in said), told


def launch(tmp_path: Path, script: str, *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """herringrun of two ranks with this script, which ends within two minutes."""
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "herring._launch", "-np", "2", *options, sys.executable, str(path)]
    return subprocess.run(
        command, env=clean_environment(settings), capture_output=True, text=True, timeout=120, check=False
    )


def run_all(module: str, only: str) -> None:
    """What each rank does."""
    import herring.horovod.torch as hvd

    hvd.init()
    cases: list[Callable[[], None]] = [
        getattr(importlib.import_module(module), name) for name in cases_of(module) if only in ("", name)
    ]
    for case in cases:
        try:
            case()
            text = "ok"
        except BaseException:
            text = traceback.format_exc()
        print(f"{MARK}{case.__name__} {text}", flush=True)
    hvd.shutdown()
