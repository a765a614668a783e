"""The helpers of tests/python serve here as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

# SageMaker's SDK comes with `make test-sagemaker`, in an environment of its own.
collect_ignore = [] if importlib.util.find_spec("sagemaker") else ["test_sagemaker_hosts.py"]
