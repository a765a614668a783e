"""Writes docs/configuration.md from the table that reads the settings, or checks that it is up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from herring import _core

__all__ = ["main", "markdown"]

INTRODUCTION = """\
# Configuration

Generated from csrc/core/config.cc by `make docs`; do not edit.

Every setting is an environment variable and, under the same name in lower case without the prefix, an argument of
`herring.init()` (`HERRING_TIMEOUT_S=60` or `herring.init(timeout_s=60)`; the argument wins). A wrong
value, or a `HERRING_` name that does not exist, is an error. Sizes are in bytes, or with KB, MB or GB (powers of 1024).
`herring config` prints each value and where it came from; with `HERRING_LOG=info` worker 0 logs at the start those that
are not the default. Give each setting the same value on all processes. For some settings this is required: if they
differ, the job does not start, and the error names the process.

| setting | type | default | accepted | meaning |
|---|---|---|---|---|
"""


def markdown() -> str:
    """The whole document."""
    lines = []
    for row in _core.config_table():
        default = row["default"] or "(empty)"
        cells = [f"`{row['name']}`", row["type"], f"`{default}`", row["range"], row["help"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.write:
        args.write.write_text(markdown())
        return 0
    if args.check.exists() and args.check.read_text() == markdown():
        return 0
    print(f"{args.check} is not what the settings table says; run: make docs", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
