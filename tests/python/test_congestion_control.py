"""HERRING_TCP_CONGESTION decides about the connections that carry gradients, on both ends."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

import herring

NETWORK = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo", "HERRING_PROVIDER": "builtin"}


def congestion_of_connections():
    """What each of this process's TCP connections has."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family != socket.AF_INET or connection.type != socket.SOCK_STREAM:
                    continue
                connection.getpeername()
                name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        except OSError:
            continue
        found.append(name.rstrip(b"\0").decode())
    return found


def sum_and_look():
    herring.init()
    total = herring.allreduce(np.ones(100_000, np.float32), "sum")
    found = congestion_of_connections()
    herring.shutdown()
    return [float(total[0]), found]


def default_congestion():
    return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()


@pytest.mark.parametrize("wanted", ["reno", "system", "auto"])
def test_connections_have_what_the_setting_says(job, wanted):
    default = default_congestion()
    for total, found in job.run(sum_and_look, 2, env={**NETWORK, "HERRING_TCP_CONGESTION": wanted}):
        assert total == 2
        assert found
        if wanted == "reno":
            assert "reno" in found
        elif wanted == "system" or not default.startswith("bbr"):
            assert set(found) == {default}
        else:
            # The control connections carry no gradients and keep the system's.
            assert {"cubic", "reno"} & set(found), found


def start():
    try:
        herring.init()
    except herring.HerringError as error:
        return str(error)
    return ""


def test_an_unknown_name_is_an_error_at_the_start(job):
    for text in job.run(start, 2, env={**NETWORK, "HERRING_TCP_CONGESTION": "pigeon"}):
        assert "HERRING_TCP_CONGESTION=pigeon: this kernel has no such congestion control" in text
        assert "reno" in text
