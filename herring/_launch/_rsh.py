"""How an agent is started on another host, and in words why it was not: pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from herring._own_python import WITHOUT_CURRENT_FOLDER, main_code

__all__ = ["Shell", "agent_command", "remote_command", "why_not"]

_NOT_FOUND, _NOT_ALLOWED, _SSH_FAILED = 127, 126, 255


@dataclass(frozen=True)
class Shell:
    """What starts a command on another host."""

    rsh: tuple[str, ...] = ()  #: Instead of ssh; the host and the command follow.
    port: int | None = None
    identity_file: str | None = None
    connect_s: int = 30
    environment: Mapping[str, str] | None = None  #: Of ssh or its like; None: herringrun's.
    noise: frozenset[str] = frozenset()  #: Lines that it prints where nothing is wrong; nobody is to see them.

    @property
    def name(self) -> str:
        """For people."""
        return self.rsh[0] if self.rsh else "ssh"

    def command_line(self, address: str, command: str) -> list[str]:
        """Runs `command` (one word for a shell there) on the host."""
        if self.rsh:
            return [*self.rsh, address, command]
        options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={self.connect_s}"]
        options += ["-p", str(self.port)] if self.port is not None else []
        options += ["-i", self.identity_file] if self.identity_file is not None else []
        return ["ssh", *options, address, command]


def agent_command(python: str) -> list[str]:
    """The agent's command line; it has nothing in it that is secret. Nor takes it what lies where a login begins."""
    return [python, "-c", WITHOUT_CURRENT_FOLDER + main_code("herring._launch._agent")]


def remote_command(python: str) -> str:
    """The same, for a shell."""
    return "exec " + shlex.join(agent_command(python))


def why_not(host: str, shell: Shell, python: str, code: int, said: str) -> str:
    """Why there is no agent on `host`: the command ended with `code` and has `said` this on stdout and stderr."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and line.strip() not in shell.noise]
    last = lines[-1] if lines else "it said nothing"
    text = said.lower()
    port = [] if shell.port is None else ["-p", str(shell.port)]
    if not shell.rsh and code == _SSH_FAILED:
        if "permission denied" in text or "passphrase" in text:
            return (
                f"{host}: ssh needs a key that it can use without asking for a password or passphrase ({last}): "
                "ssh-copy-id, ssh-agent or --ssh-identity-file"
            )
        if "host key verification failed" in text:
            return f"{host}: ssh does not know that host's key ({last}): connect once by hand, ssh {host}"
        return f"{host}: ssh cannot reach it ({last}); `{shlex.join(['ssh', *port, host, 'true'])}` must work"
    if "no module named" in text and "herring" in text:
        return (
            f"{host}: {python} there has no Herring ({last}): install the same version there, or name another Python "
            "with --python"
        )
    if code in (_NOT_FOUND, _NOT_ALLOWED) and python in said:
        return f"{host}: there is no {python} ({last}): --python says which Python to use there"
    how = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
    return f"{host}: {shell.name} {how} before Herring was started there ({last})"
