"""mypy is told what comes back: numpy arrays for numpy, lists, numbers and JAX; tensors of torch for torch."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

import herring
import herring._settings as settings_module
from herring import _core
from herring._settings import Settings

# Each line is run, and looked at by mypy: the call, its type, and what the result is an instance of.
CASES = [
    ("herring.allreduce(floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.allreduce([1.0, 2.0])", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.allreduce(1.0, herring.ReduceOp.SUM)", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.allreduce(1.0, name='a', async_op=True)", "herring.Handle[npt.NDArray[Any]]", "herring.Handle"),
    ("herring.allreduce(foreign)", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.allreduce(own_kind)", "OwnKind", "OwnKind"),
    ("herring.allreduce(own_kind, out=floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.allreduce_(floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.broadcast(2)", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.broadcast(own_kind)", "OwnKind", "OwnKind"),
    ("herring.allgather(floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.allgather(foreign, uneven=True)", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.allgather(floats, uneven=True, async_op=True)", "herring.Handle[npt.NDArray[np.float32]]", "object"),
    ("herring.alltoall(foreign)", "npt.NDArray[Any]", "np.ndarray"),
    ("herring.alltoall(floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.alltoall(floats, [4])", "tuple[npt.NDArray[np.float32], list[int]]", "tuple"),
    ("herring.reduce_scatter(floats)", "npt.NDArray[np.float32]", "np.ndarray"),
    ("herring.grouped_allreduce([floats, floats])", "list[npt.NDArray[np.float32]]", "list"),
    ("herring.grouped_allreduce([1.0, [2.0]])", "list[Any]", "list"),
    ("herring.grouped_allreduce_((floats,))", "tuple[npt.NDArray[np.float32]]", "tuple"),
    ("herring.barrier(async_op=True)", "herring.Handle[None]", "herring.Handle"),
]

HEAD = """
from typing import Any
import numpy as np
import numpy.typing as npt
from typing_extensions import assert_type
import herring

class OwnKind:
    def new_empty(self, size: Any) -> "OwnKind":
        return self

class Foreign:
    pass

def look(floats: npt.NDArray[np.float32], own_kind: OwnKind, foreign: Foreign) -> None:
"""


def mypy_of(tmp_path: Path, text: str) -> tuple[int, str]:
    """Its exit status, and what it says."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    file = tmp_path / "look.py"
    file.write_text(text)
    root = Path(herring.__file__).resolve().parents[1]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--cache-dir", str(tmp_path / "c")]
    done = subprocess.run([*command, str(file)], cwd=root, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def test_types(tmp_path: Path) -> None:
    code, said = mypy_of(tmp_path, HEAD + "".join(f"    assert_type({call}, {kind})\n" for call, kind, _ in CASES))
    assert code == 0, said


def test_settings_of_init(tmp_path: Path) -> None:
    """Editors offer them, and a wrong one is seen before the program runs."""
    good = ["rank=0, size=1, timeout=3.5", 'servers=2, chunk_bytes="64KB", timeout_s=5', "failover=True, log=None"]
    wrong = ["serverz=2", 'provider="smoke"', "servers=[2]", "checksum=3.5"]
    lines = [f"herring.init({each})" for each in (*good, *wrong)]
    code, said = mypy_of(tmp_path, "import herring\n" + "\n".join(lines) + "\n")
    assert code == 1
    marked = sorted({int(line.split(":")[1]) for line in said.splitlines() if ": error:" in line})
    assert marked == [len(good) + 2 + index for index in range(len(wrong))], said


def test_settings_have_their_types() -> None:
    """Those of the core, each with the values that it takes."""
    kinds = dict.fromkeys(("count", "bytes", "microseconds"), "int | str")
    kinds |= {"seconds": "float | str", "text": "str", "address": "str"}
    rows = {row["name"].removeprefix("HERRING_").lower(): row for row in _core.config_table()}
    assert list(Settings.__annotations__) == list(rows)
    for name, said in Settings.__annotations__.items():
        row = rows[name]
        if row["type"] in kinds:
            assert said.__forward_arg__ == f"{kinds[row['type']]} | None", name
            continue
        values = re.findall(r"\w+", row["range"].replace(" or ", " "))
        taken = eval(said.__forward_arg__, vars(settings_module))
        literals = [each for kind in get_args(taken) for each in get_args(kind)]
        assert sorted(literals) == sorted(values), name
        assert (bool in get_args(taken)) == ("on" in values), name


def test_what_comes_back(job) -> None:
    job.run(look, 1)


class Foreign:
    """As JAX's arrays on the CPU: DLPack, read-only, and no way to make another."""

    def __init__(self, array):
        self.array = array
        self.shape = array.shape

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OwnKind(Foreign):
    """As torch's."""

    def new_empty(self, size):
        return OwnKind(np.empty(size, self.array.dtype))

    def contiguous(self):
        return self


def look() -> None:
    herring.init()
    floats = np.ones(4, np.float32)
    names = {
        "herring": herring, "np": np, "OwnKind": OwnKind, "floats": floats,
        "foreign": Foreign(floats.copy()), "own_kind": OwnKind(floats.copy()),
    }  # fmt: skip
    for call, kind, wanted in CASES:
        result = eval(call, names)
        assert isinstance(result, eval(wanted, names)), (call, type(result))
        if "np.float32" in kind and isinstance(result, np.ndarray):
            assert result.dtype == np.float32, call
