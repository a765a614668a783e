"""`make demo`: trains two real models through Herring's servers and compares with training in one process."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LOSS_TOLERANCE = 0.02  # of a loss near 2: two processes add the same gradients in another order than one
ACCURACY_TOLERANCE = 0.02
SHARE_TOLERANCE = 0.01  # small operations are not cut: servers take turns with them

Report = dict[str, Any]

WAYS = {
    "one process": [sys.executable],
    "Herring, 2 servers": [sys.executable, "-m", "herring._launch", "-np", "2", "--servers", "2", sys.executable],
    "Herring, shared memory": [sys.executable, "-m", "herring._launch", "-np", "2", sys.executable],
    "DDP on gloo": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
BACKEND = {"one process": "none", "DDP on gloo": "gloo"}


def run(way: str, script: str, steps: int, folder: Path) -> Report:
    output = folder / "report.json"
    output.unlink(missing_ok=True)
    command = [*WAYS[way], str(HERE / script), "--steps", str(steps), "--json", str(output)]
    command += ["--backend", BACKEND.get(way, "herring")]
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    # The same number of computing threads for each way of training: the cores, shared by its processes.
    cores = len(os.sched_getaffinity(0))
    environment["OMP_NUM_THREADS"] = str(max(cores // (1 if way == "one process" else 2), 1))
    print(f"\n-- {way}: {script}, {steps} steps", flush=True)
    # Not in the current folder: Herring's own, after `pip install .`, has a package without native modules.
    code = subprocess.run(command, env=environment, cwd=folder, check=False).returncode
    if code != 0 or not output.exists():
        sys.exit(f"demo: FAILED: {way} ended with exit code {code}; its output is above")
    result: Report = json.loads(output.read_text())
    return result


def table(title: str, measure: str, rows: dict[str, Report]) -> None:
    print(f"\n{title}")
    print(f"  {'':<24}{measure:>12}{'step, ms':>12}{'processes':>12}")
    for way, row in rows.items():
        print(f"  {way:<24}{row[measure]:>12.4f}{row['step_ms']:>12.1f}{row['processes']:>12}")


def agree(title: str, measure: str, tolerance: float, rows: dict[str, Report]) -> bool:
    alone = rows["one process"][measure]
    worst = max(abs(row[measure] - alone) for row in rows.values())
    verdict = "agrees with" if worst <= tolerance else "DIFFERS from"
    print(f"  {title}: {measure} {verdict} one process (largest difference {worst:.5f}, allowed {tolerance})")
    return worst <= tolerance


def servers(row: Report) -> bool:
    print("\nBytes through each server (transformer, 2 workers + 2 servers)")
    received = [server["bytes_received"] for server in row["servers"]]
    for server in row["servers"]:
        mega = [server[name] / 1e6 for name in ("bytes_received", "bytes_sent")]
        print(f"  {server['place']:<40} received {mega[0]:9.2f} MB   sent {mega[1]:9.2f} MB")
    if not received:
        print("  NO server took part")
        return False
    spread = (max(received) - min(received)) / max(max(received), 1)
    equal = spread <= SHARE_TOLERANCE
    print(f"  {'equal' if equal else 'NOT equal'}: they differ by {100 * spread:.3f} %")
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=45, help="steps of the transformer (default 45)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # So that the folder goes, too.
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="herring-demo-") as name:
        folder = Path(name)
        digits = {way: run(way, "train_digits.py", 2 * args.steps, folder) for way in WAYS}
        text = {way: run(way, "train_text.py", args.steps, folder) for way in WAYS}
    table(f"Transformer on the Python manual ({text['one process']['parameters']:,} parameters)", "eval_loss", text)
    table(f"CNN on handwritten digits ({digits['one process']['parameters']:,} parameters)", "accuracy", digits)
    print()
    good = agree("transformer", "eval_loss", LOSS_TOLERANCE, text)
    good &= agree("CNN", "accuracy", ACCURACY_TOLERANCE, digits)
    good &= servers(text["Herring, 2 servers"])
    print(
        "\nStep times are medians of one run on this machine; at 2 processes on few cores most of a step is computing."
    )
    verdict = (
        "OK: both models trained through Herring, with the same result as in one process"
        if good
        else "FAILED: see above"
    )
    print(f"demo: {verdict} ({time.monotonic() - start:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
