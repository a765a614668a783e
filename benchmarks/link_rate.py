#!/usr/bin/env python3
"""Measures what a link of the emulated cluster carries: plain TCP streams, every host sending to the next one at once.

  benchmarks/emulate_cluster.py --workers 4 --rate 200mbit -- benchmarks/link_rate.py --megabytes 25

Every link is busy both ways, as it is in an allreduce. One connection carries part after part without a pause; each
host prints the median time of a part at the receiver, and the payload rate. The first part, while TCP still looks for
the rate, does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from itertools import pairwise

PORT = 29600
TIMEOUT_S = 120.0
CHUNK = 1 << 20


def receive(server: socket.socket, size: int, parts: int, done: list[float]) -> None:
    connection, _ = server.accept()
    connection.settimeout(TIMEOUT_S)
    buffer = bytearray(CHUNK)
    for _ in range(parts):
        left = size
        while left > 0:
            read = connection.recv_into(buffer, min(CHUNK, left))
            if read == 0:
                raise ConnectionError("the sender closed early")
            left -= read
        done.append(time.monotonic())
    connection.close()


def connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port), timeout=TIMEOUT_S)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=25, help="payload of each part in MiB (default 25)")
    parser.add_argument("--parts", type=int, default=5, help="number of timed parts (default 5)")
    args = parser.parse_args()
    text = os.environ.get("EMULATED_CLUSTER")
    if text is None:
        print("link_rate: run it through benchmarks/emulate_cluster.py", file=sys.stderr)
        return 2
    cluster = json.loads(text)
    rank, addresses = int(os.environ["RANK"]), cluster["worker_addresses"]
    if len(addresses) < 2:
        print("link_rate: at least two worker hosts are needed", file=sys.stderr)
        return 2
    size, payload = args.megabytes << 20, bytes(CHUNK)
    done: list[float] = []
    with socket.create_server((addresses[rank], PORT)) as server:
        server.settimeout(TIMEOUT_S)
        receiver = threading.Thread(target=receive, args=(server, size, args.parts + 1, done))
        receiver.start()
        with connect(addresses[(rank + 1) % len(addresses)], PORT) as stream:
            for _ in range(args.megabytes * (args.parts + 1)):
                stream.sendall(payload)
            receiver.join(TIMEOUT_S)
    if len(done) != args.parts + 1:
        print(f"link_rate: rank {rank} received {len(done)} of {args.parts + 1} parts", file=sys.stderr)
        return 1
    times = [end - begin for begin, end in pairwise(done)]
    median = statistics.median(times)
    print(
        f"rank {rank}: {args.megabytes} MiB in {median * 1e3:.1f} ms, {size * 8 / median / 1e6:.1f} Mbit/s of payload"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
