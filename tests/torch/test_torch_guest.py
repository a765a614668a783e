"""`import torch` on a machine that has Herring, sound or broken, is `import torch`: it works, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from ranks import clean_environment, run_children

import herring
from herring.torch import _build

PACKAGE = Path(herring.__file__).resolve().parent

pytestmark = pytest.mark.skipif(
    not any(point.name == "herring" for point in entry_points(group="torch.backends")),
    reason="Herring is only on the path, not installed: torch does not find its entry point",
)

# Everything of torch.distributed that somebody else could have replaced, and the environment.
STATE = """
import importlib, json, os, sys
before = dict(os.environ)
import torch
import torch.distributed as dist
modules = [importlib.import_module(name) for name in (
    "torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.rendezvous",
    "torch.nn.parallel", "torch.nn.parallel.distributed")]
objects = {f"{m.__name__}.{k}": v for m in modules for k, v in vars(m).items() if callable(v)}
for name in ("DistributedDataParallel",):
    kind = getattr(torch.nn.parallel, name)
    objects |= {f"{name}.{k}": v for k, v in vars(kind).items() if callable(v)}
objects |= {f"handlers.{k}": v for k, v in modules[3]._rendezvous_handlers.items()}
print("@@" + json.dumps({
    "from": {k: str(getattr(getattr(v, "__code__", None), "co_filename", "")) for k, v in sorted(objects.items())},
    "signals": __import__("signal").getsignal(15) == __import__("signal").SIG_DFL,
    "hook": sys.excepthook is sys.__excepthook__,
    "set": {k: v for k, v in os.environ.items() if before.get(k) != v},
    "backends": dict(dist.Backend.default_device_backend_map),
}))
"""


def run_python(code: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("launcher", [{}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}])
def test_importing_torch_replaces_nothing_and_sets_nothing(launcher: dict[str, str]) -> None:
    states = []
    for autoload in ("1", "0"):
        env = clean_environment({**launcher, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload})
        states.append(json.loads(run_python(STATE, env).partition("@@")[2]))
    if launcher:  # Waits there for init_process_group("herring"); what it does for others: the next test.
        assert states[0]["from"].pop("handlers.env") != states[1]["from"].pop("handlers.env")
    assert states[0] == states[1]


def test_gloo_under_mpirun_says_what_it_says_without_herring() -> None:
    code = (
        "import os, torch.distributed as dist\n"
        "before = dict(os.environ)\n"
        "try: dist.init_process_group('gloo')\n"
        "except ValueError as error: print('said', error)\n"
        "assert dict(os.environ) == before\n"
        "dist.init_process_group('gloo', rank=0, world_size=1)\n"
        "dist.barrier()\n"
        "assert dict(os.environ) == before\n"
    )
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    said = [
        run_python(code, clean_environment({**mpi, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload})) for autoload in "10"
    ]
    assert said[0] == said[1]
    assert "RANK expected" in said[0]


def test_using_herring_leaves_other_backends_as_they_are() -> None:
    """No variable that steers NCCL's DDP, and torch's own monitored_barrier where it was."""
    code = (
        "import os\n"
        "from datetime import timedelta\n"
        "before = dict(os.environ)\n"
        "import torch, torch.distributed as dist\n"
        "theirs = dist.monitored_barrier\n"
        "import herring.torch\n"
        "from herring.torch.parallel import DistributedDataParallel\n"
        "from herring.torch.distributed import monitored_barrier\n"
        "dist.init_process_group('herring', store=dist.HashStore(), rank=0, world_size=1)\n"
        "model = DistributedDataParallel(torch.nn.Linear(3, 1))\n"
        "before.update(TORCHINDUCTOR_CACHE_DIR=os.environ['TORCHINDUCTOR_CACHE_DIR'])  # torch's DDP sets it.\n"
        "for _ in range(3): model(torch.ones(2, 3)).sum().backward()\n"
        "monitored_barrier()\n"
        "other = dist.new_group([0], backend='gloo')\n"
        "monitored_barrier(other, timedelta(seconds=5))\n"
        "assert dist.monitored_barrier is theirs is dist.distributed_c10d.monitored_barrier\n"
        "dist.destroy_process_group()\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())\n"
    )
    run_children([([sys.executable, "-c", code], clean_environment())], 100)


def test_torch_finds_the_backend_when_it_is_asked_for() -> None:
    """Without what runs at `import torch`. torch 2.14 and newer look themselves; for older ones the test does."""
    code = (
        "import torch, torch.distributed as dist\n"
        "from importlib.metadata import entry_points\n"
        "assert 'HERRING' not in dist.Backend._plugins\n"
        "if not hasattr(dist.Backend, '_ensure_backend_registered'):\n"
        "    (point,) = [p for p in entry_points(group='torch.distributed.backends') if p.name == 'herring']\n"
        "    point.load()()\n"
        "dist.init_process_group('herring', store=dist.HashStore(), rank=0, world_size=1)\n"
        "value = torch.full((3,), 2.0)\n"
        "dist.all_reduce(value)\n"
        "assert value.tolist() == [2.0] * 3\n"
        "dist.destroy_process_group()\n"
    )
    run_python(code, clean_environment({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}))


def broken_copy(folder: Path, *damages: str) -> None:
    """Herring as it lies in site-packages, less what an accident took."""
    ignored = shutil.ignore_patterns("__pycache__", "bench")
    shutil.copytree(PACKAGE, folder / "herring", ignore=ignored)
    shutil.copy2(PACKAGE.parent / "_herring_autoload.py", folder)
    package = folder / "herring"
    for binding in package.glob("torch/_torch_*.so"):
        binding.unlink()
    for damage in damages:
        if damage == "package":
            shutil.rmtree(package)
        elif damage == "library":
            (package / "lib" / "libherring.so").unlink()
        elif damage == "core":
            next(package.glob("_core.*.so")).unlink()
        elif damage == "other python":
            core = next(package.glob("_core.*.so"))
            core.rename(package / core.name.replace(sysconfig.get_config_var("SOABI"), "cpython-27-x86_64-linux-gnu"))
        elif damage == "junk":
            next(package.glob("_core.*.so")).write_bytes(b"not a library")
        elif damage == "sources":
            for source in [folder / "bindings", package / "_torch_src"]:
                shutil.rmtree(source, ignore_errors=True)
        elif damage == "bad sources":
            (package / "_torch_src").mkdir(exist_ok=True)
            for unit in _build._UNITS:
                (package / "_torch_src" / unit).write_text("#error out of luck\n")


@pytest.mark.parametrize(
    ("damages", "reason"),
    [
        (["package"], "No module named 'herring'"),
        (["core"], "has no native module for Python 3"),
        (["other python"], "cpython-27-x86_64-linux-gnu"),
        (["library"], "libherring.so"),
        (["junk"], "native module cannot be loaded"),
        (["sources"], "binding's sources are not there"),
        (["bad sources"], "out of luck"),
        (["bad sources", "no compiler"], "needs a C++ compiler"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_broken_installation_is_silent_until_it_is_asked_for(tmp_path: Path, damages: list[str], reason: str) -> None:
    broken_copy(tmp_path, *damages)
    code = (
        "import torch, torch.distributed as dist\n"
        "print('torch works', torch.ones(2).sum().item())\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "dist.destroy_process_group()\n"
        "print('gloo works', flush=True)\n"
        "import os, sys; os.dup2(1, 2)\n"
        "try: dist.init_process_group('herring', store=dist.HashStore(), rank=0, world_size=1)\n"
        "except Exception as error: print('reason:', type(error).__name__, error)\n"
        "else: print('reason: none')\n"
    )
    path = os.pathsep.join([str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    env = clean_environment({"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    if "no compiler" in damages:
        env["PATH"] = str(tmp_path)
        env.pop("CXX", None)
    # Not in the checkout, whose ./herring would be found before the broken one; -S: no finder of an editable install.
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "importing torch is not silent"
    assert "torch works 2.0" in done.stdout
    assert "gloo works" in done.stdout
    told = done.stdout.partition("reason:")[2]
    assert reason in told, done.stdout
    assert os.fspath(PACKAGE) not in told, "another Herring than the broken one was loaded"
