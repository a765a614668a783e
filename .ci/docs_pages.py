"""What mkdocs is told beyond mkdocs.yml (make docs): pages that are made from the sources, and the nav of what exists.

* reference/command-line.md: every program's --help.
* reference/api/*.md: every public name, from its docstring. A public name without one is an error.
* files/*: README.md and its like, and each file of the repository that a page links to.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
log = logging.getLogger("mkdocs.hooks.docs_pages")

# Pages of the repository that are on the site as they are; their links are checked too.
REPOSITORY_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# A link to one of these is plain text where the page does not exist.
OPTIONAL_PAGES: tuple[str, ...] = ()
PROGRAMS = (
    ("herringrun",),
    ("herring-horovodrun",),
    ("herring",),
    ("herring", "server"),
    ("herring", "rendezvous"),
    ("herring", "doctor"),
    ("herring", "build"),
    ("herring", "kubernetes"),
    ("herring", "config"),
    ("herring", "bench"),
)
# Other public modules (herring.horovod.torch.mpi_ops ...) mirror another package's layout; the names are these.
MODULES = (
    "herring",
    "herring.elastic",
    "herring.kubernetes",
    "herring.ray",
    "herring.sagemaker",
    "herring.torch",
    "herring.torch.distributed",
    "herring.torch.parallel",
    "herring.tensorflow",
    "herring.horovod",
    "herring.horovod.torch",
    "herring.horovod.torch.elastic",
    "herring.horovod.tensorflow",
    "herring.horovod.tensorflow.elastic",
    "herring.horovod.tensorflow.keras",
    "herring.horovod.tensorflow.keras.callbacks",
    "herring.horovod.tensorflow.keras.elastic",
    "herring.horovod.keras",
)
LINK = re.compile(r"(!?\[[^\]]*\])\(([^()#\s:]+)(#[^()\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".cc": "cpp", ".h": "cpp", ".json": "json", ".txt": "text"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The nav without pages that do not exist, with a folder's pages where a folder stands."""
    config.nav = _existing(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for name, content in _generated().items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Links that leave docs/ go to the copies on the site."""
    name = page.file.src_uri
    if name.startswith("reference/"):
        return markdown
    source = name.removeprefix("files/") if name.startswith("files/") else f"docs/{name}"
    return LINK.sub(lambda found: _link(found, source, name), markdown)


def _existing(entries: list[Any]) -> list[Any]:
    kept = []
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: _existing(target)})
        elif target.endswith("/"):
            kept.append({title: _pages_of(target)})
        elif (ROOT / "docs" / target).exists() or target in _generated():
            kept.append({title: target})
        elif f"docs/{target}" not in OPTIONAL_PAGES:
            log.warning("mkdocs.yml: nav has '%s', which does not exist", target)
    return kept


def _pages_of(folder: str) -> list[str]:
    generated = [name for name in _generated() if name.startswith(folder)]
    return generated or sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs" / folder).glob("*.md")
    )


@cache
def _generated() -> dict[str, str]:
    pages = {"reference/command-line.md": _command_line()}
    pages.update(_api())
    pages.update(_files())
    return pages


def _command_line() -> str:
    parts = ["# Command line\n\nWhat each program prints with `--help`."]
    modules = {
        "herring": "herring",
        "herringrun": "herring._launch",
        "herring-horovodrun": "herring._launch._horovodrun",
    }
    for program in PROGRAMS:
        command = [sys.executable, "-m", modules[program[0]], *program[1:], "--help"]
        run = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "COLUMNS": "110"}, capture_output=True, text=True, check=False
        )
        if run.returncode != 0:
            log.warning("%s --help: %s", " ".join(program), run.stderr.strip())
        parts.append(f"## {' '.join(program)}\n\n```text\n{run.stdout.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _api() -> dict[str, str]:
    loader = griffe.GriffeLoader(search_paths=[ROOT], allow_inspection=False)
    package = loader.load("herring")
    loader.resolve_aliases(external=False)
    pages = {}
    seen: dict[str, str] = {}  # By the path of a definition: the name under which it is documented.
    for name in MODULES:
        module = package[name.removeprefix("herring.")] if name != "herring" else package
        pages[f"reference/api/{name}.md"] = _module_page(name, module, seen)
    return pages


def _module_page(name: str, module: griffe.Module, seen: dict[str, str]) -> str:
    if not module.docstring:
        log.warning("%s has no docstring", name)
        return f"# {name}\n"
    summary = re.sub(
        r"(?:^>>>.*\n?)+", lambda found: f"```python\n{found[0].rstrip()}\n```\n", module.docstring.value, flags=re.M
    )
    parts, elsewhere = [f"# {name}\n\n{summary}"], []
    for export in sorted(map(str, module.exports or []), key=str.lower):
        if export.startswith("_"):
            continue
        member = module.members[export]
        target = _final(member)
        if target is None:
            elsewhere.append(f"`{export}`")
        elif target.is_module:
            continue
        elif target.path in seen:
            elsewhere.append(f"[`{export}`][{seen[target.path]}]")
        elif not target.docstring:
            log.warning("%s.%s (%s) has no docstring", name, export, target.path)
        else:
            seen[target.path] = f"{name}.{export}"
            parts.append(f"::: {name}.{export}")
    if elsewhere:
        parts.insert(1, "Also here: " + ", ".join(elsewhere) + ".")
    return "\n\n".join(parts) + "\n"


def _final(member: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """What an imported name stands for; None for another package's."""
    try:
        return member.final_target if member.is_alias else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None


def _files() -> dict[str, str]:
    """The pages for files that are not in docs/."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))}
    sources.update({name: (ROOT / name).read_text() for name in REPOSITORY_PAGES})
    linked = set(REPOSITORY_PAGES)
    for source, text in sources.items():
        for found in LINK.finditer(text):
            target = _target(source, found[2])
            if not target.startswith("docs/") and (ROOT / target).is_file():
                linked.add(target)
    return {_page_of(name): _file_page(name) for name in sorted(linked)}


def _file_page(name: str) -> str:
    text = (ROOT / name).read_text()
    if name.endswith(".md"):
        return text
    fence = "````" if "```" in text else "```"
    return f"# {name}\n\n{fence}{LANGUAGES.get(Path(name).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _page_of(name: str) -> str:
    """Where a file of the repository is on the site."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"files/{name}" if name.endswith(".md") else f"files/{name}.md"


def _target(source: str, link: str) -> str:
    """What a link in `source` points to, as a path from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _link(found: re.Match[str], source: str, page: str) -> str:
    text, link, anchor = found[1], found[2], found[3] or ""
    target = _target(source, link)
    if target in OPTIONAL_PAGES and not (ROOT / target).exists():
        return text[1:-1]
    if (ROOT / target).is_dir():
        if target == "docs/adr":
            return f"{text}({posixpath.relpath('adr/0001-ddp-subclasses-torch.md', posixpath.dirname(page) or '.')})"
        return text[1:-1]
    return f"{text}({posixpath.relpath(_page_of(target), posixpath.dirname(page) or '.')}{anchor})"
