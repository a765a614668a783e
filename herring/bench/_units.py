"""Sizes, rates and times as people write them."""

from __future__ import annotations

import math
import re

from herring._errors import InvalidArgumentError

MIN_BYTES = 8
MAX_BYTES = 1 << 30

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|KiB|MB|MiB|GB|GiB)?", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(bit|kbit|mbit|gbit|tbit)?", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_RATE_UNITS = {"": 1.0, "BIT": 1.0, "KBIT": 1e3, "MBIT": 1e6, "GBIT": 1e9, "TBIT": 1e12}


def parse_size(text: str) -> int:
    """Bytes of "8", "64KB", "1.5MB", "1GB"; a KB is 1024 bytes, as in the settings and in nccl-tests.

    Raises InvalidArgumentError unless it is a whole number of bytes from 8 to 1 GB.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError(f"size {text!r}: write bytes, or a number with KB, MB or GB, such as 64KB")
    number, unit = float(match[1]), (match[2] or "").upper()
    size = number * _SIZE_UNITS[unit[:1] if unit != "B" else "B"]
    if size != int(size) or not MIN_BYTES <= size <= MAX_BYTES:
        raise InvalidArgumentError(f"size {text!r}: a whole number of bytes from {MIN_BYTES} to 1GB is needed")
    return int(size)


def format_size(size: int) -> str:
    """The shortest exact way to write `size` bytes: 26214400 is 25MB, 100 is 100B."""
    for unit, scale in (("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size % scale == 0 and size >= scale:
            return f"{size // scale}{unit}"
    return f"{size}B"


def parse_rate(text: str) -> float | None:
    """Bits per second of "500mbit", "10gbit" or "500000000"; None for "none".

    Units are decimal, and spelled as tc spells them. Raises InvalidArgumentError for anything else (tc's "mbps" are
    megabytes, so it is refused here rather than guessed).
    """
    if text.strip().lower() == "none":
        return None
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise InvalidArgumentError(f"rate {text!r}: write bits per second, such as 500mbit, 10gbit or 500000000")
    return float(match[1]) * _RATE_UNITS[(match[2] or "").upper()]


def format_rate(bits_per_s: float) -> str:
    """500000000.0 is "500 Mbit/s"."""
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= scale:
            return f"{bits_per_s / scale:g} {unit}"
    return f"{bits_per_s:g} bit/s"


def geometric_sizes(low: int, high: int, factor: float) -> list[int]:
    """low, low * factor, ... up to and including what does not pass high; each a multiple of 8 bytes."""
    if low > high:
        raise InvalidArgumentError(f"--min {format_size(low)} is more than --max {format_size(high)}")
    if not factor > 1 or math.isinf(factor):
        raise InvalidArgumentError(f"--factor {factor:g}: a number above 1 is needed")
    sizes: list[int] = []
    value = float(low)
    while value <= high * (1 + 1e-9):
        size = max(MIN_BYTES, int(value) // MIN_BYTES * MIN_BYTES)
        if not sizes or size > sizes[-1]:
            sizes.append(size)
        value *= factor
    return sizes
