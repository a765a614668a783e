"""MPICH, where .ci/setup has installed it: beside Open MPI, whose mpirun has to stay the first on PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_MPICH = Path(sys.prefix, "mpich", "bin")
if _MPICH.is_dir():
    os.environ["PATH"] = os.pathsep.join(filter(None, [os.environ.get("PATH", ""), str(_MPICH)]))
