"""Horovod's own variables, HOROVOD_*."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar

from herring._errors import InvalidArgumentError

NumberT = TypeVar("NumberT", int, float)


def is_set(name: str) -> bool:
    """As Horovod reads its switches: any number but 0."""
    return os.environ.get(name, "").strip().lower() not in ("", "0", "false")


def read_number(
    name: str, otherwise: NumberT, what: str, parse: Callable[[str], NumberT], limit: float = math.inf
) -> NumberT:
    """The variable's number, from 0 to below `limit`; `otherwise` where it is not set or empty.

    Raises InvalidArgumentError that says `what` it takes.
    """
    text = os.environ.get(name, "")
    if not text:
        return otherwise
    try:
        value = parse(text)
    except ValueError:
        value = parse("-1")
    if not 0 <= value < limit:
        raise InvalidArgumentError(f"{name} is {text!r}; it takes {what}")
    return value
