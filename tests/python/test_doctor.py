"""What `herring doctor` tells a stranger is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from surroundings import is_installed

from herring import _doctor, _doctor_gpu


def doctor(env, code=0):
    """The findings, [state, text] by subject; of several lines with one subject, all texts."""
    command = [sys.executable, "-m", "herring._cli", "doctor", "--json"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == code, run.stdout + run.stderr
    findings = {}
    for finding in json.loads(run.stdout):
        state, text = findings.get(finding["subject"], ["ok", ""])
        findings[finding["subject"]] = [max(state, finding["state"], key=["ok", "absent", "problem"].index),
                                        text + finding["text"] + "\n"]  # fmt: skip
    return findings


def test_what_herring_does_not_use_is_not_called_ok(clean_env, tmp_path):
    tensorflow = tmp_path / "tensorflow-2.16.1.dist-info"
    tensorflow.mkdir()
    (tensorflow / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.16.1\n")
    clean_env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    findings = doctor(clean_env)
    assert findings["CUDA"][0] == "absent", findings["CUDA"]
    assert findings["TensorFlow"][0] == "problem", findings["TensorFlow"]
    assert findings["TensorFlow"][1].startswith("2.16.1, but herring.tensorflow does not load: ")
    assert "Tensors on the CPU need none" in findings["CUDA"][1]


def test_another_herring_in_the_current_folder_is_not_asked(clean_env, tmp_path):
    """In a checkout after `pip install .`: the checkout has no native modules."""
    (tmp_path / "herring").mkdir()
    (tmp_path / "herring" / "__init__.py").write_text("raise ImportError('no native module here')\n")
    code = "import sys; del sys.path[0]; from herring._cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "doctor"]
    run = subprocess.run(command, env=clean_env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "no native module here" not in run.stdout


def test_a_driver_that_is_not_to_be_used_is_not_asked(clean_env):
    assert doctor({**clean_env, "HERRING_CUDA": "off"})["CUDA"] == ["absent", "not asked: HERRING_CUDA=off\n"]


@pytest.mark.parametrize(
    ("mode", "provider", "state", "why"),
    [
        ("off", "builtin", "absent", "HERRING_GPUDIRECT=off"),
        ("on", "builtin", "problem", "Herring's builtin tcp takes no GPU memory"),
        ("auto", "tcp", "absent", "takes no GPU memory (fi_getinfo with FI_HMEM"),
    ],
)
def test_whether_gpudirect_would_be_used_is_said(clean_env, mode, provider, state, why):
    found = doctor({**clean_env, "HERRING_GPUDIRECT": mode, "HERRING_PROVIDER": provider})["GPUDirect"]
    assert found[0] == state
    assert found[1].startswith("not used: ")
    assert why in found[1] or "there is no libfabric" in found[1], found


def test_a_gpu_is_not_called_ok_either():
    gpu = {"number": 0, "name": "NVIDIA H100", "pci_bus_id": "0000:0F:00.0", "memory_bytes": 80 << 30,
           "capability": "9.0", "multiprocessors": 132, "copy_engines": 1, "peers": []}  # fmt: skip
    found = _doctor_gpu.of_survey(
        {"problem": "", "library": "/lib/libcuda.so.1", "version": "12.4", "gpus": [gpu]}, True
    )
    assert {each.state for each in found} == {"absent"}, "seen is not tried"
    text = "\n".join(f"{each.subject}: {each.text}" for each in found)
    assert "CUDA: driver for CUDA 12.4 at /lib/libcuda.so.1; not tried" in text
    assert "GPU 0: NVIDIA H100, 80 GiB, compute 9.0, PCI 0000:0F:00.0; 1 copy engine: one way at a time" in text
    assert "pinned memory: " in text
    assert "between GPUs" not in text, "there is one"


def test_how_gpus_are_connected_is_said(monkeypatch, tmp_path):
    def gpu(number, peers):
        return {"number": number, "name": "NVIDIA H100", "pci_bus_id": f"0000:0{number}:AB.0", "memory_bytes": 1 << 30,
                "capability": "9.0", "multiprocessors": 132, "copy_engines": 3, "peers": peers}  # fmt: skip

    def said(*gpus):
        survey = {"problem": "", "library": "/lib/libcuda.so.1", "version": "12.4", "gpus": list(gpus)}
        return {each.subject.strip(): each.text for each in _doctor_gpu.of_survey(survey, True)}

    for number, (width, speed) in enumerate([("16", "32.0 GT/s PCIe"), ("0", "Unknown")]):
        device = tmp_path / f"0000:0{number}:ab.0"
        device.mkdir()
        (device / "current_link_width").write_text(width + "\n")
        (device / "current_link_speed").write_text(speed + "\n")
    monkeypatch.setattr(_doctor_gpu, "PCI_DEVICES", tmp_path)
    lines = said(gpu(0, [1]), gpu(1, [0]), gpu(2, []))
    assert "PCI 0000:00:AB.0 (x16, 32.0 GT/s); copies both ways" in lines["GPU 0"]
    assert "PCI 0000:01:AB.0; copies" in lines["GPU 1"]
    assert "PCI 0000:02:AB.0; copies" in lines["GPU 2"], "the system does not say"
    assert lines["between GPUs"] == "cannot read each other's memory: 0 and 2, 1 and 2"
    assert "each can read the others' memory" in said(gpu(0, [1]), gpu(1, [0]))["between GPUs"]


def test_nccl_and_its_plugin_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(_doctor_gpu, "package", lambda name: "2.27.7" if name == "nvidia-nccl-cu13" else None)
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    assert "nvidia-nccl-cu13 2.27.7; network plugin aws-ofi-nccl not found" in _doctor_gpu._nccl()
    (tmp_path / "libnccl-net-ofi.so").touch()
    assert f"network plugin at {tmp_path}/libnccl-net-ofi.so" in _doctor_gpu._nccl()
    monkeypatch.setenv("NCCL_NET_PLUGIN", "mine")
    assert "network plugin mine not found" in _doctor_gpu._nccl()
    (tmp_path / "libnccl-net-mine.so").touch()
    assert f"network plugin at {tmp_path}/libnccl-net-mine.so" in _doctor_gpu._nccl()
    monkeypatch.setenv("NCCL_NET_PLUGIN", "none")
    assert "NCCL_NET_PLUGIN=none" in _doctor_gpu._nccl()
    monkeypatch.setattr(_doctor_gpu, "package", lambda name: None)
    assert "no package of it" in _doctor_gpu._nccl()


@pytest.mark.parametrize(
    ("settings", "path", "nccl"),
    [
        ({}, "go through pinned host memory (HERRING_ON_HOST=host)", "Herring does not need it"),
        ({"HERRING_ON_HOST": "device"}, "sums on the GPUs of a host, each reading the others' memory", "not need it"),
        ({"HERRING_ON_HOST": "auto"}, "if they can (HERRING_ON_HOST=auto)", "does not need it"),
        ({"HERRING_ON_HOST": "nccl", "HERRING_NCCL": "/nowhere/libnccl.so.2"}, "by NCCL (HERRING_ON_HOST=nccl)",
         "HERRING_ON_HOST=nccl needs it: no NCCL on this machine (/nowhere/libnccl.so.2"),
    ],
)  # fmt: skip
def test_which_way_gpu_tensors_go_is_said_and_why(monkeypatch, settings, path, nccl):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    survey = {"problem": "", "library": "/lib/libcuda.so.1", "version": "12.4", "gpus": []}
    found = {each.subject.strip(): each for each in _doctor_gpu.of_survey(survey, True)}
    assert path in found["path"].text
    assert nccl in found["NCCL"].text
    assert found["NCCL"].state == ("problem" if "HERRING_NCCL" in settings else "absent")


def test_a_driver_that_does_not_work_is_a_problem_only_where_its_module_is_loaded():
    survey = {"problem": "cuda: cuInit failed with X (100): the driver sees no GPU", "library": "", "version": "",
              "gpus": []}  # fmt: skip
    loaded, none = _doctor_gpu.of_survey(survey, True)[0], _doctor_gpu.of_survey(survey, False)[0]
    assert (loaded.state, none.state) == ("problem", "absent")
    assert loaded.text.startswith("the kernel module is loaded, but: cuInit failed")


def test_settings_that_end_every_job_are_a_problem(clean_env):
    findings = doctor({**clean_env, "HERRING_LANES": "many", "HERRING_SEVRERS": "2"}, code=1)
    assert findings["settings"][0] == "problem"
    assert "HERRING_LANES is 'many'" in findings["settings"][1]
    assert "did you mean HERRING_SERVERS?" in findings["settings"][1]
    assert "cannot run here" in findings["result"][1]


def test_what_kubernetes_sets_is_no_problem(clean_env):
    links = {"HERRING_PORT": "tcp://10.0.0.1:80", "HERRING_SERVICE_HOST": "10.0.0.1", "HERRING_SERVICE_PORT": "80"}
    findings = doctor({**clean_env, **links, "HERRING_LANES": "2"})
    assert findings["settings"][0] == "absent"
    assert "HERRING_LANES=2" in findings["settings"][1]
    assert "Kubernetes" in findings["settings"][1]
    assert "HERRING_PORT" in findings["settings"][1]


def test_no_libfabric_and_only_loopback_are_told_apart_from_a_cluster(clean_env):
    findings = doctor({**clean_env, "HERRING_LIBFABRIC": "/nonexistent/libfabric.so.1"})
    assert findings["libfabric"][0] == "absent"
    assert "/nonexistent/libfabric.so.1" in findings["libfabric"][1]
    assert "several hosts: not possible" in findings["result"][1]


def test_what_carries_data_is_named_with_the_reason(clean_env):
    chosen = doctor({**clean_env, "HERRING_INTERFACE": "lo"})
    if chosen["builtin tcp"][0] == "ok":
        assert "neither EFA nor verbs" in chosen["builtin tcp"][1]
        assert "lo (127.0.0.1): CHOSEN: interface lo was asked for" in chosen["  builtin"][1]
        assert "builtin tcp" in chosen["result"][1]
    asked = doctor({**clean_env, "HERRING_PROVIDER": "builtin", "HERRING_INTERFACE": "lo"})
    assert "was asked for" in asked["builtin tcp"][1]
    without = doctor({**clean_env, "HERRING_PROVIDER": "builtin", "HERRING_LIBFABRIC": "/nonexistent/libfabric.so.1"})
    assert "not needed" in without["libfabric"][1]
    assert "builtin tcp" in without["result"][1]
    other = doctor({**clean_env, "HERRING_PROVIDER": "tcp", "HERRING_INTERFACE": "lo"})
    assert other["builtin tcp"][1].startswith("not chosen"), other["builtin tcp"]


def test_a_congestion_control_that_cannot_be_used_is_not_called_ok(clean_env):
    asked = {"HERRING_PROVIDER": "builtin", "HERRING_INTERFACE": "lo", "HERRING_TCP_CONGESTION": "pigeon"}
    state, text = doctor({**clean_env, **asked})["builtin tcp"]
    assert state == "problem"
    assert "HERRING_TCP_CONGESTION=pigeon" in text


@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_a_torch_that_herring_cannot_serve_is_a_problem(clean_env, tmp_path, monkeypatch):
    """No binding and nothing to build it with: the first init_process_group would say so, hours later."""
    from herring.torch import _binding

    monkeypatch.setattr(_binding, "_INSTALLED", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    finding = _doctor._torch()
    assert finding.state == "absent", "there is a compiler here, but no binding yet"
    assert "herring build torch" in finding.text
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = _doctor._torch()
    assert finding.state == "problem"
    assert "apt-get install g++" in finding.text


def test_every_line_says_something(clean_env):
    findings = doctor(clean_env)
    for subject, (state, text) in findings.items():
        assert text.strip(), subject
        assert not text.startswith((":", ";")), (subject, text)
        assert "link-local" not in text or state != "ok"


@pytest.mark.skipif(not is_installed("torch"), reason="torch is not installed")
def test_a_binding_that_does_not_load_is_not_called_ok(tmp_path, monkeypatch):
    """The right name and the right stamp: a torch of another build, a damaged file."""
    import torch

    from herring.torch import _binding, _build

    digest = _build.Sources.find().digest()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_binding, "_INSTALLED", tmp_path / "nowhere")
    cached = _binding.cache_folder(digest)
    cached.mkdir(parents=True)
    name = _build.module_name(torch.__version__)
    (cached / f"{name}.so").write_bytes(_build.stamp(torch.__version__, digest).encode())
    elsewhere = (
        f"from pathlib import Path; from herring.torch import _binding; _binding._INSTALLED = Path({str(tmp_path)!r})"
    )
    monkeypatch.setattr(_doctor, "LOAD_TORCH", f"{elsewhere}; _binding.load()")
    finding = _doctor._torch()
    assert finding.state == "problem", finding
    assert "does not load" in finding.text


def test_looking_for_mpi_starts_none():
    """Open MPI, started without mpirun, leaves a file in /dev/shm."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    done = _doctor.run_apart(f"{_doctor.LOAD_MPI}; print(MPI.Is_initialized())")
    assert done.stdout.strip() == "False", done.stderr


def test_an_mpi4py_that_does_not_load_is_not_called_ok(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('cannot load libmpi.so.40')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(_doctor, "package", lambda name: "4.1")
    monkeypatch.setattr(_doctor.shutil, "which", lambda *_, **__: "/usr/bin/mpirun")
    finding = _doctor._mpi()
    assert finding.state == "absent"
    assert "cannot load libmpi.so.40" in finding.text


def test_a_device_that_no_provider_uses_is_not_called_ok(monkeypatch):
    monkeypatch.setattr(_doctor, "rdma_devices", lambda: ["rdmap0s6"])
    tcp = _doctor.Finding("  tcp", "ok", "eth0: CHOSEN: the interface of the default route")
    none = _doctor.Finding("  efa", "absent", "not offered by this libfabric on this machine")
    assert _doctor._efa([tcp, none]).state == "absent"
    assert _doctor._efa([tcp, _doctor.Finding("  efa", "ok", "rdmap0s6: CHOSEN")]).state == "ok"


def test_loopback_is_of_no_use_to_other_hosts(clean_env):
    findings = doctor(clean_env)
    lines = [line for state, text in findings.values() for line in text.splitlines() if line.startswith("lo (")]
    assert all("only this host" in line or "CHOSEN" in line for line in lines), lines


def test_a_provider_that_is_not_there_makes_its_libfabric_no_ok(clean_env):
    findings = doctor({**clean_env, "HERRING_PROVIDER": "verbs"})
    if "provider" in {subject.strip() for subject in findings}:
        assert findings["libfabric"][0] == "absent"


@pytest.mark.parametrize(
    "asked", [{"HERRING_LIBFABRIC": "/nonexistent/libfabric.so.1"}, {"HERRING_PROVIDER": "verbs"}], ids=str
)
def test_where_nothing_can_be_used_no_line_says_what_carries_traffic(clean_env, asked):
    findings = doctor({**clean_env, **asked})
    if "several hosts: not possible" in findings["result"][1]:
        assert "goes over tcp" not in findings["EFA / RDMA"][1]
        assert findings["builtin tcp"][1].strip() == "not chosen: the settings ask for libfabric"
