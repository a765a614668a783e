"""A program in C, built by a C compiler on the header and libherring.so alone, as somebody's binding would be."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

import herring

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(herring.__file__).parent / "lib" / "libherring.so"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("no C compiler")
    built = tmp_path_factory.mktemp("c_api") / "job"
    flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'bindings' / 'c'}"]
    source = ROOT / "tests" / "c_api" / "job.c"
    subprocess.run([compiler, *flags, source, "-o", built, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}"], check=True)
    return built


def run(program, size, clean_env, **settings):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**clean_env, **settings}
    commands = [[program, str(rank), str(size), f"127.0.0.1:{port}"] for rank in range(size)]
    workers = [subprocess.Popen(each, env=env, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        told = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * size, told


@pytest.mark.parametrize("size", [2, 3])
def test_processes_reduce_through_it(program, size, clean_env):
    run(program, size, clean_env)


def test_over_the_network(program, clean_env):
    run(program, 2, clean_env, HERRING_INTRA_NODE="off", HERRING_INTERFACE="lo")


def test_a_bad_hub_is_named(program, clean_env):
    outcome = subprocess.run([program, "0", "1", "nowhere"], env=clean_env, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "'nowhere'" in outcome.stderr
    assert "HERRING_HUB" in outcome.stderr
