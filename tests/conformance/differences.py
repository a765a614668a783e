"""Every known difference between herring and gloo in torch's suites, with its reason.

A difference that is not here makes `make conformance` fail where herring is the worse one.
"""

from __future__ import annotations

import re

_NAMES = "compares the backend's name with \"gloo\", which stands for herring there; passes under herring's own name"

# Test name -> why herring fails what gloo passes, in one of the columns.
FAILS: dict[str, str] = {
    "Distributed.test_ddp_logging_data_cpu": (
        "DDP's logger asks the C++ process group for its backend's name, which is 'custom' for every backend that "
        "torch did not bring; the test compares that with the name. Any backend from outside torch fails it."
    ),
    "Distributed.test_Backend_enum_class": _NAMES,
    "Distributed.test_get_backend": _NAMES,
}

# Reason given for a skip under herring's own name -> what it means.
SKIPS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"does not support DistributedDataParallel|get_future is only supported"), "opens for listed names"),
    (re.compile(r"Test requires backend herring to be one of|[Oo]nly Gloo|Only gloo|GLOO Batch"), "opens for gloo"),
    (re.compile(r"does not support creating subgroups"), "opens for listed names"),
]


def why_skipped(reason: str) -> str | None:
    """What a skip under herring's own name means, where that is known."""
    for pattern, meaning in SKIPS:
        if pattern.search(reason):
            return meaning
    return None
