"""Suites that need packages of their own: not collected without them, and said at the end, with what runs them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# pytest puts this folder there for this file. On it, tests/torch is found as torch where torch is not installed.
if str(TESTS) in sys.path:
    sys.path.remove(str(TESTS))


@dataclass(frozen=True)
class Suite:
    """Folders or files of tests/ that run only where all of these packages and programs are."""

    paths: tuple[str, ...]
    target: str
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """What is not here. A folder of tests/ may have a package's name: then its spec has no file."""
        packages = [each for each in self.packages if getattr(importlib.util.find_spec(each), "origin", None) is None]
        path = f"{os.environ.get('PATH', '')}:/usr/sbin"
        return packages + [each for each in self.programs if shutil.which(each, path=path) is None]

    def has(self, path: Path) -> bool:
        """Whether `path` is one of its folders or files, or in one."""
        return any(path.is_relative_to(TESTS / each) for each in self.paths)


SUITES = (
    Suite(("tensorflow",), "make test-tensorflow", ("tensorflow",)),
    Suite(("ray",), "make test-ray", ("ray",)),
    Suite(("ecosystem",), "make ecosystem", ("accelerate", "lightning", "transformers")),
    Suite(("sagemaker/test_sagemaker_hosts.py",), "make test-sagemaker", ("sagemaker",)),
    Suite(
        ("kubernetes/test_kubernetes_schemas.py", "kubernetes/test_kubernetes_long.py"),
        "make test-kubernetes",
        ("kubernetes_validate", "kubeflow_trainer_api"),
    ),
    Suite(("skypilot/test_skypilot_schema.py",), "make test-skypilot", ("sky",)),
    Suite(("spark",), "make test-spark", ("pyspark",)),
    Suite(("slurm",), "make test-slurm", programs=("slurmctld", "slurmd", "munged")),
    Suite(("ssh",), "make test-ssh", programs=("sshd",)),
)
MISSING = [(suite, missing) for suite in SUITES if (missing := suite.missing())]
LEFT_OUT = pytest.StashKey[set[str]]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Not asked about a file that the command line names: such a file is skipped, with its reason."""
    for suite, missing in MISSING:
        if suite.has(collection_path) and _is_asked_for(collection_path, config):
            line = f"not collected: tests/{', tests/'.join(suite.paths)}: {', '.join(missing)} not installed"
            config.stash.setdefault(LEFT_OUT, set()).add(f"{line} ({suite.target})")
            return True
    return None


def _is_asked_for(path: Path, config: pytest.Config) -> bool:
    """Whether `path` is below what the command line names: pytest asks about its neighbours as well."""
    named = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    return any(path.is_relative_to(each.resolve()) for each in named)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Also with -q, and where nothing else was collected."""
    for line in sorted(config.stash.get(LEFT_OUT, ())):
        terminalreporter.write_line(line)
