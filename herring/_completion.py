"""Completion of the commands' options in a shell, where argcomplete is installed (docs/launching.md)."""

from __future__ import annotations

import argparse
import contextlib
import os


def offer_completion(parser: argparse.ArgumentParser) -> None:
    """Where the shell asks for completions, prints them and ends the process. Else nothing."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    with contextlib.suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
