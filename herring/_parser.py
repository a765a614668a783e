"""The commands' parser: argparse's, which names the option that a misspelt one may stand for."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["Parser"]


class Parser(argparse.ArgumentParser):
    """Its commands are parsed by the same class."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(unknown, self._options(vars(found)))}")
        return found

    def _options(self, found: Mapping[str, Any]) -> list[str]:
        """Its own and those of the command that was given."""
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options += action.choices[found[action.dest]]._option_string_actions
        return options


def _hint(unknown: Iterable[str], options: Sequence[str]) -> str:
    for word in unknown:
        if word.startswith("-"):
            near = difflib.get_close_matches(word.partition("=")[0], options, 1, 0.7)
            return f"; did you mean {near[0]}?" if near else ""
    return ""
