"""Emulated hosts, each with a real sshd, and an ssh that knows their keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import emulated
from launcher import Launches

SSHD = "/usr/sbin/sshd"
PRIVILEGES = Path("/run/sshd")  # Where sshd insists on an empty folder.
PORT = 2222


class SshHosts:
    """The hosts, and what makes `ssh` find its way to them."""

    def __init__(self, hosts: emulated.Hosts, folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self.addresses = hosts.addresses
        self._daemons: list[subprocess.Popen[bytes]] = []
        folder.chmod(0o700)
        for name in ("host", "user", "stranger"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        key = (folder / "host.pub").read_text()
        (folder / "known").write_text("".join(f"[{address}]:{PORT} {key}" for address in self.addresses))
        (folder / "ssh_config").write_text(
            f"Host *\n  UserKnownHostsFile {folder}/known\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
            f"  GlobalKnownHostsFile /dev/null\n  ControlPath none\n"
        )
        (folder / "bin").mkdir()
        (folder / "bin" / "ssh").write_text(
            f'#!/bin/sh\necho "$*" >> {folder}/ssh.log\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n'
        )
        (folder / "bin" / "ssh").chmod(0o755)
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n"
            f"PermitRootLogin yes\nPasswordAuthentication yes\nPidFile none\nLogLevel ERROR\nPort {PORT}\n"
        )

    def start(self, index: int) -> None:
        """An sshd on that host."""
        command = [
            "ip",
            "netns",
            "exec",
            self.hosts.namespaces[index],
            SSHD,
            "-D",
            "-e",
            "-f",
            self.folder / "sshd_config",
        ]
        self._daemons.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
        )

    def await_daemons(self) -> None:
        for address in self.addresses[: len(self._daemons)]:
            for _ in range(100):
                if (
                    subprocess.run(
                        ["bash", "-c", f": < /dev/tcp/{address}/{PORT}"], capture_output=True, check=False
                    ).returncode
                    == 0
                ):
                    break
                time.sleep(0.05)
            else:
                pytest.fail(f"no sshd at {address}")

    def stop(self) -> None:
        for daemon in self._daemons:
            daemon.terminate()
            daemon.wait(10)

    def environment(self, **more: str) -> dict[str, str]:
        return {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **more}

    def options(self, *slots: int) -> list[str]:
        return ["--ssh-port", str(PORT), "-H", self.hosts.names(*slots)]


@pytest.fixture(scope="session")
def ssh_hosts(tmp_path_factory):
    """Three hosts; the third has no sshd."""
    if not Path(SSHD).exists():
        pytest.skip("needs openssh-server")
    made_here = not PRIVILEGES.exists()
    for hosts in emulated.made(3, tmp_path_factory.mktemp("emulated")):
        PRIVILEGES.mkdir(mode=0o755, exist_ok=True)
        made = SshHosts(hosts, tmp_path_factory.mktemp("ssh"))
        try:
            made.start(0)
            made.start(1)
            made.await_daemons()
            yield made
        finally:
            made.stop()
            if made_here:
                PRIVILEGES.rmdir()


@pytest.fixture
def launches(tmp_path):
    """herringrun with small scripts."""
    made = Launches(tmp_path)
    yield made
    made.stop()
