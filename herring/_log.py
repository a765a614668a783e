"""What Herring's Python says, through Python's logging under the name "herring"."""

from __future__ import annotations

import logging
import sys

__all__ = ["say"]

_LOGGER = logging.getLogger("herring")


def say(level: int, text: str, who: str) -> None:
    """As logging is set up; else on stderr with `who` in front, unless the logger's own level forbids it."""
    if _LOGGER.hasHandlers():
        _LOGGER.log(level, text)
        return
    is_off = _LOGGER.disabled or logging.root.manager.disable >= level or _LOGGER.level > level
    if is_off or sys.stderr is None:
        return
    record = _LOGGER.makeRecord(_LOGGER.name, level, __file__, 0, text, (), None)
    # Not to stay: a handler of ours would repeat what the user's handlers say, once they are there.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{who} {record.levelname.lower()}: %(message)s"))
    handler.handle(record)
