"""One table for all adaptors: whose fault an exception of the SDK is.

A framework turns its own exceptions into rewards and messages to a model. What the platform did wrong, or that the
sandbox is gone, must never become one of these: it is raised as the framework's own word for a broken environment.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator

from .. import errors


class Fault(enum.Enum):
    """Whose fault, and so what a framework may do with it."""

    #: the platform's: run the sample again, never score it
    PLATFORM = "platform"
    #: the sandbox is no more: nothing more can be done in it
    ENDED = "ended"
    #: no room now: wait, or run it again
    QUOTA = "quota"
    #: what was asked for cannot be: a wrong image name, setting or token
    REQUEST = "request"
    #: a file call failed inside, as local files do; it is a builtin exception too
    FILE = "file"
    #: the command itself: its exit code, its time limit, its program
    COMMAND = "command"


# The first line that fits decides.
_TABLE: tuple[tuple[type[errors.SandseaError], Fault], ...] = (
    (errors.CommandFailed, Fault.COMMAND),
    (errors.FileError, Fault.FILE),
    (errors.InfraError, Fault.PLATFORM),
    # The platform gave no answer in time. It is a TimeoutError too, which frameworks take for the command's.
    (errors.RequestTimeout, Fault.PLATFORM),
    (errors.SandboxEnded, Fault.ENDED),
    (errors.Exhausted, Fault.QUOTA),
    (errors.StreamEnded, Fault.PLATFORM),
    (errors.InvalidRequest, Fault.REQUEST),
    (errors.NotFound, Fault.REQUEST),
    (errors.AlreadyExists, Fault.REQUEST),
    (errors.PreconditionFailed, Fault.REQUEST),
    (errors.Denied, Fault.REQUEST),
    (errors.Unauthenticated, Fault.REQUEST),
)


def fault(e: errors.SandseaError) -> Fault:
    """Whose fault e is; one that nobody knows is the platform's."""
    return next((f for kind, f in _TABLE if isinstance(e, kind)), Fault.PLATFORM)


@contextlib.contextmanager
def raising(broken: Callable[[str], Exception]) -> Iterator[None]:
    """Raise the framework's own exception for what is neither the command's nor a file's."""
    try:
        yield
    except errors.SandseaError as e:
        if fault(e) in (Fault.COMMAND, Fault.FILE):
            raise
        raise broken(str(e)) from e
