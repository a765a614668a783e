"""The arguments that train_digits.py and train_text.py share. It needs no torch, so --help works without it."""

from __future__ import annotations

import argparse
from pathlib import Path


def parse(description: str, steps: int) -> argparse.Namespace:
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--backend",
        choices=["none", "herring", "gloo"],
        default="none",
        help="none: one process; herring or gloo: data-parallel over the processes of the job",
    )
    result.add_argument("--steps", type=int, default=steps, help=f"training steps (default {steps})")
    result.add_argument("--json", type=Path, help="write the report to this file too")
    return result.parse_args()
