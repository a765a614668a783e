"""horovod.run: a function in several processes of this machine, started by herringrun."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from herring._errors import HerringError, InvalidArgumentError, UnavailableError

_FUNCTION, _RESULT = "function", "result-{}"
_LOCAL = ("localhost", "127.0.0.1")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    verbose: int | bool | None = None,
    executable: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
) -> list[Any]:
    """What func(*args, **kwargs) returned in each of `num_proc` (`np`) processes, by rank; func calls hvd.init().

    Args:
        func: Can be pickled (by cloudpickle, where it is installed).
        hosts: Nothing, or "localhost:N"; for several machines launch the script with torchrun or mpirun.
        executable: The Python to run, else this one.
        verbose: Say what is started and how it ended.
        use_gloo, use_mpi: Say nothing here.

    Raises HerringError with the exit code where a process failed (its own error is on stderr), UnavailableError for
    other hosts.
    """
    count = num_proc if np is None else np
    if count < 1:
        raise InvalidArgumentError(f"np is {count}; at least one process is needed")
    away = [each for each in (hosts or "").split(",") if each and each.partition(":")[0] not in _LOCAL]
    if away:
        raise UnavailableError(
            f"herring.horovod.run starts processes here only, not on {', '.join(away)}: use torchrun"
        )
    python = executable or sys.executable
    with tempfile.TemporaryDirectory(prefix="herring-run-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(_dumps((func, tuple(args), dict(kwargs or {}))))
        options = ["--verbose"] if verbose else []
        command = [python, "-m", "herring._launch", "-np", str(count), *options]
        command += [python, "-c", f"from {__name__} import call; call({name!r})"]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise HerringError(f"herring.horovod.run: a process ended with exit code {code}; its error is above")
        return [pickle.loads((folder / _RESULT.format(rank)).read_bytes()) for rank in range(count)]


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def call(name: str) -> None:
    """One process: runs the function in that folder and leaves its result there."""
    from herring._placement import find_placement

    folder = Path(name)
    func, args, kwargs = pickle.loads((folder / _FUNCTION).read_bytes())
    result = func(*args, **kwargs)
    (folder / _RESULT.format(find_placement().rank)).write_bytes(_dumps(result))
