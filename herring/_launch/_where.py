"""Which hosts the command line names, and what runs on which."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from herring._errors import InvalidArgumentError
from herring._launch._allocation import Allocation, allocation_of
from herring._launch._hosts import Host, allot, is_loopback_name, parse_hostfile, parse_hosts
from herring._rendezvous import own_address

__all__ = ["Where", "is_this_machine", "where"]

_MORE_HOSTS = "name more hosts or more slots"
_MORE_TASKS = "ask Slurm for more tasks (--ntasks), or pass --slots-per-host N"


@dataclass(frozen=True)
class Where:
    """The hosts, and the host (its index) of each worker and each server process."""

    hosts: list[Host]
    workers: list[int]
    servers: list[int]
    by_srun: Mapping[str, int] = field(default_factory=dict)  #: In a Slurm allocation: the component of each node.

    @property
    def is_here(self) -> bool:
        """Everything is on this machine."""
        return all(map(is_this_machine, self.hosts))


def is_this_machine(host: Host) -> bool:
    """Whether nothing has to be asked of ssh to start a process there."""
    user, _, name = host.address.rpartition("@")
    with contextlib.suppress(Exception):  # A user without a name.
        if user and user != getpass.getuser():
            return False
    if is_loopback_name(name) or name in (socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    return own_address(name) is not None


def where(args: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Where | None:
    """None where no hosts are named, and there is no Slurm allocation. Raises InvalidArgumentError for what cannot
    be."""
    workers = _named(args.hosts, "-H", args.hostfile, "--hostfile", args.slots_per_host or 1)
    servers = _named(args.server_hosts, "--server-hosts", args.server_hostfile, "--server-hostfile", 1)
    allocation = None if args.rsh else allocation_of(environment or {}, args.slots_per_host, args.num_proc)
    is_allotted = workers is None and allocation is not None
    if workers is None and allocation is not None:
        workers, servers = _of_allocation(allocation, servers)
    if workers is None:
        if servers is not None:
            raise InvalidArgumentError("--server-hosts: name the workers' hosts too, with -H or --hostfile")
        return None
    total = sum(host.slots for host in workers)
    count = total if args.num_proc is None else args.num_proc
    places = allot(workers, count, f"-np {count}", _MORE_TASKS if is_allotted else _MORE_HOSTS)
    used = [host for index, host in enumerate(workers) if index in places]
    if servers is None:
        serving = [index % len(used) for index in range(args.servers)]
        return _checked(Where(used, places, serving, _by_srun(used, allocation)), args)
    most = sum(host.slots for host in servers)
    serving_at = allot(servers, args.servers or most, f"--servers {args.servers}", _MORE_HOSTS)
    hosts, serving = _joined(used, servers, serving_at)
    return _checked(Where(hosts, places, serving, _by_srun(hosts, allocation)), args)


def _of_allocation(allocation: Allocation, servers: list[Host] | None) -> tuple[list[Host], list[Host] | None]:
    """The workers' hosts and the servers'; nodes that are named for servers have no workers."""
    if servers is None:
        return allocation.workers, allocation.servers
    named = {host.address for host in servers}
    if strange := sorted(named - set(allocation.components)):
        raise InvalidArgumentError(
            f"--server-hosts: {', '.join(strange)} is not in this Slurm allocation ({', '.join(allocation.components)})"
        )
    workers = [host for host in allocation.workers if host.address not in named]
    if not workers:
        raise InvalidArgumentError("--server-hosts: no node of the Slurm allocation is left for workers")
    return workers, servers


def _by_srun(hosts: list[Host], allocation: Allocation | None) -> Mapping[str, int]:
    """Empty where a host is not in the allocation: then ssh is used."""
    known = {} if allocation is None else allocation.components
    return known if all(host.address in known for host in hosts) else {}


def _joined(workers: list[Host], servers: list[Host], places: Sequence[int]) -> tuple[list[Host], list[int]]:
    """One list of hosts, and the servers' places in it: a host may have both."""
    hosts = list(workers)
    index = {host.address: at for at, host in enumerate(hosts)}
    serving = []
    for place in places:
        host = servers[place]
        if host.address not in index:
            index[host.address] = len(hosts)
            hosts.append(host)
        serving.append(index[host.address])
    return hosts, serving


def _checked(found: Where, args: argparse.Namespace) -> Where:
    first = found.hosts[0].name
    if len(found.hosts) > 1 and is_loopback_name(first) and args.master_addr is None:
        raise InvalidArgumentError(
            f"-H: worker 0 is on {first!r}, and other hosts do not find it by that name: write this machine's name or "
            "address, or give it with --master-addr"
        )
    return found


def _named(hosts: str | None, option: str, file: str | None, file_option: str, slots: int) -> list[Host] | None:
    if hosts is not None and file is not None:
        raise InvalidArgumentError(f"{option} and {file_option}: give only one of them")
    if hosts is not None:
        return parse_hosts(hosts, option, slots)
    if file is None:
        return None
    try:
        return parse_hostfile(Path(file).read_text(encoding="utf-8"), f"{file_option} {file}", slots)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidArgumentError(f"{file_option} {file}: {why}") from None
