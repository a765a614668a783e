"""What Herring raises, drawn once::

HerringError (RuntimeError)
+-- InvalidArgumentError (ValueError)    a value is bad; the message names it
+-- MismatchError                        ranks disagree about an operation; the message says who said what
+-- HerringTimeoutError (TimeoutError)   a deadline passed; the message names who is missing
+-- PeerLostError                        a process died, stopped answering, or left
+-- ProtocolError                        a peer sent what no correct peer sends
+-- TransportError                       a network or system call failed
+-- ShutdownError                        before init(), after shutdown(), or in a forked child
+-- UnavailableError                     something needed is not on this machine
|   +-- MissingPackageError (ImportError)    a module of Herring needs a Python package that is not installed
+-- CancelledError                       given up on purpose
+-- CorruptedError                       data arrived damaged again and again; the message names the peer
+-- NotFiniteError (ArithmeticError)     a tensor holds NaN or infinity; the message names rank and place
+-- InternalError                        a bug in Herring
"""

from __future__ import annotations

import builtins

# Exit status of `herring server` where another process of the job failed, was lost or cannot be reached.
SERVER_LOST_PEER = 3


class HerringError(RuntimeError):
    """Anything that Herring raises."""


class InvalidArgumentError(HerringError, ValueError):
    """A value (argument, setting, array) is bad; the message names it and what is accepted."""


class MismatchError(HerringError):
    """Ranks disagree about an operation or the job; the message says who said what."""


class HerringTimeoutError(HerringError, builtins.TimeoutError):
    """A deadline passed; the message names who is missing."""


class PeerLostError(HerringError):
    """A process of the job died, stopped answering, failed, or left."""


class ProtocolError(HerringError):
    """A peer sent something that no correct peer sends."""


class TransportError(HerringError):
    """A network or system call failed; the message names the call and the peer."""


class ShutdownError(HerringError):
    """Herring is not running in this process: before init(), after shutdown(), or in a forked child."""


class UnavailableError(HerringError):
    """Something needed is not on this machine (a library, a device); the message says what to install."""


class MissingPackageError(UnavailableError, ImportError):
    """A module of Herring cannot be imported without a Python package; the message says what to install."""

    def __init__(self, *args: object, name: str | None = None, path: str | None = None) -> None:
        ImportError.__init__(self, *args, name=name, path=path)


def missing_package(module: str, install: str, error: ImportError) -> MissingPackageError:
    """What `module` raises where `error` came from importing its framework; `install` is what pip is given."""
    text = f"{module} needs a package that cannot be imported ({error}). Install it: pip install {install}"
    return MissingPackageError(text, name=error.name)


class CancelledError(HerringError):
    """The operation was given up on purpose by its owner."""


class CorruptedError(HerringError):
    """Data arrived damaged again and again (``HERRING_CHECKSUM``); the message names the peer."""


class NotFiniteError(HerringError, ArithmeticError):
    """A tensor that was to be reduced holds NaN or infinity (``HERRING_CHECK_FINITE``); the message names the ranks,
    the operation and the element."""


class InternalError(HerringError):
    """A bug in Herring."""


# By this TensorFlow knows an error that takes a text, and keeps its kind where it is raised in a tf.function.
HerringError.__init__ = Exception.__init__  # type: ignore[method-assign]

# What a traceback shows is what can be imported.
for _kind in (HerringError, *HerringError.__subclasses__(), MissingPackageError):
    _kind.__module__ = "herring"


def text_of(error: BaseException) -> str:
    """What other processes are told of it: "ValueError: ...", at most some 500 characters."""
    limit = 500
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= limit else text[:limit] + "..."
