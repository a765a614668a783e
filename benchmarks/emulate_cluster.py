#!/usr/bin/env python3
"""Runs a command on an emulated cluster: several hosts with links of a given rate, on this one machine.

  benchmarks/emulate_cluster.py --workers 8 --servers 8 --rate 500mbit -- herring bench allreduce --sizes 25MB

Every host is a network, UTS, IPC and mount namespace of its own, with its own /dev/shm (where TMPDIR points), joined by
a virtual Ethernet pair to a bridge; a token bucket holds the rate in both directions. Worker hosts run the command with
torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and HERRING_SERVERS;
server hosts run `herring server`. Needs root and iproute2.
All of it lives in one process namespace and nothing has a name outside: when this program ends, however it ends, the
kernel ends every process in there and takes the rest down.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from herring._own_python import main_command

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_REC, MS_PRIVATE = 0x4000, 1 << 18
PR_SET_PDEATHSIG = 1
MASTER_PORT = 29500
DEFAULT_CONGESTION = "cubic"
STOP_GRACE_S = 5.0
FAILURE_GRACE_S = 10.0
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

libc = ctypes.CDLL(None, use_errno=True)


class EmulationError(Exception):
    """Something the person at the keyboard can change; printed without a traceback."""


@dataclass
class Host:
    """One emulated host; `pid` holds its namespaces open, `ready` tells it that its link is there."""

    name: str
    address: str
    pid: int
    control: int


def check(result: int, what: str) -> None:
    if result != 0:
        raise EmulationError(f"{what}: {os.strerror(ctypes.get_errno())}")


def isolate(flags: int) -> None:
    check(libc.unshare(flags), "unshare (root is needed)")
    check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private (this fails in a chroot)")


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulationError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def shape(device: str, rate: str, burst_kb: int, queue_kb: int) -> None:
    command = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", f"{burst_kb}kb"]
    done = subprocess.run([*command, "limit", f"{queue_kb}kb"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulationError(f"tc (rate {rate}): {done.stderr.strip()}")


def bytes_out(device: str) -> int:
    """What the bridge sent towards the host. (/sys still shows the machine's own network, hence ip.)"""
    shown = subprocess.run(["ip", "-s", "-j", "link", "show", device], capture_output=True, text=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def dropped(device: str) -> int:
    """Packets that found the queue towards the host full."""
    shown = subprocess.run(
        ["tc", "-s", "-j", "qdisc", "show", "dev", device], capture_output=True, text=True, check=True
    )
    return sum(int(queue.get("drops", 0)) for queue in json.loads(shown.stdout))


def host_main(name: str, control: int) -> None:
    """In the child: own namespaces, then serve commands from the parent until it goes away."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    isolate(CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNS)
    check(libc.sethostname(name.encode(), len(name)), "sethostname")
    check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None), "mounting the host's own /dev/shm")
    os.write(control, b"1")
    while os.read(control, 1):  # The parent holds the other end: its death ends this process too.
        pass


def cores_of_hosts(count: int) -> list[set[int]]:
    """This machine's cores, shared out evenly; where they are fewer than the hosts, several hosts have the same one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < count:
        return [{cores[number % len(cores)]} for number in range(count)]
    return [set(cores[number::count]) for number in range(count)]


def start_host(name: str, address: str, cores: set[int]) -> Host:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.sched_setaffinity(0, cores)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            ours.close()
            host_main(name, theirs.fileno())
            code = 0
        except EmulationError as error:
            print(f"emulate_cluster: {name}: {error}", file=sys.stderr)
        finally:
            os._exit(code)
    theirs.close()
    if os.read(ours.fileno(), 1) != b"1":
        raise EmulationError(f"host {name} did not start")
    return Host(name, address, pid, ours.detach())


@dataclass(frozen=True)
class Link:
    """What joins each host to the switch: rate as tc writes it, "none" for unlimited; TCP's congestion control on the
    host, none for this machine's."""

    rate: str = "none"
    burst_kb: int = 256
    queue_kb: int = 4096
    congestion: str | None = None


def choose_congestion_control(wanted: str | None) -> str:
    """A name that this kernel has."""
    setting = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    offered = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    if wanted is None:
        return DEFAULT_CONGESTION if DEFAULT_CONGESTION in offered else setting
    if wanted not in ("host", *offered):
        raise EmulationError(f"--congestion {wanted}: this kernel has {', '.join(offered)} (host: leave it as it is)")
    return setting if wanted == "host" else wanted


def port_of(index: int, number: int) -> str:
    """The switch's end of a host's link."""
    return f"port{index}" if number == 0 else f"port{index}-{number}"


def connect(host: Host, index: int, link: Link, number: int = 0) -> None:
    """Link eth<number>, each number with a network of its own."""
    outside, inside, device = port_of(index, number), f"link{index}", f"eth{number}"
    network, address = address_of(0, number).rsplit(".", 2)[0], address_of(index, number)
    ip("link", "add", outside, "type", "veth", "peer", "name", inside)
    ip("link", "set", inside, "netns", str(host.pid))
    ip("link", "set", outside, "master", f"switch{number}", "up")
    within = ["nsenter", "-t", str(host.pid), "-n"]
    for command in (
        ["ip", "link", "set", inside, "name", device],
        ["ip", "addr", "add", f"{address}/16", "dev", device],
        ["ip", "link", "set", device, "up"],
        ["ip", "link", "set", "lo", "up"],
    ):
        subprocess.run([*within, *command], check=True)
    if link.congestion is not None:
        # By the route: a namespace's sysctl takes only what the machine allows to everybody.
        route = ["ip", "route", "change", f"{network}.0.0/16", "dev", device, "proto", "kernel", "scope", "link"]
        subprocess.run([*within, *route, "src", address, "congctl", link.congestion], check=True)
    if link.rate != "none":
        shape(outside, link.rate, link.burst_kb, link.queue_kb)
        tbf = ["tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", link.rate]
        subprocess.run([*within, *tbf, "burst", f"{link.burst_kb}kb", "limit", f"{link.queue_kb}kb"], check=True)


def enter(host: Host, command: list[str]) -> list[str]:
    # Entering a mount namespace leaves one in /. (nsenter's --wd would be the folder as the old namespace has it.)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(host.pid))))
    within = ["taskset", "-c", cores, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *command]
    return ["nsenter", "-t", str(host.pid), "-n", "-u", "-i", "-m", *within]


def environment(args: argparse.Namespace, hosts: list[Host]) -> dict[str, str]:
    workers = hosts[: args.workers]
    description = {
        "worker_hosts": args.workers,
        "server_hosts": args.servers,
        "rate": args.rate,
        "links": args.links,
        "burst_bytes": args.burst_kb << 10,
        "congestion_control": args.congestion,
        "worker_addresses": [host.address for host in workers],
        "launch_agent": str(Path(__file__).resolve().with_name("enter_host.sh")),
    }
    env = dict(os.environ)
    # The programs installed beside the Python that runs this (herring) are found without activating its environment.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    env.update(
        MASTER_ADDR=workers[0].address,
        MASTER_PORT=str(MASTER_PORT),
        WORLD_SIZE=str(args.workers * args.ranks_per_host),
        HERRING_SERVERS=str(args.servers),
        HERRING_INTERFACE=",".join(f"eth{number}" for number in range(args.links)),
        GLOO_SOCKET_IFNAME="eth0",
        TMPDIR="/dev/shm",
        EMULATED_CLUSTER=json.dumps(description),
        EMULATED_HOSTS=" ".join(f"{host.address}={host.pid}" for host in hosts),
    )
    env.setdefault("HERRING_SECRET", secrets.token_hex(16))
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # emulated hosts have no name service, of which c10d warns at length
    return env


def start_everything(args: argparse.Namespace, hosts: list[Host]) -> list[tuple[str, subprocess.Popen[bytes]]]:
    workers, servers = hosts[: args.workers], hosts[args.workers :]
    env = environment(args, hosts)
    processes = []
    for number, host in enumerate(workers):
        for local in range(args.ranks_per_host):
            rank = number * args.ranks_per_host + local
            own = dict(env, RANK=str(rank), LOCAL_RANK=str(local), LOCAL_WORLD_SIZE=str(args.ranks_per_host))
            started = subprocess.Popen(enter(host, args.command), env=own, start_new_session=True)
            processes.append((f"rank {rank} on {host.name}", started))
    for number, host in enumerate(servers):
        # Not found in the current folder, where Herring's source may be.
        command = [*main_command(sys.executable, "herring._cli"), "server", "--rank", str(number)]
        if not args.verbose:
            command.append("--quiet")
        processes.append((f"server {number}", subprocess.Popen(enter(host, command), env=env, start_new_session=True)))
    return processes


def end(processes: list[tuple[str, subprocess.Popen[bytes]]]) -> None:
    for number, seconds in ((signal.SIGTERM, STOP_GRACE_S), (signal.SIGKILL, STOP_GRACE_S)):
        for _, process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for _, process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def watch(processes: list[tuple[str, subprocess.Popen[bytes]]], timeout: float) -> int:
    deadline, failed = time.monotonic() + timeout, 0
    while True:
        codes = [process.poll() for _, process in processes]
        for (name, _), code in zip(processes, codes, strict=True):
            if code not in (None, 0) and not failed:
                failed = code if code > 0 else 128 - code
                print(f"emulate_cluster: {name} ended with exit code {code}", file=sys.stderr)
                deadline = min(deadline, time.monotonic() + FAILURE_GRACE_S)
        if None not in codes:
            return failed
        if time.monotonic() > deadline:
            if not failed:
                print(f"emulate_cluster: not finished after {timeout:.0f} s; stopping", file=sys.stderr)
            end(processes)
            return failed or 124
        time.sleep(0.05)


class Stopped(Exception):
    """A signal asked us to end."""


def on_signal(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def make_switches(count: int) -> None:
    """One for each link of a host, because a host answers for all its addresses on any of its links.

    In the first process of the cluster's own process namespace; then hosts can be connected.
    """
    isolate(CLONE_NEWNET | CLONE_NEWNS)
    check(libc.mount(b"proc", b"/proc", b"proc", 0, None), "mounting /proc")
    for number in range(count):
        ip("link", "add", f"switch{number}", "type", "bridge")
        ip("link", "set", f"switch{number}", "up")
    ip("link", "set", "lo", "up")


def address_of(index: int, number: int = 0) -> str:
    return f"10.{77 + number}.{index // 250}.{index % 250 + 1}"


def end_host(host: Host) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(host.pid, signal.SIGKILL)
        os.waitpid(host.pid, 0)


def run(args: argparse.Namespace) -> int:
    """As the first process of the cluster's own process namespace."""
    make_switches(args.links)
    args.congestion = choose_congestion_control(args.congestion)
    link = Link(args.rate, args.burst_kb, args.queue_kb, args.congestion)
    hosts: list[Host] = []
    processes: list[tuple[str, subprocess.Popen[bytes]]] = []
    try:
        count = args.workers + args.servers
        shared = [os.sched_getaffinity(0)] * count
        for index, cores in enumerate(cores_of_hosts(count) if args.own_cores else shared):
            kind = f"worker{index}" if index < args.workers else f"server{index - args.workers}"
            host = start_host(kind, address_of(index), cores)
            hosts.append(host)
            for number in range(args.links):
                connect(host, index, link, number)
        processes = start_everything(args, hosts)
        code = watch(processes, args.timeout)
        if args.verbose:
            for index, host in enumerate(hosts):
                for number in range(args.links):
                    port = port_of(index, number)
                    arrived = f"{bytes_out(port) / 1e6:.2f} MB arrived, {dropped(port)} packets dropped on the way"
                    link_name = f" (eth{number})" if args.links > 1 else ""
                    print(f"emulate_cluster: {host.name}{link_name}: {arrived}", file=sys.stderr)
        return code
    except Stopped as stopped:
        print("emulate_cluster: stopping", file=sys.stderr)
        return 128 + int(stopped.args[0])
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if any(process.poll() is None for _, process in processes):
            end(processes)
        for host in hosts:
            end_host(host)


def run_enclosed(body: Callable[[], int]) -> int:
    """`body` in a process namespace; the first process there dies with this one, and all others with that."""
    check(libc.unshare(CLONE_NEWPID), "unshare (root is needed)")
    first = os.fork()
    if first == 0:
        code = 1
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            code = body()
        except Stopped as stopped:
            code = 128 + int(stopped.args[0])
        except EmulationError as error:
            print(f"emulate_cluster: {error}", file=sys.stderr)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def forward(number: int, frame: FrameType | None) -> None:
        os.kill(first, number)

    for number in SIGNALS:
        signal.signal(number, forward)
    _, status = os.waitpid(first, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, required=True, help="worker hosts")
    parser.add_argument(
        "--servers",
        type=int,
        default=0,
        help="server hosts, which run no workers (default 0: servers are inside the workers)",
    )
    parser.add_argument("--ranks-per-host", type=int, default=1, help="workers on each worker host (default 1)")
    parser.add_argument(
        "--links", type=int, default=1, help="links of each host, each of that rate: eth0, eth1, ... (default 1)"
    )
    parser.add_argument(
        "--rate", default="500mbit", help="rate of each link, both ways, as tc writes it; none: unlimited"
    )
    parser.add_argument(
        "--burst-kb",
        type=int,
        default=256,
        help="token bucket size; less than a millisecond of link starves it (default 256)",
    )
    parser.add_argument("--queue-kb", type=int, default=4096, help="what a link queues before it drops (default 4096)")
    parser.add_argument(
        "--congestion",
        metavar="NAME",
        help="TCP's congestion control on all hosts; host: this machine's (default cubic, which is Linux's)",
    )
    parser.add_argument(
        "--own-cores",
        action="store_true",
        help="bind each host to cores of its own, as real hosts have; without this all hosts share all cores",
    )
    parser.add_argument("--timeout", type=float, default=1200, help="seconds after which everything is stopped")
    parser.add_argument("--verbose", action="store_true", help="print what the servers did and what crossed each link")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command that every worker runs, after --")
    args = parser.parse_args()
    args.command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not args.command:
        parser.error("no command given; put it after --")
    if args.workers < 1 or args.servers < 0 or args.ranks_per_host < 1 or args.links < 1:
        parser.error("at least one worker host, one rank per host and one link are needed")
    if os.geteuid() != 0:
        print('emulate_cluster: needs root (network namespaces); run it with sudo env PATH="$PATH"', file=sys.stderr)
        return 1
    for tool in ("ip", "tc", "nsenter"):
        if shutil.which(tool) is None:
            print(f"emulate_cluster: {tool} is missing: apt-get install iproute2 util-linux", file=sys.stderr)
            return 1
    for number in SIGNALS:
        signal.signal(number, on_signal)
    try:
        return run_enclosed(lambda: run(args))
    except EmulationError as error:
        print(f"emulate_cluster: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
