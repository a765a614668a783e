"""Hosts of network namespaces for tests of herringrun, and a command that starts something on one."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NET = "10.87"
_NUMBERS = itertools.count()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20, capture_output=True)


class Hosts:
    """Namespaces on one bridge, and this machine at its end."""

    def __init__(self, count: int, folder: Path) -> None:
        made_before = next(_NUMBERS)
        tag = f"{os.getpid() % 100000}{'abcdefgh'[made_before]}"
        third = (os.getpid() + 31 * made_before) % 250
        self.bridge = f"hb{tag}"
        self.namespaces = [f"hn{tag}x{index}" for index in range(count)]
        self.addresses = [f"{NET}.{third}.{index + 1}" for index in range(count)]
        self.here = f"{NET}.{third}.254"
        self._wires = [f"hv{tag}x{index}" for index in range(count)]
        self.rsh = folder / "rsh"
        self.home = folder / "home"  # Does not exist.
        cases = "\n".join(f"{a}) ns={n};;" for a, n in zip(self.addresses, self.namespaces, strict=True))
        self.rsh.write_text(
            '#!/bin/sh\n[ -n "$RSH_LOG" ] && echo "$*" >> "$RSH_LOG"\n'
            f"case $1 in {cases}\n*) echo no such host >&2; exit 68;;\nesac\n"
            'shift; exec ip netns exec $ns env -i PATH="$PATH" HOME=' + f'{self.home} sh -c "$*"\n'
        )
        self.rsh.chmod(0o755)

    def make(self) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.here}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for namespace, wire, address in zip(self.namespaces, self._wires, self.addresses, strict=True):
            ip("netns", "add", namespace)
            ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("link", "set", wire, "master", self.bridge, "up")
            for interface in ("lo", "eth0"):
                ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "route", "add", "default", "via", self.here)

    def cut(self, index: int, is_up: bool = False) -> None:
        """Takes the host off the network, or back."""
        ip("link", "set", self._wires[index], "up" if is_up else "down")

    def remove(self) -> None:
        for words in [("netns", "del", each) for each in self.namespaces] + [("link", "del", self.bridge)]:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                ip(*words)

    def names(self, *slots: int) -> str:
        """For -H."""
        return ",".join(f"{address}:{count}" for address, count in zip(self.addresses, slots, strict=False))


def made(count: int, folder: Path) -> Iterator[Hosts]:
    """Skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    hosts = Hosts(count, folder)
    try:
        try:
            hosts.make()
        except (OSError, subprocess.SubprocessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield hosts
    finally:
        hosts.remove()
