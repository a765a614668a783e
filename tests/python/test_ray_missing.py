"""`import herring.ray` where Ray is not installed."""

from __future__ import annotations

import subprocess
import sys


def test_the_error_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import herring.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("herring.UnavailableError: herring.ray needs Ray Train")
    assert "pip install 'ray[train]'" in last
