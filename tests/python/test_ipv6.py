"""Hosts whose interfaces have IPv6 addresses alone: what a user would lose is the job, refused at its start."""

import os
import subprocess
import sys

import numpy as np
import pytest

import herring

HOSTS = (f"hr6a{os.getpid()}", f"hr6b{os.getpid()}")
ADDRESSES = ("fd00:77::1", "fd00:77::2")


def ip(*words):
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by a link with IPv6 addresses; loopback has both kinds, as it always has."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    try:
        ip("netns", "add", HOSTS[0])
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    try:
        ip("netns", "add", HOSTS[1])
        ends = [f"{host}v"[-15:] for host in HOSTS]
        ip("link", "add", ends[0], "netns", HOSTS[0], "type", "veth", "peer", "name", ends[1], "netns", HOSTS[1])
        for host, end, address in zip(HOSTS, ends, ADDRESSES, strict=True):
            ip("-n", host, "link", "set", end, "name", "eth0")
            for interface in ("lo", "eth0"):
                ip("-n", host, "link", "set", interface, "up")
            ip("-n", host, "-6", "addr", "add", f"{address}/64", "dev", "eth0", "nodad")
        yield HOSTS
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False, timeout=20, capture_output=True)


@pytest.mark.root
@pytest.mark.parametrize("where", ["master", "hub"])
def test_a_job_over_interfaces_that_have_only_ipv6(job, two_hosts, where):
    place = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500"}
    if where == "hub":
        place = {"HERRING_HUB": f"[{ADDRESSES[0]}]:7000"}
    for rank, host in enumerate(two_hosts):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        job.start(add, env={**env, **place, "HERRING_INTERFACE": "eth0"}, prefix=("ip", "netns", "exec", host))
    assert [outcome.result for outcome in job.finish()] == [2.0, 2.0]


def add():
    herring.init(join_timeout_s=20, timeout=20)
    total = float(herring.allreduce(np.ones(100_000), op="sum")[-1])
    herring.shutdown()
    return total


@pytest.mark.root
def test_the_address_of_an_interface_that_has_only_ipv6(two_hosts):
    code = (
        "from herring._rendezvous import interface_address, published_address, listening_address\n"
        f"assert interface_address('eth0') == {ADDRESSES[0]!r}\n"
        f"assert published_address(False, 'eth0', None) == {ADDRESSES[0]!r}\n"
        f"assert listening_address(False, 'eth0', 'fd00:77:0:0::1') == {ADDRESSES[0]!r}\n"
    )
    subprocess.run(["ip", "netns", "exec", two_hosts[0], sys.executable, "-c", code], check=True, timeout=60)
