"""One rank of a test: child.py module:function arguments..."""

from __future__ import annotations

import importlib
import sys

module, _, function = sys.argv[1].partition(":")
getattr(importlib.import_module(module), function)(*sys.argv[2:])
