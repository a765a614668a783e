"""Importing a module of Herring whose framework is not installed, or does not load."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import herring

# (what is imported, what is not there, what the error says to install)
MODULES = [
    ("herring.tensorflow", "tensorflow", "tensorflow"),
    ("herring.torch", "torch", "torch"),
    ("herring.torch.parallel", "torch", "torch"),
    ("herring.torch.distributed", "torch", "torch"),
    ("herring.horovod.torch", "torch", "torch"),
    ("herring.horovod.torch.elastic", "torch", "torch"),
    ("herring.horovod.tensorflow", "tensorflow", "tensorflow"),
    ("herring.horovod.tensorflow.keras", "tensorflow", "tensorflow"),
    ("herring.horovod.keras", "keras", "tensorflow"),
    ("herring.horovod.keras", "tensorflow", "tensorflow"),
    ("herring.ray", "ray", "'ray[train]' torch"),
]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("module", "package", "install"), MODULES)
def test_the_error_says_what_to_install(module, package, install):
    # keras is installed with TensorFlow only.
    stand_in = "import types; sys.modules['keras'] = types.ModuleType('keras'); " if module.endswith("keras") else ""
    done = run(f"import sys; {stand_in}sys.modules[{package!r}] = None; import {module}")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("herring.MissingPackageError: herring.")
    assert f"import of {package} halted" in last
    assert last.endswith(f". Install it: pip install {install}")


def test_sagemakers_sdk_is_asked_for_where_its_class_is():
    done = run("import sys; sys.modules['sagemaker'] = None; from herring.sagemaker import Herring")
    assert done.stderr.strip().endswith("Install it: pip install 'sagemaker>=3'")


def test_a_script_that_asks_whether_a_framework_is_there_goes_on():
    done = run(
        "import sys; sys.modules['torch'] = None\ntry: import herring.torch\nexcept ImportError as e: print(e.name)"
    )
    assert (done.stdout, done.stderr) == ("torch\n", "")


def test_a_framework_that_is_there_and_broken_is_not_called_missing():
    code = (
        "import sys\nclass Broken:\n def find_spec(self, name, *_):\n"
        "  if name == 'torch': raise ImportError('libtorch.so: file too short')\nsys.meta_path.insert(0, Broken())\n"
    )
    assert "cannot be imported (libtorch.so: file too short)" in run(code + "import herring.torch").stderr


@pytest.mark.parametrize(
    "module", ["herring.horovod", "herring.horovod.runner", "herring.kubernetes", "herring.elastic"]
)
def test_what_needs_no_framework_imports_without_any(module):
    missing = "for each in ('torch', 'tensorflow', 'keras', 'ray', 'sagemaker'): sys.modules[each] = None"
    assert run(f"import sys\n{missing}\nimport {module}").returncode == 0


def test_the_error_is_an_import_error_that_survives_pickling():
    error = herring.MissingPackageError("why", name="torch")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, herring.UnavailableError)
    assert isinstance(again, ImportError)
    assert (str(again), again.name) == ("why", "torch")
