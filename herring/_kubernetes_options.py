"""`herring kubernetes`: its command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from herring._errors import InvalidArgumentError
from herring.kubernetes import KINDS, Job, render, to_yaml

__all__ = ["add_command", "run", "split"]

DESCRIPTION = (
    "Prints manifests for a job of W workers and K servers. Nothing is sent to a cluster. Create the Secret with the "
    "job's secret before the job (docs/kubernetes.md)."
)
USAGE = "herring kubernetes KIND --name NAME --image IMAGE --workers W [options] -- command ..."
EPILOG = """\
examples:
  herring kubernetes jobset --name train --image registry/train:1 --workers 4 --servers 2 \\
      -- python train.py | kubectl apply -f -
  herring kubernetes jobset --name train --image registry/train:1 --workers 2 --gpus 8 --processes 8 \\
      --worker-resource memory=512Gi -- python train.py
  herring kubernetes kubeflow --name train --image registry/train:1 --workers 4 --servers 2 -- python train.py
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """To those of `herring`."""
    parser = commands.add_parser(
        "kubernetes",
        help="print manifests for Kubernetes: JobSet, Kubeflow Trainer, Volcano",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser.add_argument)


def _add_arguments(add: Callable[..., object]) -> None:
    add("kind", choices=KINDS, help="jobset; kubeflow: a ClusterTrainingRuntime and a TrainJob of Trainer v2; volcano")
    add("--name", required=True, help="the job's name; the pods' names begin with it")
    add("--image", required=True, help="image of all pods, with Herring and the training script in it")
    add("--workers", type=int, required=True, metavar="W", help="pods that train")
    add("--servers", type=int, default=0, metavar="K", help="pods that run servers (default 0: inside the workers)")
    add("--processes", type=int, default=1, metavar="P", help="worker processes in each pod (default 1)")
    add("--gpus", type=int, default=0, metavar="G", help="GPUs (nvidia.com/gpu) of each worker's pod (default 0)")
    for role in ("worker", "server"):
        text = f"a resource that a {role}'s pod asks for, such as cpu=8 or memory=64Gi (repeatable)"
        add(f"--{role}-resource", action="append", default=[], metavar="NAME=AMOUNT", help=text)
        text = f"a label of the nodes that {role}s run on (repeatable)"
        add(f"--{role}-node", action="append", default=[], metavar="LABEL=VALUE", help=text)
    add("-x", "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable for all pods (repeatable)")
    add("--namespace", default="", help="the namespace in the manifest (default: none, so kubectl chooses)")
    add("--secret", default="", metavar="NAME", help="the Secret (default NAME-secret; kubeflow: RUNTIME-secret)")
    add("--restarts", type=int, default=3, metavar="R", help="restart a failed job at most R times (default 3)")
    add("--elastic", action="store_true", help="jobset: the job goes on without a lost worker, which is restarted")
    add("--runtime", default="herring", metavar="NAME", help="kubeflow: name of the runtime (default herring)")


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The command line, and what stands behind its --: the workers' command. (argparse mixes them up.)"""
    if argv[:1] != ["kubernetes"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def run(args: argparse.Namespace) -> int:
    """Prints the manifests."""
    job = Job(
        name=args.name,
        image=args.image,
        command=args.worker_command,
        workers=args.workers,
        servers=args.servers,
        processes=args.processes,
        gpus=args.gpus,
        worker_resources=_pairs("--worker-resource", args.worker_resource),
        server_resources=_pairs("--server-resource", args.server_resource),
        worker_nodes=_pairs("--worker-node", args.worker_node),
        server_nodes=_pairs("--server-node", args.server_node),
        env=_pairs("--env", args.env),
        namespace=args.namespace,
        secret=args.secret,
        restarts=args.restarts,
        elastic=args.elastic,
        runtime=args.runtime,
    )
    sys.stdout.write(to_yaml(render(args.kind, job)))
    return 0


def _pairs(option: str, texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise InvalidArgumentError(f"{option} {text}: it must be NAME=VALUE")
        pairs[name] = value
    return pairs
