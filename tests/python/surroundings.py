"""What a process of a test finds around it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import herring

LAUNCHER_PREFIXES = ("HERRING_", "OMPI_", "PMI_", "PMIX_", "MASTER_", "SLURM", "TORCHELASTIC_", "PET_", "SM_")
LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "JOB_COMPLETION_INDEX",
    "VC_TASK_INDEX",
    "TF_CONFIG",
)


def is_installed(package: str) -> bool:
    """Without importing it. Where tests/ is on sys.path, as in a run of all tests, tests/torch and tests/tensorflow are
    found under the packages' names: as a spec without a file."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def clean_environment() -> dict[str, str]:
    """The environment without what a launcher or a user has set for Herring."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    # The children import the same herring as this process, installed or not.
    env["PYTHONPATH"] = str(Path(herring.__file__).resolve().parents[1])
    env["OMP_NUM_THREADS"] = "1"
    return env


def server_pids() -> dict[int, int]:
    """The servers that this process's launcher has started, by rank."""
    pids = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            words = (status.parent / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # It has ended meanwhile.
        if parent == os.getppid() and b"server" in words and b"--rank" in words:
            pids[int(words[words.index(b"--rank") + 1])] = int(status.parent.name)
    return pids
