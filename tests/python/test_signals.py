"""A training script's signal handlers are its own: a library that libfabric brings along must not take them."""

import ctypes
import ctypes.util
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

import herring
from herring._fabric import fabric_search

# What libinfinipath does, which Debian's libfabric 1.17 brings: handlers of its own while it is loaded; and what
# libfabric's shm provider did up to 1.20: more of them in the first fi_getinfo, and in each fi_fabric.
RUDE_LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
static void die(int number) { (void)number; _Exit(99); }
static void take(int number) {
  struct sigaction mine;
  __builtin_memset(&mine, 0, sizeof(mine));
  mine.sa_handler = die;
  mine.sa_flags = SA_RESTART | SA_NODEFER;
  sigaction(number, &mine, 0);
}
__attribute__((constructor)) static void loaded(void) {
  take(SIGINT); take(SIGILL); take(SIGABRT); take(SIGBUS); take(SIGSEGV); take(SIGTERM);
}
int fi_getinfo(uint32_t version, void* node, void* service, uint64_t flags, void* hints, void** info) {
  int (*next)(uint32_t, void*, void*, uint64_t, void*, void**) = dlsym(RTLD_NEXT, "fi_getinfo");
  signal(SIGPIPE, SIG_IGN);
  take(SIGTERM); take(SIGUSR1); take(SIGHUP);
  if (getenv("RUDE_AND_SLOW")) usleep(300000);
  return next(version, node, service, flags, hints, info);
}
int fi_fabric(void* attributes, void** fabric, void* context) {
  int (*next)(void*, void**, void*) = dlsym(RTLD_NEXT, "fi_fabric");
  take(SIGUSR2); take(SIGCHLD); take(SIGRTMIN);
  return next(attributes, fabric, context);
}
"""


SA_RESTORER = 0x04000000  # The C library's own, in all that ever went through it.


class Action(ctypes.Structure):
    """struct sigaction of Linux on a 64-bit processor."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


def actions():
    """What each signal does in this process, as the kernel has it: [handler, mask, flags] by number."""
    libc = ctypes.CDLL(None)
    found = {}
    for number in range(1, signal.NSIG):
        action = Action()
        if libc.sigaction(number, None, ctypes.byref(action)) == 0:
            found[number] = [action.handler, action.mask[0], action.flags & ~SA_RESTORER]
    assert set(range(1, 32)) <= set(found)
    return found


def changed(before):
    return [signal.Signals(number).name for number, action in actions().items() if action != before[number]]


@pytest.fixture
def rude_library(tmp_path):
    """A real libfabric inside a library that replaces handlers at each of the three moments."""
    compiler, real = shutil.which("gcc") or shutil.which("cc"), fabric_search()
    if compiler is None or not real:
        pytest.skip("needs a C compiler and the libfabric of a PyPI wheel")
    source, library = tmp_path / "rude.c", tmp_path / "librude.so"
    source.write_text(RUDE_LIBRARY)
    link = ["-Wl,--no-as-needed", real[0], "-ldl", f"-Wl,-rpath,{Path(real[0]).parent}"]
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library), *link], check=True, timeout=60)
    return str(library)


@pytest.fixture
def system_library():
    """The system's libfabric: Debian 12's and Ubuntu 24.04's bring libinfinipath."""
    name = ctypes.util.find_library("fabric")
    if name is None:
        pytest.skip("no libfabric of the system here: apt-get install libfabric1")
    return name


def check_handlers_stay(job, library):
    env = {"HERRING_LIBFABRIC": library, "HERRING_PROVIDER": "tcp", "HERRING_INTERFACE": "lo"}
    for result in job.run(handlers_around_a_job, 2, env={**env, "HERRING_INTRA_NODE": "off"}):
        assert "libfabric" in result.pop("transport")
        assert result == {
            "probe": [],
            "init": [],
            "use": [],
            "shutdown": [],
            "saved": ["SIGTERM", "SIGUSR1", "SIGUSR1"],
        }


def test_handlers_stay_with_a_library_that_takes_them(job, rude_library):
    check_handlers_stay(job, rude_library)


def test_handlers_stay_with_the_systems_libfabric(job, system_library):
    check_handlers_stay(job, system_library)


def handlers_around_a_job():
    """SIGTERM saves a checkpoint here: installed before init(), and SIGUSR1 after it."""
    saved = []

    def save(number, _frame):
        saved.append(signal.Signals(number).name)

    signal.signal(signal.SIGTERM, save)
    before = actions()
    result = {"probe": probe_changes(before)}
    herring.init()
    result["init"] = changed(before)
    signal.signal(signal.SIGUSR1, save)
    before = actions()
    assert herring.allreduce(float(herring.rank())) == 0.5
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    herring.barrier()
    result["use"] = changed(before)
    result["transport"] = herring.description()
    herring.shutdown()
    result["shutdown"] = changed(before)
    os.kill(os.getpid(), signal.SIGUSR1)
    return {**result, "saved": saved}


def probe_changes(before):
    herring._core.probe_fabric(herring._core.read_config(), [])
    return changed(before)


def test_a_crash_is_still_a_crash(job, rude_library):
    """Or who looks after the job (a scheduler, faulthandler) takes it for an orderly exit."""
    job.start_worker(crash_after_probe, 0, 1, env={"HERRING_LIBFABRIC": rude_library})
    [outcome] = job.finish([-signal.SIGSEGV])
    assert "before the crash" in outcome.output


def crash_after_probe():
    probe_changes(actions())
    print("before the crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(10)


def test_a_handler_that_another_thread_installs_meanwhile_stays(job, rude_library):
    """An elastic job looks for its network again on a thread of its own, whatever the script does at that moment."""
    job.start_worker(install_during_a_probe, 0, 1, env={"HERRING_LIBFABRIC": rude_library, "RUDE_AND_SLOW": "1"})
    [outcome] = job.finish()
    assert outcome.result == {"changed": [], "saved": ["SIGWINCH"]}


def install_during_a_probe():
    saved = []
    before = actions()
    probe = threading.Thread(target=probe_changes, args=[before])
    probe.start()
    while "SIGUSR1" not in changed(before):
        time.sleep(0.001)
    signal.signal(signal.SIGWINCH, lambda number, _frame: saved.append(signal.Signals(number).name))
    assert "SIGUSR1" in changed(before), "the probe ended too early to say anything"
    probe.join()
    os.kill(os.getpid(), signal.SIGWINCH)
    return {"changed": [name for name in changed(before) if name != "SIGWINCH"], "saved": saved}


def test_a_library_that_is_not_taken_is_not_loaded(job, system_library):
    """The system's 1.17 with all that it brings, where a wheel has a newer one."""
    if not fabric_search():
        pytest.skip("no PyPI wheel with libfabric here")
    env = {"HERRING_INTRA_NODE": "off", "HERRING_PROVIDER": "tcp", "HERRING_INTERFACE": "lo"}
    for text, objects in job.run(objects_of_a_job, 2, env=env):
        assert len(objects) == 1, f"{text}, but these are loaded: {objects}"


def objects_of_a_job():
    herring.init()
    text = herring.description()
    objects = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    herring.shutdown()
    texts = ("libfabric.so", "libpsm", "infinipath")
    return [text, sorted(name for name in objects if any(part in name for part in texts))]
