"""The same Horovod script under each launcher; horovod.run; and the names that scripts import."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from pathlib import Path

import pytest
from ranks import clean_environment, run_children

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "horovod_digits.py")
BIN = Path(sys.executable).parent


def _accuracies(command: list[str], folder: Path) -> list[float]:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    env = clean_environment({"TMPDIR": str(folder)} if "torch.distributed.run" in command else None)
    output = run_children([(command, env)], 120)[0]
    found = [float(each) for each in re.findall(r"accuracy ([0-9.]+)", output)]
    assert len(found) == 2, output
    return found


def test_trains_under_each_launcher(tmp_path: Path) -> None:
    script = [EXAMPLE, "--epochs", "2"]
    launchers = {
        "herringrun": [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    }
    mpirun = shutil.which("mpirun", path=str(BIN)) or shutil.which("mpirun")
    if mpirun is not None and importlib.util.find_spec("mpi4py") is not None:
        launchers["mpirun"] = [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
    results = {name: _accuracies([*command, *script], tmp_path) for name, command in launchers.items()}
    assert all(each == results["herringrun"] for each in results.values()), results
    assert results["herringrun"][-1] > 0.6


def test_the_example_with_fp16_and_adasum(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable, EXAMPLE]
    assert _accuracies([*command, "--epochs", "2", "--adasum", "--fp16-allreduce"], tmp_path)[-1] > 0.3


def test_the_timeline_is_written_where_the_script_does_not_call_shutdown(tmp_path: Path) -> None:
    """Else HOROVOD_TIMELINE leaves an empty list for most scripts."""
    path = tmp_path / "timeline.json"
    code = "import herring.horovod.torch as hvd, torch; hvd.init(); hvd.allreduce(torch.ones(1), name='it')"
    command = [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable, "-c", code]
    run_children([(command, clean_environment({"HOROVOD_TIMELINE": str(path)}))], 60)
    assert "allreduce.it" in path.read_text()


def test_run_returns_what_each_process_returned() -> None:
    code = (
        "import herring.horovod\n"
        "def work(factor, more):\n"
        "    import herring.horovod.torch as hvd, torch\n"
        "    hvd.init()\n"
        "    return factor * hvd.rank() + more, hvd.allreduce(torch.ones(1), op=hvd.Sum).item()\n"
        "assert herring.horovod.run(work, (10,), {'more': 1}, np=2) == [(1, 2.0), (11, 2.0)]\n"
        "try:\n"
        "    herring.horovod.run(lambda: 1 / 0, np=1)\n"
        "except RuntimeError as error:\n"
        "    print('raised', error)\n"
    )
    pytest.importorskip("cloudpickle", reason="functions of __main__ need cloudpickle")
    output = run_children([([sys.executable, "-c", code], clean_environment())], 90)[0]
    assert "ZeroDivisionError" in output
    assert "raised" in output


def test_alone_it_is_a_job_of_one() -> None:
    code = (
        "import torch, herring.horovod.torch as hvd\n"
        "hvd.init()\n"
        "assert (hvd.size(), hvd.rank(), hvd.join()) == (1, 0, 0)\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)\n"
        "optimizer = hvd.DistributedOptimizer(optimizer)\n"
        "hvd.broadcast_optimizer_state(optimizer, 0)\n"
        "optimizer.param_groups[0]['params'][0].sum().backward()\n"
        "optimizer.step()\n"
        "assert optimizer.param_groups[0]['params'][0].tolist() == [0.0, 0.0]\n"
        "assert hvd.alltoall(torch.ones(2)).tolist() == [1.0, 1.0]\n"
        "assert hvd.allreduce(torch.ones(2), op=hvd.Adasum).tolist() == [1.0, 1.0]\n"
        "hvd.barrier()\n"
        "print('fine')\n"
    )
    assert "fine" in run_children([([sys.executable, "-c", code], clean_environment())], 60)[0]


NAMES = """
init shutdown is_initialized start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built
rocm_built allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
grouped_allreduce_ grouped_allreduce_async_ broadcast broadcast_async broadcast_ broadcast_async_ allgather
allgather_async alltoall alltoall_async reducescatter reducescatter_async grouped_allgather grouped_allgather_async
grouped_reducescatter grouped_reducescatter_async sparse_allreduce_async join barrier poll synchronize
broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object Compression SyncBatchNorm
HorovodInternalError HostsUpdatedInterrupt elastic ProcessSet global_process_set add_process_set remove_process_set
Average Sum Adasum Min Max Product DistributedOptimizer
"""


def test_every_documented_name_is_there() -> None:
    hvd = importlib.import_module("herring.horovod.torch")
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    assert set(NAMES.split()) - {"elastic"} <= set(hvd.__all__)
    modules = {
        "herring.horovod.torch.mpi_ops": "allreduce rank size synchronize",
        "herring.horovod.torch.compression": "Compression",
        "herring.horovod.torch.functions": "broadcast_object",
        "herring.horovod.torch.elastic.state": "TorchState",
        "herring.horovod.torch.elastic.sampler": "ElasticSampler",
        "herring.horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt",
        "herring.horovod.common.process_sets": "ProcessSet",
        "herring.horovod.common.elastic": "ObjectState run_fn",
        "herring.horovod.common.util": "nccl_built is_version_greater_equal_than",
        "herring.horovod": "run __version__",
    }
    for module, names in modules.items():
        assert [name for name in names.split() if not hasattr(importlib.import_module(module), name)] == [], module


def test_versions_are_compared_by_their_numbers() -> None:
    compare = importlib.import_module("herring.horovod.common.util").is_version_greater_equal_than
    assert compare("2.16.0", "2.6.0")
    assert compare("2.6.0", "2.6.0")
    assert compare("2.6.0+cpu", "2.6.0")
    assert not compare("2.6.0rc1", "2.6.0")
    assert not compare("2.5.9", "2.6.0")
    for wrong in (("2.6.0", "2.6"), ("new", "2.6.0"), (2.6, "2.6.0")):
        with pytest.raises(ValueError):
            compare(*wrong)
