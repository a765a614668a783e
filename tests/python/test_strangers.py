"""Bytes from strangers at every port of a running job: it goes on, counts them, and does not fill the log."""

import os
import random
import socket
import struct
import sys
import threading
from pathlib import Path

import numpy as np

import herring
from herring._context import process

FABRIC = {"HERRING_INTRA_NODE": "off", "HERRING_INTERFACE": "lo", "HERRING_SECRET": "only the job knows"}
HELLO = b"HRRC\x01\x00\x00\x00"
CONNECTIONS_PER_PORT = 60
SEED = 20


def listening_ports(pid):
    """The TCP ports on which a process listens."""
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].split(":")[1], 16))
    return ports


def hostile_bytes(dice):
    """Nonsense, what other programs say, headers that lie about their lengths, and frames that break off."""
    kinds = [
        dice.randbytes(dice.choice((1, 31, 32, 33, 500, 70_000))),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HELLO + struct.pack("<II", 0xFFFFFFFF, 0) + bytes(16) + dice.randbytes(100),
        HELLO + struct.pack("<II", 44, 0) + bytes(16) + dice.randbytes(dice.randrange(44)),
        HELLO + struct.pack("<II", 44, 0) + bytes(16) + dice.randbytes(44),
        b"HRRC\x0a" + bytes(3) + struct.pack("<II", 8, 0) + bytes(16) + b"\x01\x00x" + bytes(5),
        struct.pack(">BBHI", 1, 3, 1, 0x7FFFFFFF) + dice.randbytes(300),
        bytes(4096),
        b"\xff" * 4096,
        b"",
    ]
    return dice.choice(kinds)


def replay_handshake(port):
    """A Hello that the hub has answered before is sent again, and the Join that followed it, with its old mac."""
    recorded = HELLO + struct.pack("<II", 44, 0) + bytes(16) + struct.pack("<IQ", 1, 1) + bytes(32)
    join = b"HRRC\x04" + bytes(3) + struct.pack("<II", 29, 0) + b"\x5a" * 16 + bytes(29)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(recorded)
            assert stranger.recv(4096), "the hub answers a Hello"
            stranger.sendall(join)
            while stranger.recv(4096):
                pass


def attack(ports, hub_port, finished):
    dice = random.Random(SEED)
    held = []
    for port in sorted(ports) * CONNECTIONS_PER_PORT:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            stranger.settimeout(1)
            stranger.sendall(hostile_bytes(dice))
        except OSError:
            continue  # Thrown out before all was said.
        if dice.random() < 0.1:
            held.append(stranger)  # Stays, and says no more.
        else:
            stranger.close()
    replay_handshake(hub_port)
    for stranger in held:
        stranger.close()
    finished.append("attack and replay")


def test_a_running_job_is_not_disturbed_by_strangers(job):
    env = {**FABRIC, "HERRING_SERVERS": "1"}
    for rank in range(2):
        job.start_worker(work_under_fire, rank, 2, env=env)
    place = {**env, **job.master(), "WORLD_SIZE": "2"}
    job.start(serve, {}, env=place)
    outcomes = job.finish()
    result = outcomes[0].result
    assert result["ports"] >= 4, "the hub, both workers' endpoints, and the server's lane"
    assert result["steps"] > 0
    assert result["finished"], "the attacker did all that it set out to do"
    if "builtin" in result["transport"]:
        assert result["strangers"] >= CONNECTIONS_PER_PORT // 4, "they came to worker 0's endpoints as well"
    counters = result["counters"]
    assert counters["accepted"] >= CONNECTIONS_PER_PORT
    assert counters["bad_strangers"] >= CONNECTIONS_PER_PORT // 4, counters
    assert counters["joined"] == 3
    assert counters["lost"] == 0
    assert counters["protocol_errors"] == 0
    lines = [
        line for line in outcomes[0].errors.splitlines() if "dropped a connection to the hub from 127.0.0.1" in line
    ]
    assert 1 <= len(lines) <= 30, "said, and not once for every packet"


def serve():
    from herring import _cli

    sys.exit(_cli.main(["server", "--rank", "0"]))


def work_under_fire():
    herring.init(join_timeout_s=30)
    pids = [int(pid) for pid in herring.allgather(np.array([os.getpid()])).ravel()]
    attacker, ports, finished = None, set(), []
    if herring.rank() == 0:
        job = process.current().job
        pids += [server.pid for server in job.client.servers]
        ports = set().union(*(listening_ports(pid) for pid in pids))
        attacker = threading.Thread(target=attack, args=(ports, job.hub.port, finished), daemon=True)
        attacker.start()
    steps, is_over = 0, False
    while not is_over:
        size = (1, 5000, 300_000)[steps % 3]
        got = herring.allreduce(np.full(size, herring.rank() + steps, "float32"), "sum")
        assert (got == 2 * steps + 1).all()
        steps += 1
        done = float(attacker is not None and not attacker.is_alive())
        is_over = bool(herring.allreduce(done, "sum"))
    counters = process.current().job.hub.counters() if herring.rank() == 0 else {}
    stats, transport = herring.stats(), herring.description()
    return {
        "strangers": stats["strangers"],
        "transport": transport,
        "steps": steps,
        "ports": len(ports),
        "counters": counters,
        "finished": finished,
    }
