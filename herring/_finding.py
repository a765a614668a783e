"""What the parts of ``herring doctor`` share: a line of its report, and how to ask."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from herring._own_python import own_command

LOAD_TIMEOUT_S = 60


@dataclass
class Finding:
    """One line of the report. `state` is "ok", "absent" (fine, with a consequence) or "problem"."""

    subject: str
    state: str
    text: str


def package(name: str) -> str | None:
    """The version that is installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def rdma_devices() -> list[str]:
    """Network cards that EFA or verbs use; they want memory pinned."""
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


def run_apart(code: str) -> subprocess.CompletedProcess[str]:
    """Runs it in another process. Raises TimeoutExpired."""
    command = own_command(sys.executable, code)
    return subprocess.run(command, capture_output=True, text=True, timeout=LOAD_TIMEOUT_S, check=False)
