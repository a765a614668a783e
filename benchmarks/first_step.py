#!/usr/bin/env python3
"""Measures how long a job takes from its start command to the end of its first training step: Herring beside gloo.

  benchmarks/first_step.py launch --rounds 5 -- srun --nodes=2 --ntasks-per-node=2
  benchmarks/first_step.py slurm --rounds 5      (the cluster of make test-slurm: four emulated hosts; root)
  build/ray/bin/python benchmarks/first_step.py ray --rounds 5      (the environment of make test-ray)

Both train the same script with torch's DistributedDataParallel; the backend alone differs. They take turns, after one
start of each that is not counted. `launch` and `slurm` stop the clock when rank 0's line arrives here; `ray` when
rank 0 notes the time, so that its workers have to be on this machine. Prints each start and the medians, in seconds:
from the start to the first line of the script, then imports, init_process_group, and model and first step.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MARK = "@@first_step "
PARTS = ("start", "imports", "init", "step")
ROOT = Path(__file__).resolve().parents[1]


def train(backend: str, began: float) -> dict[str, float]:
    """The script: one step. Returns the wall clock at the end of each part; `began` is that at its first line."""
    if backend == "gloo" and "SLURM_PROCID" in os.environ:
        gloo_under_srun()
    import torch
    import torch.distributed as dist

    if backend == "herring":
        importlib.import_module("herring.torch")
    imported = time.time()
    if not dist.is_initialized():  # Ray has done it.
        dist.init_process_group(backend)
    joined = time.time()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    return {"start": began, "imports": imported, "init": joined, "step": time.time()}


def gloo_under_srun() -> None:
    """What a script for gloo has to do by itself there."""
    env = os.environ
    nodes = ["scontrol", "show", "hostnames", env["SLURM_STEP_NODELIST"]]
    first = subprocess.run(nodes, capture_output=True, text=True, check=True).stdout.split()[0]
    port = 20000 + (int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 10000
    env.update(RANK=env["SLURM_PROCID"], WORLD_SIZE=env["SLURM_NTASKS"], LOCAL_RANK=env["SLURM_LOCALID"])
    env.update(MASTER_ADDR=first, MASTER_PORT=str(port))


def run_rank(backend: str) -> None:
    """One process of a job; rank 0 prints when its parts ended."""
    ends = train(backend, time.time())
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(MARK + json.dumps(ends), flush=True)
    dist.destroy_process_group()


def timed_launch(launcher: list[str], backend: str, env: dict[str, str]) -> list[float]:
    """One job: seconds of each part, and of the whole until rank 0's line arrived here."""
    command = [*launcher, sys.executable, str(Path(__file__).resolve()), "rank", backend]
    begun, clock = time.monotonic(), time.time()
    with subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        seconds: list[float] = []
        for line in job.stdout:
            if MARK in line:
                whole = time.monotonic() - begun
                seconds = [*parts(clock, json.loads(line.partition(MARK)[2])), whole]
    if job.returncode != 0 or not seconds:
        sys.exit(f"first_step: {' '.join(command)} ended with {job.returncode}, and rank 0 said nothing")
    return seconds


def parts(clock: float, ends: dict[str, float]) -> list[float]:
    """Seconds of each part of a job that was started at `clock`."""
    marks = [clock, *(ends[name] for name in PARTS)]
    return [after - before for before, after in itertools.pairwise(marks)]


def report(rounds: int, names: list[str], start: Any) -> None:
    """Calls `start(name)` in turns; prints its seconds and their medians."""
    print(f"{'':10} {'':12} " + "".join(f"{part:>9}" for part in (*PARTS, "whole")))
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            seconds = start(name)
            show("warm-up" if turn == 0 else f"start {turn}", name, seconds)
            if turn > 0:
                found[name].append(seconds)
    for name, all_seconds in found.items():
        show("median", name, [statistics.median(each) for each in zip(*all_seconds, strict=True)])


def show(what: str, name: str, seconds: Iterable[float]) -> None:
    print(f"{what:10} {name:12} " + "".join(f"{each:9.2f}" for each in seconds), flush=True)


def run_slurm(rounds: int) -> None:
    """Under a real Slurm on emulated hosts, as tests/slurm plays it: 2 nodes of 2 tasks, no server processes."""
    sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests" / "python")]
    import conftest
    import emulated

    with tempfile.TemporaryDirectory(prefix="herring-slurm-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)
        made = emulated.made(len(conftest.NODES), folder)
        hosts = next(made)
        stack.callback(lambda: next(made, None))
        cluster = conftest.Cluster(hosts, folder)
        stack.callback(cluster.stop)
        cluster.start()
        env = {**cluster.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        srun = ["srun", "--nodes=2", "--ntasks-per-node=2"]
        report(rounds, ["herring", "gloo"], lambda backend: timed_launch(srun, backend, env))


def ray_loop(config: dict[str, str]) -> None:
    """What each of Ray's workers runs."""
    ends = train(config["backend"], time.time())
    import torch.distributed as dist

    if dist.get_rank() == 0:
        Path(config["file"]).write_text(json.dumps(ends))


def run_ray(rounds: int) -> None:
    """A Ray cluster of this machine; init_process_group is Ray's, before the script's first line."""
    import ray
    from ray import cloudpickle
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from herring.ray import HerringConfig

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers do not find this file.
    configs = {"herring": HerringConfig(), "gloo": TorchConfig(backend="gloo"), "2 servers": HerringConfig(servers=2)}
    ray.init(num_cpus=5, include_dashboard=False, object_store_memory=80 << 20, _node_ip_address="127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="herring-ray-") as folder:

        def start(name: str) -> list[float]:
            file = Path(folder, "ends.json")
            given = {"backend": "gloo" if name == "gloo" else "herring", "file": str(file)}
            trainer = TorchTrainer(
                ray_loop,
                train_loop_config=given,
                torch_config=configs[name],
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(storage_path=folder),
            )
            clock = time.time()
            trainer.fit()
            ends = json.loads(file.read_text())
            return [*parts(clock, ends), ends["step"] - clock]

        try:
            report(rounds, list(configs), start)
        finally:
            ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("launch", "any launcher"), ("slurm", "a Slurm on emulated hosts"), ("ray", "Ray Train")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--rounds", type=int, default=5, help="counted starts of each backend (default 5)")
        if name == "launch":
            command.add_argument("launcher", nargs="+", help="the launcher and its options, after --")
    commands.add_parser("rank").add_argument("backend", choices=["herring", "gloo"])
    args = parser.parse_args()
    if args.command == "rank":
        run_rank(args.backend)
    elif args.command == "slurm":
        run_slurm(args.rounds)
    elif args.command == "ray":
        run_ray(args.rounds)
    else:
        env = dict(os.environ)
        report(args.rounds, ["herring", "gloo"], lambda backend: timed_launch(args.launcher, backend, env))


if __name__ == "__main__":
    main()
