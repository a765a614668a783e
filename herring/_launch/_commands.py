"""How each process of a job is started: its command line and its environment."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from dataclasses import dataclass

__all__ = ["Command", "commands_of"]


@dataclass(frozen=True)
class Command:
    """A program with its arguments, and the whole environment that it gets."""

    arguments: list[str]
    environment: dict[str, str]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return int(port)


def _has_rendezvous(args: argparse.Namespace) -> bool:
    return bool(args.elastic or args.restart_servers)


def _environments(args: argparse.Namespace, extra: dict[str, str]) -> tuple[list[dict[str, str]], dict[str, str]]:
    base = dict(os.environ)
    base.update(extra)
    base["MASTER_ADDR"] = "127.0.0.1"
    base["MASTER_PORT"] = str(_free_port())
    base["WORLD_SIZE"] = str(args.num_proc)
    base["HERRING_SERVERS"] = str(args.servers)
    base["HERRING_HUB"] = f"127.0.0.1:{_free_port()}"
    if _has_rendezvous(args):
        base["HERRING_RENDEZVOUS"] = f"127.0.0.1:{_free_port()}"
        base["HERRING_ELASTIC"] = "on" if args.elastic else "off"
    else:
        base.pop("HERRING_RENDEZVOUS", None)  # Of another job.
    base.setdefault("HERRING_SECRET", secrets.token_hex(16))
    # What a rank prints comes through a pipe, and should come when it is printed.
    base.setdefault("PYTHONUNBUFFERED", "1")
    cores = len(os.sched_getaffinity(0))
    base.setdefault("OMP_NUM_THREADS", str(max(1, cores // args.num_proc)))
    workers = []
    for rank in range(args.num_proc):
        env = dict(base, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(args.num_proc))
        workers.append(env)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        base.pop(name, None)
    return workers, base


def commands_of(args: argparse.Namespace, extra: dict[str, str]) -> dict[str, Command]:
    """Of each process, by its name, in the order in which they are started."""
    worker_envs, server_env = _environments(args, extra)
    herring = [sys.executable, "-m", "herring._cli"]
    commands: dict[str, Command] = {}
    if _has_rendezvous(args):
        sizes = ["--workers", str(args.num_proc), "--servers", str(args.servers)]
        least = ["--min-workers", str(args.min_workers)]
        commands["rendezvous"] = Command([*herring, "rendezvous", *sizes, *least], server_env)
    for rank, env in enumerate(worker_envs):
        commands[f"rank {rank}"] = Command(args.command, env)
    for index in range(args.servers):
        commands[f"server {index}"] = Command([*herring, "server", "--rank", str(index)], server_env)
    return commands
