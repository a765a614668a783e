"""How each process of a job is started: where, its command line and its environment."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from herring import _tf_config
from herring._launch._allocation import task_of
from herring._launch._hosts import Host, Seat, seats_of
from herring._own_python import main_command

__all__ = ["STAGE", "Command", "Site", "commands_of", "free_ports", "here", "is_of_this_machine", "shared_environment"]

_PORTS = 3
#: The variable that says where the files lie that were sent along (herring.horovod.run). No setting of Herring's.
STAGE = "HERRINGRUN_FILES"

# What describes a machine or a login and not a job: each host keeps its own.
_OF_A_MACHINE = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "SHELL", "HOSTNAME", "HOST", "HOSTTYPE", "MACHTYPE", "MAIL", "SHLVL", "_"),
        *(
            "PWD",
            "OLDPWD",
            "TMPDIR",
            "TMP",
            "TEMP",
            "DISPLAY",
            "WAYLAND_DISPLAY",
            "XAUTHORITY",
            "WINDOWID",
            "LS_COLORS",
        ),
        *("SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY", "TMUX", "TMUX_PANE", "STY"),
        *("DBUS_SESSION_BUS_ADDRESS", "INVOCATION_ID", "JOURNAL_STREAM", "NOTIFY_SOCKET"),
    )
)
_OF_A_LOGIN = ("XDG_", "SUDO_")


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the environment that it gets."""

    arguments: list[str]
    environment: dict[str, str]
    host: int = 0  #: In the list of the job's hosts.
    takes_input: bool = False  #: herringrun's stdin is its stdin.
    folder: str | None = None  #: Where it starts; None: where herringrun did.


@dataclass(frozen=True)
class Site:
    """The job's hosts, and what is where. Workers' hosts come first."""

    hosts: Sequence[Host]
    workers: Sequence[int]  #: The host of each rank.
    servers: Sequence[int]  #: The host of each server process.
    master: str  #: How the others find worker 0's host.
    ports: Sequence[int]  #: Free ones there: for torch, for the hub, for the rendezvous.
    cores: Sequence[int]  #: Of each host.
    python: str = sys.executable  #: On other hosts.
    is_slurm: bool = False  #: In an allocation of Slurm's.


def free_ports() -> list[int]:
    """Of this machine."""
    sockets = [socket.socket() for _ in range(_PORTS)]
    try:
        for each in sockets:
            each.bind(("", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def here(workers: int, servers: int) -> Site:
    """All on this machine."""
    cores = [len(os.sched_getaffinity(0))]
    host = Host("localhost", workers)
    return Site([host], [0] * workers, [0] * servers, "127.0.0.1", free_ports(), cores)


def is_of_this_machine(name: str) -> bool:
    """Whether a variable is about the machine or the login and not about the job."""
    return name in _OF_A_MACHINE or name.startswith(_OF_A_LOGIN)


def shared_environment(own: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, str]:
    """What processes on other hosts get of herringrun's environment."""
    return {**{name: value for name, value in own.items() if not is_of_this_machine(name)}, **extra}


def _has_rendezvous(args: argparse.Namespace) -> bool:
    return bool(args.elastic or args.restart_servers)


def _common(args: argparse.Namespace, base: dict[str, str], site: Site) -> dict[str, str]:
    base = dict(base)
    host = f"[{site.master}]" if ":" in site.master else site.master
    base["MASTER_ADDR"] = site.master
    base["MASTER_PORT"] = str(site.ports[0])
    base["WORLD_SIZE"] = str(len(site.workers))
    base["HERRING_SERVERS"] = str(len(site.servers))
    base["HERRING_HUB"] = f"{host}:{site.ports[1]}"
    if _has_rendezvous(args):
        base["HERRING_RENDEZVOUS"] = f"{host}:{site.ports[2]}"
        base["HERRING_ELASTIC"] = "on" if args.elastic else "off"
    else:
        base.pop("HERRING_RENDEZVOUS", None)  # Of another job.
    base.setdefault("HERRING_SECRET", secrets.token_hex(16))
    # What a rank prints comes through a pipe, and should come when it is printed.
    base.setdefault("PYTHONUNBUFFERED", "1")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        base.pop(name, None)
    return base


def _worker_environment(common: Mapping[str, str], rank: int, seat: Seat, site: Site) -> dict[str, str]:
    size = len(site.workers)
    env = dict(common, RANK=str(rank), LOCAL_RANK=str(seat.local_rank), LOCAL_WORLD_SIZE=str(seat.local_size))
    env.setdefault("OMP_NUM_THREADS", str(max(1, site.cores[seat.host] // seat.local_size)))
    horovod = {
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_SIZE": seat.local_size,
        "CROSS_RANK": seat.cross_rank,
        "CROSS_SIZE": seat.cross_size,
        "HOSTNAME": site.hosts[seat.host].name,
    }
    env.update({f"HOROVOD_{name}": str(value) for name, value in horovod.items()})
    if site.is_slurm:
        env.update(task_of(rank, size, seat.local_rank, seat.host))
    env["TF_CONFIG"] = _tf_config.write(_tf_addresses(site), rank)
    return env


def _tf_addresses(site: Site) -> list[str]:
    """Where TensorFlow's own servers would listen, one for each worker: Herring starts none."""
    names = [site.master if host == site.workers[0] else site.hosts[host].name for host in site.workers]
    ports = [_tf_port(site.ports[0], site.workers[:rank].count(host)) for rank, host in enumerate(site.workers)]
    return [f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name, port in zip(names, ports, strict=True)]


def _tf_port(base: int, local_rank: int) -> int:
    """Beside those that Herring takes from MASTER_PORT on (herring._rendezvous)."""
    return 1024 + (base + 5555 + local_rank - 1024) % (65536 - 1024)


def commands_of(args: argparse.Namespace, base: dict[str, str], site: Site) -> dict[str, Command]:
    """Of each process, by its name, in the order in which they are started. `base` is what all environments have."""
    common = _common(args, base, site)
    herring = main_command(site.python, "herring._cli")
    commands: dict[str, Command] = {}
    if _has_rendezvous(args):
        sizes = ["--workers", str(len(site.workers)), "--servers", str(len(site.servers))]
        least = ["--min-workers", str(args.min_workers), "--quiet"]
        first = site.workers[0]
        commands["rendezvous"] = Command([*herring, "rendezvous", *sizes, *least], common, first, folder=args.wdir)
    for rank, seat in enumerate(seats_of(site.workers)):
        env = _worker_environment(common, rank, seat, site)
        takes_input = rank == 0 and args.stdin != "none"
        commands[f"rank {rank}"] = Command(args.command, env, seat.host, takes_input, args.wdir)
    for index, host in enumerate(site.servers):
        arguments = [*herring, "server", "--rank", str(index)]
        commands[f"server {index}"] = Command(arguments, {"OMP_NUM_THREADS": "1", **common}, host, folder=args.wdir)
    return commands
