"""Which hosts a job runs on, and what runs on which: pure, from -H, --hostfile and their like."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from herring._errors import InvalidArgumentError

__all__ = ["Host", "Seat", "allot", "is_loopback_name", "parse_hostfile", "parse_hosts", "seats_of"]

_LOOPBACK = re.compile(r"localhost|127\.[0-9.]+|::1", re.IGNORECASE)
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.\\-]*@)?(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9_][A-Za-z0-9_.-]*)")
_MAX_SLOTS = 1_000_000


@dataclass(frozen=True)
class Host:
    """A host and how many processes it takes."""

    address: str  #: What ssh is told: name, or user@name.
    slots: int

    @property
    def name(self) -> str:
        """Without the user: how other hosts find it."""
        return self.address.rpartition("@")[2]


@dataclass(frozen=True)
class Seat:
    """Where a worker runs, in torchrun's and Horovod's terms."""

    host: int  #: Its index in the list of hosts.
    local_rank: int
    local_size: int
    cross_rank: int  #: Number of this host among those that have a worker of this local rank.
    cross_size: int  #: How many such hosts there are.


def is_loopback_name(name: str) -> bool:
    """Whether it means another machine on every machine."""
    return bool(_LOOPBACK.fullmatch(name))


def parse_hosts(text: str, option: str, slots: int = 1) -> list[Host]:
    """ "a:4,user@b:2,[fd00::1]:4"; `slots` where none is given. A host that is named twice has the slots of both.

    Raises InvalidArgumentError, naming `option`.
    """
    found = [_host(each.strip(), option, slots) for each in text.split(",") if each.strip()]
    if not found:
        raise InvalidArgumentError(f"{option} {text!r} names no host; for example: {option} node1:4,node2:4")
    return _merged(found)


def parse_hostfile(text: str, option: str, slots: int = 1) -> list[Host]:
    """Open MPI's and Horovod's hostfile: a host a line, `name`, `name:4`, or `name slots=4 max-slots=8`; # begins a
    comment. Raises InvalidArgumentError with the line's number."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace("=", " = ").split()
        if not words:
            continue
        where = f"{option}, line {number}"
        said = slots
        keys = words[1:]
        if len(keys) % 3 or any(keys[at + 1] != "=" for at in range(0, len(keys), 3)):
            raise InvalidArgumentError(f"{where}: {line.strip()!r} is not `name slots=N`")
        for at in range(0, len(keys), 3):
            key = keys[at].replace("_", "-").lower()
            if key == "slots":
                said = _slots(keys[at + 2], where)
            elif key != "max-slots":
                raise InvalidArgumentError(f"{where}: {keys[at]}= is not known; a line is `name slots=N`")
        found.append(_host(words[0], where, said))
    if not found:
        raise InvalidArgumentError(f"{option} names no host; each line is `name slots=N`")
    return _merged(found)


def _host(text: str, option: str, slots: int) -> Host:
    match = re.fullmatch(r"(.*?\]|[^:]*)(?::([^:]*))?", text)
    name = match.group(1) if match else text
    if match is None or not _NAME.fullmatch(name):
        more = "; an IPv6 address stands in brackets: [fd00::1]:4" if text.count(":") > 1 else ""
        raise InvalidArgumentError(f"{option}: {text!r} is not a host; write name:slots or user@name:slots{more}")
    if match.group(2) is not None:
        slots = _slots(match.group(2), option)
    return Host(name.replace("[", "").replace("]", ""), slots)


def _slots(text: str, option: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_SLOTS:
        raise InvalidArgumentError(f"{option}: {text!r} is not a number of slots; it must be a whole number, 1 or more")
    return int(text)


def _merged(hosts: Sequence[Host]) -> list[Host]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.address] = slots.get(host.address, 0) + host.slots
    return [Host(address, count) for address, count in slots.items()]


def allot(hosts: Sequence[Host], count: int, what: str, advice: str) -> list[int]:
    """The host of each of `count` processes: a host is filled before the next one. Raises InvalidArgumentError, naming
    `what` and with `advice`, where there are too few slots."""
    total = sum(host.slots for host in hosts)
    if count > total:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts[:8]) + (", ..." if len(hosts) > 8 else "")
        raise InvalidArgumentError(f"{what}: the hosts have {total} slots ({listed}); {advice}")
    places = [index for index, host in enumerate(hosts) for _ in range(host.slots)]
    return places[:count]


def seats_of(places: Sequence[int]) -> list[Seat]:
    """Of each rank, from the host of each rank."""
    sizes = {host: list(places).count(host) for host in dict.fromkeys(places)}
    order = list(sizes)
    next_rank = dict.fromkeys(sizes, 0)
    seats = []
    for host in places:
        local = next_rank[host]
        next_rank[host] += 1
        across = [each for each in order if sizes[each] > local]
        seats.append(Seat(host, local, sizes[host], across.index(host), len(across)))
    return seats
