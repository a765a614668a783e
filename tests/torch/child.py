"""One rank of a test: child.py module:function arguments..."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def call(arguments: Sequence[str]) -> None:
    """["module:function", arguments...], all of them text."""
    module, _, function = arguments[0].partition(":")
    getattr(importlib.import_module(module), function)(*arguments[1:])


if __name__ == "__main__":
    call(sys.argv[1:])
