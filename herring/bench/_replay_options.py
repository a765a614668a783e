"""The command line of `herring bench replay`, beside what it shares with `herring bench allreduce`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass

from herring._errors import InvalidArgumentError
from herring.bench._models import MODELS
from herring.bench._options import Options, read_options
from herring.bench._units import format_size, parse_size

CONTENDERS = ("herring", "gloo")
# Of DistributedDataParallel, whose first bucket is small so that communication starts early, unless told a size.
_BUCKET, _FIRST_BUCKET = 25 << 20, 1 << 20
# Options of `herring bench allreduce` that would go unheeded, with their defaults; and the other way round.
_UNHEEDED = {
    "sizes": None,
    "min": "8",
    "max": "64MB",
    "factor": 8.0,
    "turn": 0,
    "lead_in": None,
    "mpi_args": "",
    "device": "cpu",
    "profile": False,
}
_REPLAY_ONLY = {"model": None, "backward_ms": None, "backward_for": None, "scale": 1.0, "bucket": None}
_TARGET = re.compile(r"(\w+)=(\d+(?:\.\d+)?)%")


@dataclass(frozen=True)
class ReplayOptions:
    """What to replay, checked. Either `backward_s` or `target`: the contender whose efficiency is to be so much."""

    shared: Options
    models: tuple[str, ...]
    scale: float
    bucket_bytes: tuple[int, ...]  # of the first bucket, the second, ..., and of all others
    backward_s: float | None
    target: tuple[str, float] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that only `herring bench replay` takes."""
    group = parser.add_argument_group(
        "replay (the gradients of real models, in the order and the time of a backward pass)"
    )
    group.add_argument("--model", metavar="LIST", help=f"models to replay, of {', '.join(MODELS)}")
    group.add_argument(
        "--backward-ms", type=float, metavar="T", help="milliseconds that each model's backward pass takes"
    )
    group.add_argument(
        "--backward-for",
        metavar="WHO=PERCENT",
        help="instead of --backward-ms: choose the time at which WHO (herring or gloo) has this efficiency, such as "
        "gloo=50%%; it is measured first",
    )
    group.add_argument(
        "--scale", type=float, default=1.0, metavar="X", help="multiply the size of every gradient by X (default 1)"
    )
    group.add_argument(
        "--bucket",
        metavar="LIST",
        help="bucket size, as DDP's bucket_cap_mb. Several sizes: of the first bucket, the second, ..., and all "
        "others, as DDP's bucket_cap_mb_list (default 1MB,25MB, each multiplied by --scale)",
    )


def _refuse(args: argparse.Namespace, defaults: Mapping[str, object], reason: str) -> None:
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise InvalidArgumentError(f"--{name.replace('_', '-')} is {reason}")


def refuse_replay_options(args: argparse.Namespace) -> None:
    """Raises InvalidArgumentError where an allreduce was given what only a replay heeds."""
    _refuse(args, _REPLAY_ONLY, "for herring bench replay")


def _read_target(text: str, shared: Options) -> tuple[str, float]:
    match = _TARGET.fullmatch(text.replace(" ", ""))
    if match is None or not 0 < float(match[2]) < 100:
        raise InvalidArgumentError(f"--backward-for {text!r}: write such as gloo=50%, above 0 % and below 100 %")
    if match[1] not in ("herring", *shared.peers):
        raise InvalidArgumentError(f"--backward-for {text!r}: {match[1]} is not measured; add it to --peers")
    return match[1], float(match[2]) / 100


def read_replay_options(args: argparse.Namespace) -> ReplayOptions:
    """Checks what argparse does not. Raises InvalidArgumentError that names the option."""
    shared = read_options(args)
    _refuse(args, _UNHEEDED, "for allreduce, not for a replay: leave it out")
    if shared.op != "sum" or shared.in_place != (True,):
        raise InvalidArgumentError(
            "a replay sums in place, as DistributedDataParallel does: leave out --op and --in-place"
        )
    if not shared.dtype.startswith("float"):
        raise InvalidArgumentError(f"--dtype {shared.dtype}: gradients are floating point: float16, float32 or float64")
    for peer in shared.peers:
        if peer not in CONTENDERS:
            raise InvalidArgumentError(
                f"--peers {peer}: a replay compares only with gloo, on which DistributedDataParallel runs"
            )
    names = tuple(name.strip() for name in (args.model or "").split(",") if name.strip())
    if not names:
        raise InvalidArgumentError(f"say what to replay: --model {','.join(MODELS)}")
    for name in names:
        if name not in MODELS:
            raise InvalidArgumentError(f"--model: {name!r} is not one of {', '.join(MODELS)}")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"--model: {args.model!r} names something twice")
    if not 0 < args.scale <= 1:
        raise InvalidArgumentError(f"--scale {args.scale:g}: it must be above 0 and at most 1")
    if (args.backward_ms is None) == (args.backward_for is None):
        raise InvalidArgumentError("give one of --backward-ms T and --backward-for gloo=50%")
    if args.backward_ms is not None and not 0 < args.backward_ms < 1e6:
        raise InvalidArgumentError(f"--backward-ms {args.backward_ms:g}: it must be above 0 and below 1,000,000")
    # A model that is X as large in buckets X as large: as many of them, ready at the same points of backward.
    scaled = tuple(max(round(size * args.scale / 1024), 1) * 1024 for size in (_FIRST_BUCKET, _BUCKET))
    given = () if args.bucket is None else tuple(parse_size(size) for size in args.bucket.split(","))
    return ReplayOptions(
        shared=shared,
        models=names,
        scale=args.scale,
        bucket_bytes=given or scaled,
        backward_s=None if args.backward_ms is None else args.backward_ms / 1e3,
        target=None if args.backward_for is None else _read_target(args.backward_for, shared),
    )


def row_name(model: str, scale: float) -> str:
    """ "bert-large", "bert-large x 0.1"."""
    return model if scale == 1 else f"{model} x {scale:g}"


def buckets_text(options: ReplayOptions) -> str:
    """ "25MB buckets, the first of 1MB"; "25MB buckets, the first of 1MB, 2MB, 4MB"."""
    *first, others = (format_size(size) for size in options.bucket_bytes)
    return f"{others} buckets" + (f", the first of {', '.join(first)}" if first else "")
