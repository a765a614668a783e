"""Command lines of Python processes that take the Herring of this one, whatever lies in the current folder."""

from __future__ import annotations

from pathlib import Path

__all__ = ["WITHOUT_CURRENT_FOLDER", "main_code", "main_command", "own_command"]

# With -c and -m the current folder comes first on Python's path: a checkout there has no native modules.
WITHOUT_CURRENT_FOLDER = "import sys; sys.path = [each for each in sys.path if each]; "
_FOLDER = str(Path(__file__).resolve().parents[1])


def own_command(python: str, code: str) -> list[str]:
    """Runs the code, which imports Herring: where it is not installed, that of this process."""
    return [python, "-c", f"{WITHOUT_CURRENT_FOLDER}sys.path.append({_FOLDER!r}); {code}"]


def main_command(python: str, module: str) -> list[str]:
    """Runs main() of that module of Herring's."""
    return own_command(python, main_code(module))


def main_code(module: str) -> str:
    """Likewise, as code."""
    return f"import sys; from {module} import main; sys.exit(main())"
