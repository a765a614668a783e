"""The command line of `herring bench`."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from herring._errors import InvalidArgumentError
from herring.bench._units import MAX_BYTES, MIN_BYTES, geometric_sizes, parse_rate, parse_size

PEERS = ("gloo", "mpi", "mpich", "nccl", "tcp")
DEVICE_PEERS = ("gloo", "nccl")
DEVICES = ("cpu", "cuda")
MEMORIES = ("arena", "private")
# Of herring.bench._pattern, repeated here because parsing must not need numpy.
DTYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
OPS = ("sum", "average", "min", "max", "product", "band", "bor", "bxor")

DESCRIPTION = """\
Measures allreduce as nccl-tests do. --peers measures other libraries in the same run. Results are checked on every rank
before and after timing. Start it with herringrun, mpirun, torchrun, or by hand with RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT.
"""
EPILOG = """\
examples:
  herringrun -np 4 herring bench allreduce --sizes 64KB,25MB --iters 7 --peers gloo,mpi
  mpirun -n 4 herring bench allreduce --min 8 --max 1GB --factor 4 --json out.json
  herringrun -np 4 herring bench replay --model resnet50,bert-large --scale 0.1 --backward-for gloo=50% --peers gloo
  herring bench --compare old.json new.json --threshold 10
  herring bench --plot out.json --out plots

docs/benchmarks.md says how things are measured, and what the columns mean.
"""


@dataclass(frozen=True)
class Options:
    """What to measure, checked."""

    sizes: tuple[int, ...]
    iterations: int
    warmup: int
    turn: int
    lead_in: int | None
    dtype: str
    op: str
    in_place: tuple[bool, ...]
    device: str
    memories: tuple[str, ...]
    peers: tuple[str, ...]
    mpi_arguments: tuple[str, ...]
    rate: float | None
    server_hosts: int | None
    profile: bool
    json_file: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything after `herring bench`."""
    parser.add_argument("collective", nargs="?", choices=["allreduce", "replay"], help="what to measure")
    sizes = parser.add_argument_group("sizes (a KB is 1024 bytes; from 8 bytes to 1GB)")
    sizes.add_argument("--sizes", metavar="LIST", help="sizes such as 64KB,25MB; replaces --min, --max and --factor")
    sizes.add_argument("--min", default="8", metavar="SIZE", help="smallest size (default 8)")
    sizes.add_argument("--max", default="64MB", metavar="SIZE", help="largest size (default 64MB)")
    sizes.add_argument(
        "--factor", type=float, default=8.0, help="each size is the size before times this factor (default 8)"
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument("--dtype", default="float32", choices=DTYPES, help="element type (default float32)")
    what.add_argument("--op", default="sum", choices=OPS, help="how elements are combined (default sum)")
    what.add_argument(
        "--in-place", default="yes", choices=["yes", "no", "both"], help="the result replaces the input (default yes)"
    )
    what.add_argument(
        "--device",
        default="cpu",
        choices=DEVICES,
        help="cuda: tensors on GPUs, through torch.distributed; needs torch and a GPU on each host (default cpu)",
    )
    what.add_argument(
        "--buffers",
        metavar="LIST",
        help="arena: Herring's memory (herring.empty), which is not copied; private: ordinary memory (default "
        "arena,private; not with --device cuda)",
    )
    what.add_argument(
        "--peers",
        default="",
        metavar="LIST",
        help="also measure these, in the same run: gloo, mpi (Open MPI), mpich, tcp (plain TCP streams that move the "
        "bytes of a ring and sum nothing, as a bound); with --device cuda: gloo, nccl",
    )
    what.add_argument(
        "--mpi-args", default="", metavar="TEXT", help="more arguments for the MPI launcher, such as '--mca pml ob1'"
    )
    how = parser.add_argument_group("how often")
    how.add_argument("--iters", type=int, default=20, metavar="N", help="timed iterations (default 20)")
    how.add_argument("--warmup", type=int, default=3, metavar="N", help="iterations before that, not timed (default 3)")
    how.add_argument(
        "--turn",
        type=int,
        default=0,
        metavar="N",
        help="Herring and the peers take turns, each with N iterations (default: 1 from 1MB, up to 50 below)",
    )
    how.add_argument(
        "--lead-in",
        type=int,
        metavar="N",
        help="iterations at the start of each turn that are not timed (default: 50 ms of them, below 1MB at least 20)",
    )
    how.add_argument(
        "--profile",
        action="store_true",
        help="also count system calls and sleeps of each operation (needs root and Linux tracepoints; slightly slower)",
    )
    bound = parser.add_argument_group("the bound t*")
    bound.add_argument(
        "--rate", help="rate of each host's link, such as 500mbit (default: that of the emulated cluster, if any)"
    )
    bound.add_argument(
        "--server-hosts", type=int, metavar="K", help="number of hosts that only run servers (default: detected)"
    )
    _add_results(parser.add_argument_group("results"))


def _add_results(results: argparse._ArgumentGroup) -> None:
    results.add_argument("--json", metavar="FILE", help="also write all results to FILE")
    results.add_argument(
        "--compare", nargs=2, metavar=("OLD", "NEW"), help="compare two files of --json; exit status 1 if NEW is worse"
    )
    results.add_argument(
        "--threshold",
        type=float,
        default=10.0,
        metavar="PERCENT",
        help="--compare: a result that is worse by at most this counts as equal (default 10)",
    )
    results.add_argument(
        "--plot", nargs="+", metavar="FILE", help="draw pictures of files of --json (needs matplotlib)"
    )
    results.add_argument(
        "--out", default=".", metavar="DIR", help="--plot: folder for the pictures (default: this one)"
    )


def _list(text: str, allowed: tuple[str, ...], option: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in allowed:
            raise InvalidArgumentError(f"{option}: {name!r} is not one of {', '.join(allowed)}")
    if len(set(names)) != len(names):
        raise InvalidArgumentError(f"{option}: {text!r} names something twice")
    return names


def _memories(text: str | None, device: str) -> tuple[str, ...]:
    if device != "cpu":
        if text is not None:
            raise InvalidArgumentError(
                f"--buffers {text}: with --device {device} all tensors are on GPUs; leave it out"
            )
        return ()
    memories = _list(",".join(MEMORIES) if text is None else text, MEMORIES, "--buffers")
    if not memories:
        raise InvalidArgumentError("--buffers: name arena, private or both")
    return memories


def read_options(args: argparse.Namespace) -> Options:
    """Checks what argparse does not. Raises InvalidArgumentError that names the option."""
    if args.sizes is not None:
        sizes = [parse_size(text) for text in args.sizes.split(",") if text.strip()]
        if not sizes:
            raise InvalidArgumentError("--sizes: no size given; for example: --sizes 64KB,25MB")
    else:
        sizes = geometric_sizes(parse_size(args.min), parse_size(args.max), args.factor)
    for name, value, least in (("--iters", args.iters, 1), ("--warmup", args.warmup, 0), ("--turn", args.turn, 0)):
        if value < least:
            raise InvalidArgumentError(f"{name} {value}: at least {least} is needed")
    if args.lead_in is not None and args.lead_in < 0:
        raise InvalidArgumentError(f"--lead-in {args.lead_in}: it must be a number of iterations, 0 or more")
    if args.server_hosts is not None and args.server_hosts < 0:
        raise InvalidArgumentError(f"--server-hosts {args.server_hosts}: it must be a number of hosts, 0 or more")
    if args.dtype.startswith("float") and args.op in ("band", "bor", "bxor"):
        raise InvalidArgumentError(f"--op {args.op} is for integers, not {args.dtype}")
    peers = _list(args.peers, PEERS, "--peers")
    for peer in peers:
        if args.device == "cuda" and peer not in DEVICE_PEERS:
            raise InvalidArgumentError(f"--peers {peer}: with --device cuda only {' and '.join(DEVICE_PEERS)} work")
    if args.device == "cpu" and "nccl" in peers:
        raise InvalidArgumentError("--peers nccl: NCCL reduces tensors on GPUs: add --device cuda")
    assert MIN_BYTES <= min(sizes) <= max(sizes) <= MAX_BYTES
    return Options(
        sizes=tuple(sizes),
        iterations=args.iters,
        warmup=args.warmup,
        turn=args.turn,
        lead_in=args.lead_in,
        dtype=args.dtype,
        op=args.op,
        in_place={"yes": (True,), "no": (False,), "both": (False, True)}[args.in_place],
        device=args.device,
        memories=_memories(args.buffers, args.device),
        peers=peers,
        mpi_arguments=tuple(shlex.split(args.mpi_args)),
        rate=None if args.rate is None else parse_rate(args.rate),
        server_hosts=args.server_hosts,
        profile=args.profile,
        json_file=args.json,
    )
