"""horovod.run: a function in several processes, here or on several hosts, started by herringrun."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from herring._errors import HerringError, InvalidArgumentError, UnavailableError
from herring._own_python import main_command

_FUNCTION, _RESULT = "function", "result-{}"
# herringrun's options for arguments of run().
_OPTIONS = {
    "hosts": "-H",
    "hostfile": "--hostfile",
    "slots": "--slots-per-host",
    "reset_limit": "--reset-limit",
    "start_timeout": "--start-timeout",
    "ssh_port": "--ssh-port",
    "ssh_identity_file": "--ssh-identity-file",
    "output_filename": "--output-filename",
    "executable": "--python",
    "servers": "--servers",
    "server_hosts": "--server-hosts",
    "rsh": "--rsh",
}
_CALL = f"from {__name__} import call; call()"


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    *,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interfaces: str | None = None,
    network_interface: str | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    executable: str | None = None,
    servers: int | None = None,
    server_hosts: str | None = None,
    rsh: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    disable_cache: bool | None = None,
    mpi_args: str | None = None,
) -> list[Any]:
    """What func(*args, **kwargs) returned in each of `num_proc` (`np`) processes, by rank; func calls hvd.init().

    Args:
        func: Pickled (by cloudpickle, where it is installed), as its arguments and results are; they travel over ssh.
        num_proc, np: Number of processes: 1, or as many as the hosts have slots.
        min_num_proc, min_np: An elastic job, which goes on with so many; the results are those of the ranks that
            finished.
        max_num_proc, max_np: Not more than num_proc.
        hosts, hostfile, slots: As herringrun's -H, --hostfile, --slots-per-host.
        reset_limit: Elastic: so many workers may be lost, in all.
        start_timeout, ssh_port, ssh_identity_file, output_filename: As herringrun's.
        network_interfaces, network_interface: HERRING_INTERFACE.
        executable: The Python to run, else this one's path, on all hosts.
        servers, server_hosts, rsh: As herringrun's; Horovod has none.
        verbose: Say what is started and how it ended.
        use_gloo, use_mpi, disable_cache: Say nothing here.

    Raises HerringError with the exit code where a process failed (its own error is on stderr), InvalidArgumentError for
    arguments that cannot be, UnavailableError for `mpi_args`.
    """
    given = dict(locals())
    if mpi_args:
        raise UnavailableError(
            "herring.horovod.run does not start mpirun (mpi_args): start the script with mpirun itself"
        )
    count = _count(
        {"np": num_proc if np is None else np, "min_np": min_num_proc or min_np, "max_np": max_num_proc or max_np}
    )
    is_here = hosts is None and hostfile is None
    options = {
        "-np": count["np"] if count["np"] is not None or not is_here else count["min_np"] or 1,
        "--min-workers": count["min_np"],
        **{option: given[name] for name, option in _OPTIONS.items()},
    }
    command = [word for name, value in options.items() if value is not None for word in (name, str(value))]
    command += ["--elastic"] * bool(count["min_np"] or count["max_np"]) + ["--verbose"] * bool(verbose)
    interface = network_interfaces or network_interface
    command += ["-x", f"HERRING_INTERFACE={interface}"] if interface else []
    return _run(command, executable or sys.executable, (func, tuple(args), dict(kwargs or {})))


def _count(numbers: dict[str, int | None]) -> dict[str, int | None]:
    """The numbers, as they are; raises InvalidArgumentError for what cannot be."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise InvalidArgumentError(f"{name} is {value}; at least one process is needed")
    most, count = numbers["max_np"], numbers["np"]
    if most is not None and count is not None and most > count:
        raise InvalidArgumentError(
            f"max_np is {most} and np is {count}: no more than np processes are started; set np to {most}"
        )
    return numbers


def _run(options: list[str], python: str, task: Any) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="herring-run-") as name:
        folder = Path(name)
        (folder / _FUNCTION).write_bytes(_dumps(task))
        command = [
            *main_command(sys.executable, "herring._launch"),
            *options,
            "--stdin",
            "none",
            "--stage",
            name,
            python,
            "-c",
            _CALL,
        ]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            raise HerringError(f"herring.horovod.run: a process ended with exit code {code}; its error is above")
        found = sorted(folder.glob(_RESULT.format("*")), key=lambda path: int(path.name.rpartition("-")[2]))
        return [pickle.loads(path.read_bytes()) for path in found]


def _dumps(value: Any) -> bytes:
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def call() -> None:
    """One process: runs the function in the folder that herringrun names, and leaves its result there."""
    from herring._placement import find_placement

    folder = Path(os.environ["HERRINGRUN_FILES"])
    func, args, kwargs = pickle.loads((folder / _FUNCTION).read_bytes())
    result = func(*args, **kwargs)
    (folder / _RESULT.format(find_placement().rank)).write_bytes(_dumps(result))
