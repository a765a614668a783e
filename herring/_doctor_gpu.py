"""What ``herring doctor`` says of GPUs and NCCL. Nothing of it has been seen to copy or compute."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import subprocess
from collections.abc import Iterable
from pathlib import Path

from herring import _core
from herring._errors import HerringError
from herring._finding import LOAD_TIMEOUT_S, Finding, package, run_apart
from herring._job import read_settings

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
# As aws-ofi-nccl calls itself, and where the packages of EFA put it. NCCL looks for the first name itself.
_PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so")
_PLUGIN_FOLDERS = ("/opt/amazon/ofi-nccl/lib", "/opt/aws-ofi-nccl/lib")


def findings() -> list[Finding]:
    """What the driver says of itself, without a context on a GPU."""
    settings = _settings()
    if settings is not None and settings.cuda == "off":
        return [Finding("CUDA", "absent", "not asked: HERRING_CUDA=off")]
    code = "import json; from herring import _core; print(json.dumps(_core.survey_cuda()))"
    # A process of its own: a driver that hangs must not hang this one, and what forks later must not have it loaded.
    try:
        done = run_apart(code)
    except subprocess.TimeoutExpired:
        return [Finding("CUDA", "problem", f"the driver did not answer in {LOAD_TIMEOUT_S} s (libcuda.so.1)")]
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return [Finding("CUDA", "problem", f"asking the driver failed: {last[0]}")]
    return of_survey(json.loads(done.stdout), NVIDIA_DRIVER.exists())


def of_survey(survey: _core.CudaSurvey, has_module: bool) -> list[Finding]:
    """`has_module`: the driver's kernel module is loaded, so that somebody expects a GPU here."""
    if survey["problem"]:
        text = survey["problem"].removeprefix("cuda: ")
        state = "problem" if has_module else "absent"
        note = "the kernel module is loaded, but: " if has_module else ""
        return [Finding("CUDA", state, f"{note}{text}. Tensors on the CPU need none")]
    found = [Finding("CUDA", "absent", f"driver for CUDA {survey['version']} at {survey['library']}; not tried")]
    found += [_gpu(gpu) for gpu in survey["gpus"]]
    if len(survey["gpus"]) > 1:
        found.append(Finding("  between GPUs", "absent", _between(survey["gpus"])))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pinned = "no limit" if locked == resource.RLIM_INFINITY else f"at most {locked / 2**20:,.0f} MiB (ulimit -l)"
    found.append(Finding("  pinned memory", "absent", f"{pinned}; not tried"))
    settings = _settings()
    found.append(Finding("  path", "absent", _path(settings)))
    if settings is not None and settings.on_host == "nccl":
        return [*found, _nccl_in_use(settings.nccl)]
    return [*found, Finding("  NCCL", "absent", _nccl())]


def _settings() -> _core.Config | None:
    with contextlib.suppress(HerringError):  # Settings that are wrong are a finding of their own.
        return read_settings({})
    return None


def _path(settings: _core.Config | None) -> str:
    """Which way tensors on GPUs go, and why."""
    chosen = "host" if settings is None else settings.on_host
    host = "collectives on GPU tensors go through pinned host memory"
    tried = "tried on one GPU only, see docs/gpu.md"
    if chosen == "host":
        return f"{host} (HERRING_ON_HOST=host); {tried}"
    by = "by NCCL" if chosen == "nccl" else "each reading the others' memory"
    whether = ", if they can" if chosen == "auto" else ""
    sums = f"torch's all_reduce sums on the GPUs of a host, {by}{whether} (HERRING_ON_HOST={chosen})"
    return f"{sums}; other {host}; {tried}"


def _nccl_in_use(library: str) -> Finding:
    """HERRING_ON_HOST=nccl: whether it is there, as a process with torch finds it."""
    with_torch = "import contextlib\nwith contextlib.suppress(ImportError): import torch\n"
    code = f"{with_torch}from herring import _core\nprint(_core.find_nccl({library!r}))"
    try:
        done = run_apart(code)
    except subprocess.TimeoutExpired:
        return Finding("  NCCL", "problem", f"it did not load in {LOAD_TIMEOUT_S} s")
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        return Finding("  NCCL", "problem", f"HERRING_ON_HOST=nccl needs it: {last[0].split('nccl: ')[-1]}")
    return Finding("  NCCL", "absent", f"{done.stdout.strip()}; not tried")


def _gpu(gpu: _core.GpuFacts) -> Finding:
    engines = gpu["copy_engines"]
    copies = "copies both ways at once" if engines > 1 else f"{engines} copy engine: one way at a time"
    memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
    link = _pci_link(gpu["pci_bus_id"])
    text = f"{gpu['name']}, {memory}, compute {gpu['capability']}, PCI {gpu['pci_bus_id']}{link}; {copies}; not tried"
    return Finding(f"  GPU {gpu['number']}", "absent", text)


def _pci_link(bus_id: str) -> str:
    """ " (x16, 32.0 GT/s)", slower while idle; empty where the system does not say, as in some virtual machines."""
    device = PCI_DEVICES / bus_id.lower()
    try:
        width = (device / "current_link_width").read_text().strip()
        speed = (device / "current_link_speed").read_text().split(" PCIe")[0].strip()
    except OSError:
        return ""
    return f" (x{width}, {speed})" if width not in ("", "0") else ""


def _between(gpus: list[_core.GpuFacts]) -> str:
    apart = [
        f"{a['number']} and {b['number']}"
        for a in gpus
        for b in gpus
        if a["number"] < b["number"] and not (b["number"] in a["peers"] and a["number"] in b["peers"])
    ]
    if not apart:
        return "each can read the others' memory, which HERRING_ON_HOST=device uses"
    return f"cannot read each other's memory: {', '.join(apart)}"


def _nccl() -> str:
    versions = [f"{name} {version}" for name in _NCCL_PACKAGES if (version := package(name))]
    nccl = versions[0] if versions else "no package of it is installed"
    asked = os.environ.get("NCCL_NET_PLUGIN", "")
    if asked == "none":
        plugin = "no network plugin (NCCL_NET_PLUGIN=none)"
    else:
        names = [asked, f"libnccl-net-{asked}.so"] if asked else _PLUGINS
        place = _find(names)
        plugin = f"network plugin at {place}" if place else f"network plugin {asked or 'aws-ofi-nccl'} not found"
    return f"{nccl}; {plugin}. Herring does not need it: `herring bench --device cuda --peers nccl` compares with it"


def _find(names: Iterable[str]) -> Path | None:
    machine = f"{platform.machine()}-linux-gnu"
    folders = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    folders += [f"{folder}{end}" for folder in _PLUGIN_FOLDERS for end in ("", f"/{machine}")]
    folders += [f"/usr/lib/{machine}", "/usr/lib64", "/usr/local/lib", "/usr/lib"]
    for folder in folders:
        for name in names:
            place = Path(folder, name)
            if place.exists():
                return place
    return None
