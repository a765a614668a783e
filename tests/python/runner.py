"""Calls one function of a test module: `runner.py FILE FUNCTION JSON-ARGUMENTS`; prints what it returned, as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path


def main() -> None:
    path, function, arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    # In one write, unbuffered too: print() has one more for the end of the line, and other ranks' output gets between.
    sys.stdout.write(f"@@result {json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
