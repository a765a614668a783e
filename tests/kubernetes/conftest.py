"""The helpers of tests/python serve here as well."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

# Its packages come with `make test-kubernetes`.
_PACKAGES = ("kubernetes_validate", "kubeflow_trainer_api")
collect_ignore = [] if all(map(importlib.util.find_spec, _PACKAGES)) else ["test_kubernetes_schemas.py"]
