"""How processes find the hub, which runs in worker 0's process.

In this order:

1. ``HERRING_HUB=host:port``: there. The secret is ``HERRING_SECRET``, or empty.
2. A store that the framework already has (torch's): worker 0 publishes ``host:port:secret`` in it. Server processes do
   not see the store, so this is for jobs without them.
3. ``MASTER_ADDR`` and ``MASTER_PORT``: on that host, at the first free of ``derived_ports(MASTER_PORT)``. Everybody
   tries them in turn; the handshake tells which is the hub of this job. The secret is ``HERRING_SECRET``; without it
   one made of MASTER_PORT, which protects from nobody but keeps apart two jobs whose ports overlap. Two jobs with the
   same MASTER_PORT and secret refuse each other (docs/reliability.md, "Two jobs at one port").
4. What the scheduler says of worker 0's host (Slurm, Kubeflow Trainer, SageMaker), with a port made of the job's
   number: as with 3.
5. MPI, where mpirun launched the job: worker 0 broadcasts ``host:port:secret``.
6. A job of one process: loopback, any port.

With 2 and 5 the secret is ``HERRING_SECRET`` where that is set, else random.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from herring._errors import HerringTimeoutError, InvalidArgumentError

_PORT_STEP = 1111
_PORT_CANDIDATES = 4
_FIRST_PORT, _PORT_END = 1024, 65536
_LOOPBACK = "127.0.0.1"


class Store(Protocol):
    """What Herring uses of torch.distributed.Store. `wait(keys, timedelta)` is used as well where there is one."""

    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...


@dataclass(frozen=True)
class Meeting:
    """A place where a hub listens or is looked for: any of `ports` on `host`."""

    host: str
    ports: tuple[int, ...]
    secret: str = field(default="", repr=False)
    master_port: int = field(default=0, compare=False)  #: What the ports were derived from; 0: from nothing.
    #: The secret is made of MASTER_PORT: it tells this job from no other with the same one.
    is_derived: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.host}:{' or '.join(map(str, self.ports))}"

    def to_text(self) -> str:
        """`host:port:secret in hexadecimal`, for a store or a broadcast."""
        return f"{self.host}:{self.ports[0]}:{self.secret.encode().hex()}"

    @staticmethod
    def from_text(text: str) -> Meeting:
        """The inverse of to_text(); raises InvalidArgumentError for anything else."""
        try:
            host, port, secret = text.rsplit(":", 2)
            return Meeting(host, (_port(port, "the published hub address"),), bytes.fromhex(secret).decode())
        except ValueError:
            raise InvalidArgumentError(
                f"the hub's address was published as {text[:80]!r}, which is not host:port:secret"
            ) from None


def derived_ports(master_port: int) -> tuple[int, ...]:
    """MASTER_PORT + 1111, + 2222, + 3333, + 4444, wrapped into 1024..65535: where the hub listens, the first free one.

    MASTER_PORT itself belongs to the launcher or to torch's store.
    """
    span = _PORT_END - _FIRST_PORT
    steps = range(1, _PORT_CANDIDATES + 1)
    return tuple(_FIRST_PORT + (master_port - _FIRST_PORT + _PORT_STEP * step) % span for step in steps)


def meeting_address(listen_host: str, fixed_host: str) -> str:
    """An address of this host at which what listens at `fixed_host`'s ports is found, be it of this job or not."""
    return listen_host or own_address(fixed_host) or _LOOPBACK


def from_hub_setting(hub: str, secret: str, setting: str = "HERRING_HUB") -> Meeting:
    """HERRING_HUB's host:port; IPv6 addresses in brackets. Raises InvalidArgumentError."""
    host, separator, port = hub.rpartition(":")
    if not separator or not host:
        raise InvalidArgumentError(f"{setting} is {hub!r}; it must be host:port")
    return Meeting(host.strip("[]"), (_port(port, setting),), secret)


def from_master(environment: Mapping[str, str], secret: str) -> Meeting | None:
    """MASTER_ADDR and the ports derived from MASTER_PORT; None where neither is set."""
    host, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    if not host and not port:
        return None
    if not host or not port:
        missing = "MASTER_ADDR" if not host else "MASTER_PORT"
        raise InvalidArgumentError(f"{missing} is not set, but MASTER_ADDR and MASTER_PORT go together: set both")
    return from_port(host, _port(port, "MASTER_PORT"), secret)


def from_port(host: str, number: int, secret: str) -> Meeting:
    """Worker 0's host and the ports derived from what is, or stands for, MASTER_PORT."""
    return Meeting(host, derived_ports(number), secret or f"MASTER_PORT={number}", number, not secret)


def _port(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < _PORT_END:
        raise InvalidArgumentError(f"the port in {name} is {text!r}; it must be a number from 1 to 65535")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether `host` is written as this machine's own ("localhost", 127.x, ::1); names are not looked up."""
    if host.lower() == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def own_address(host: str) -> str | None:
    """The numeric address of `host` where it is one of this machine's that others can reach, else None."""
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            numeric = str(address[0])
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((numeric, 0))
                if not is_loopback(numeric):
                    return numeric
    return None


def interface_address(interface: str) -> str:
    """The IPv4 address of an interface ("eth0"), else its IPv6 address; an address is returned as it is.

    Raises InvalidArgumentError where it has none that others can reach.
    """
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    try:
        import fcntl

        siocgifaddr = 0x8915
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), siocgifaddr, request)[20:24])
    except OSError as error:
        if address := _interface_address6(interface):
            return address
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise InvalidArgumentError(
            f"HERRING_INTERFACE is {interface!r}, which has no IPv4 address here ({error}), and no IPv6 address "
            f"(except link-local ones, which other hosts cannot reach); interfaces: {names}"
        ) from None


def _interface_address6(interface: str) -> str | None:
    """The first IPv6 address of an interface that is not link-local."""
    link_local, tentative_or_failed = 0x20, 0x40 | 0x08
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
        for line in table:
            address, _, _, scope, flags, name = line.split()
            if name == interface and int(scope, 16) != link_local and not int(flags, 16) & tentative_or_failed:
                return str(ipaddress.ip_address(bytes.fromhex(address)))
    return None


def control_address(interface: str) -> str | None:
    """The address of the first of several interfaces ("eth0,eth1") that has one; None for RDMA devices without any.

    Raises InvalidArgumentError where that is not so.
    """
    problem = None
    for name in filter(None, map(str.strip, interface.split(","))):
        try:
            return interface_address(name)
        except InvalidArgumentError as error:
            if not os.path.exists(f"/sys/class/infiniband/{name.removesuffix('-rdm')}"):
                problem = problem or error
    if problem is not None:
        raise problem
    return None


# Connecting a datagram socket sends nothing; it only asks the routing table. These are for documentation.
_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


def primary_address() -> str:
    """The address from which this machine reaches others; loopback where it reaches none."""
    for family, far_away in _FAR_AWAY:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far_away, 9))
            return str(probe.getsockname()[0])
    return own_address(socket.gethostname()) or _LOOPBACK


def published_address(is_all_local: bool, interface: str, master_host: str | None) -> str:
    """The address of this host that worker 0 tells the others."""
    if is_all_local:
        return _LOOPBACK
    if interface and (address := control_address(interface)):
        return address
    if master_host and (address := own_address(master_host)):
        return address
    return primary_address()


def listening_address(is_all_local: bool, interface: str, fixed_host: str | None) -> str:
    """Where worker 0's hub listens; empty: on all addresses. `fixed_host` is where all others look, if that is settled.

    With HERRING_INTERFACE the hub is on that interface alone, unless the others look for it at another address.
    """
    if fixed_host is None and is_all_local:
        return _LOOPBACK
    if fixed_host is not None and is_loopback(fixed_host):
        return fixed_host
    address = control_address(interface)
    if address is None:
        # MASTER_ADDR may be a name that this host resolves to loopback and others to its real address: listen on all.
        return ""
    return address if fixed_host is None or own_address(fixed_host) == address else ""


def store_key(generation: int) -> str:
    """Where the hub's address lies in a store; each start of Herring over one store has its own generation."""
    return f"herring/hub/{generation}"


def read_store(store: Store, generation: int, deadline: float) -> Meeting:
    """Waits for worker 0's address. `deadline` is on time.monotonic(); raises HerringTimeoutError."""
    key = store_key(generation)
    remaining = max(deadline - time.monotonic(), 0.001)
    wait = getattr(store, "wait", None)
    try:
        if wait is not None:
            wait([key], timedelta(seconds=remaining))
        value = store.get(key)
    except Exception as error:
        raise HerringTimeoutError(
            f"worker 0 did not publish its hub in the store within {remaining:.0f} s (key {key}): {error}"
        ) from error
    return Meeting.from_text(value.decode() if isinstance(value, bytes) else str(value))
