"""horovod.common.exceptions' names; what Herring itself raises is drawn in herring._errors."""

from __future__ import annotations

from herring._errors import HerringError

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(HerringError):
    """A collective failed: ranks disagree, a timeout, a lost process. Its cause is an exception of herring._errors."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed; `skip_sync` where the state need not be sent around again."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync
