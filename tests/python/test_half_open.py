"""A link that silently drops what one host sends to another, while both answer everybody else: with a second server no
step is lost, and where nobody can take over every rank is told in seconds which two do not reach each other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from surroundings import clean_environment

ROOT = Path(__file__).resolve().parents[2]
EMULATE = ROOT / "benchmarks" / "emulate_cluster.py"
DEAD_AFTER_S = 2.0

# Emulated hosts have the addresses 10.77.0.1 (worker 0), .2 (worker 1), then the servers. Worker 1 breaks the link in
# its own host: what it sends there vanishes, but for what goes to worker 0's hub, which listens at MASTER_PORT + 1111.
WORKER = r"""
import json, os, subprocess, sys, time
from pathlib import Path
import numpy as np
import herring

what, broken = sys.argv[1], sys.argv[2]
rank = int(os.environ["RANK"])
if what != "sums":
    import torch, herring.torch
    import torch.distributed as dist

    dist.init_process_group("herring")
else:
    herring.init()
results = []

def step(number):
    if what == "any":
        if rank == 0:
            part = torch.zeros(3)
            dist.recv(part)
            return part[0].item()
        if number >= 3:
            time.sleep(8)
            dist.barrier()
        elif rank == 1:
            dist.send(torch.full((3,), float(number)), 0)
        return 0.0
    if what == "messages":
        parts = torch.empty(2, 70000)
        dist.all_to_all_single(parts, torch.full((2, 70000), float(number + rank)))
        return parts[:, 0].tolist()
    values = np.arange(300000, dtype=np.float32) * (rank + 1) + number
    return float(np.asarray(herring.allreduce(values, op="sum"), dtype=np.float64).sum())

def break_link():
    rules = (
        "add table ip t; add chain ip t c { type filter hook output priority 0; };"
        f"add rule ip t c ip daddr {broken} tcp dport != {{ 29500, 30611 }} drop"
    )
    subprocess.run(["nft", rules], check=True)
    # For all ranks: on a busy machine nft alone takes seconds, while the others are in their next step already.
    written = Path("broken.new")
    written.write_text(str(time.monotonic()))
    written.rename("broken_at")

def broken_at():
    at = Path("broken_at")
    return float(at.read_text()) if at.exists() else 0.0

def say(**fields):
    # In one piece: the other rank prints at the same time.
    os.write(1, ("\n@@" + json.dumps({"rank": rank, **fields}) + "\n").encode())

try:
    for number in range(3):
        results.append(step(number))
    if rank == 1:
        break_link()
    longest = 0.0
    for number in range(3, 40):
        before = time.monotonic()
        results.append(step(number))
        longest = max(longest, time.monotonic() - max(before, broken_at()))
    say(results=results, longest=longest)
except Exception as error:
    say(error=str(error), seconds=time.monotonic() - broken_at())
    sys.exit(1)
"""


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare", "nft"))):
        return "needs iproute2, util-linux and nftables"
    if not EMULATE.exists():
        return "needs a checkout"
    done = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True)
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(why_not()), reason=why_not() or "runs")]


def run(
    tmp_path: Path, servers: int, broken: str, what: str = "sums", workers: int = 2, **settings: str
) -> tuple[list[dict[str, Any]], str]:
    """What the workers said, by rank, and all that was printed. `longest`, `seconds`: from the link's end on."""
    (tmp_path / "broken_at").unlink(missing_ok=True)
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    env = {**clean_environment(), "HERRING_DEAD_AFTER_S": str(DEAD_AFTER_S), "HERRING_HEARTBEAT_S": "0.3", **settings}
    options = ["--workers", str(workers), "--servers", str(servers), "--timeout", "60"]
    process = subprocess.run(
        [sys.executable, str(EMULATE), *options, "--", sys.executable, str(script), what, broken],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    said = [json.loads(line[2:]) for line in process.stdout.splitlines() if line.startswith("@@")]
    assert len(said) == workers, process.stdout
    return sorted(said, key=lambda one: int(one["rank"])), process.stdout


def test_the_work_of_a_server_that_one_worker_cannot_reach_goes_on_at_another(tmp_path: Path) -> None:
    said, output = run(tmp_path, 2, "10.77.0.3")
    assert all("results" in one for one in said), output
    assert said[0]["results"] == said[1]["results"], "the ranks differ"
    unbroken, _ = run(tmp_path, 2, "10.77.0.99")
    assert said[0]["results"] == unbroken[0]["results"], "the sums are not what they are with all links"
    assert said[0]["longest"] < 2 * DEAD_AFTER_S + 1, output
    assert all(text in output for text in ("server 0", "worker 1", "cannot reach it")), output


@pytest.mark.parametrize(
    ("servers", "broken", "what", "settings"),
    [
        (0, "10.77.0.1", "sums", {}),
        (2, "10.77.0.3", "sums", {"HERRING_FAILOVER": "off"}),
        (1, "10.77.0.1", "messages", {}),
    ],
    ids=["embedded", "failover-off", "messages"],
)
def test_every_rank_is_told_which_two_do_not_reach_each_other(
    tmp_path: Path, servers: int, broken: str, what: str, settings: dict[str, str]
) -> None:
    if what == "messages":
        pytest.importorskip("torch")
    said, output = run(tmp_path, servers, broken, what, **settings)
    ends = ("worker 1", "server 0") if broken == "10.77.0.3" else ("worker 1", "worker 0")
    for one in said:
        assert "error" in one, output
        assert one["seconds"] < 2 * DEAD_AFTER_S + 1.5, output
        assert all(end in one["error"] for end in ends), one["error"]
        assert "cannot reach it" in one["error"], one["error"]


def test_a_receive_from_anybody_watches_all_who_may_send(tmp_path: Path) -> None:
    """What worker 1 would send could not arrive, and worker 1 itself waits for nothing over that link."""
    pytest.importorskip("torch")
    said, output = run(tmp_path, 1, "10.77.0.1", "any", workers=3)
    assert "error" in said[0], output
    assert said[0]["seconds"] < 2 * DEAD_AFTER_S + 1.5, output
    for one in said:
        assert all(part in one["error"] for part in ("worker 1", "worker 0", "cannot reach it")), one["error"]
