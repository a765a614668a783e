"""One line when a job starts: who, how many, which transport, how many servers. Worker 0 says it, through logging; with
HERRING_LOG=info also the settings.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from herring._log import say

if TYPE_CHECKING:
    from herring._context import Session

_WHO = "herring[rank 0]"


def announce(session: Session) -> None:
    """Says the line where this is worker 0, and what else there is to say; nothing with HERRING_LOG=error."""
    if session.job.rank != 0 or session.config.log_level == "error":
        return
    notes = [note for note in (session.job.placement.note, missing_text(session)) if note]
    say(logging.WARNING if notes else logging.INFO, "; ".join([text_of(session), *notes]), _WHO)
    if session.config.log_level in ("info", "debug"):
        say(logging.INFO, settings_text(session), _WHO)


def text_of(session: Session) -> str:
    """ "rank 0 of 4 workers on 2 hosts (RANK and WORLD_SIZE), 2 server processes: tcp (...) through 2 servers"."""
    job, client = session.job, session.job.client
    hosts = len({member.host_identity for member in client.workers}) or 1
    servers = len(client.servers)
    who = f"rank {job.rank} of {counted(job.size, 'worker')} on {counted(hosts, 'host')} ({job.placement.source})"
    servers_text = counted(servers, "server process", "server processes") if servers else "no server processes"
    return f"{who}, {servers_text}: {session.runtime.description()}"


def missing_text(session: Session) -> str:
    """Where an elastic job begins with fewer workers than its launcher asked for: how many."""
    now, asked = session.job.size, session.job.placement.size
    if session.elastic is None or now >= asked:
        return ""
    return (
        f"starting with {now} of {asked} workers: no more came within {session.config.join_timeout_s:g} s "
        "(HERRING_JOIN_TIMEOUT_S); workers that come later join at the end of a step"
    )


def settings_text(session: Session) -> str:
    """ "settings: HERRING_TIMEOUT_S=60 (environment), ..." without the defaults. A secret reads "(set)"."""
    given = [f"{name}={value} ({source})" for name, value, source in session.config.origins if source != "default"]
    return "settings: " + (", ".join(given) or "all have their defaults")


def counted(number: int, one: str, more: str = "") -> str:
    """ "1 worker", "2 workers"; `more`: a plural that is not `one` with an s."""
    return f"{number} {one if number == 1 else more or one + 's'}"
