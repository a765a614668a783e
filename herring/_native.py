"""What to say where the native module cannot be loaded. Needs the standard library alone."""

from __future__ import annotations

import sysconfig
from pathlib import Path


def why_not_loaded(error: ImportError) -> str:
    """The reason, from what lies in the package's folder, and what to do."""
    folder = Path(__file__).resolve().parent
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")
    reason = str(error)
    if not (folder / f"_core{suffix}").exists():
        # Python's own text blames a circular import.
        others = ", ".join(sorted(file.name for file in folder.glob("_core*.so")))
        reason = f"{folder} has no native module for Python {sysconfig.get_python_version()}, _core{suffix}"
        reason += f", but {others}" if others else ""
    text = f"Herring's native module cannot be loaded ({reason}). "
    source = folder.parent
    if (source / "CMakeLists.txt").exists() and (source / "csrc").is_dir():
        return text + (
            f"This is the package in Herring's source folder {source}. After `pip install .` start Python in another "
            "folder; or install with `pip install --editable .`, which builds it here"
        )
    return text + "`pip install .` in Herring's source folder builds it, for the Python that runs pip"
