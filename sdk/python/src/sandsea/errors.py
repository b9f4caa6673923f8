"""What can go wrong, by whose fault it is. `str()` of each is one sentence that says what to do.

Every exception of this package is a `SandseaError`. Those that have a builtin counterpart are that builtin too, with
`errno`, `strerror` and `filename` set, so that code written for local files and processes keeps working.
"""

from __future__ import annotations

import errno as _errno
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._result import Result

__all__ = [
    "AlreadyExists",
    "CommandFailed",
    "CommandTimeout",
    "DataLoss",
    "Denied",
    "Exhausted",
    "FileError",
    "FileExists",
    "FilePermissionError",
    "FileTooLarge",
    "InfraError",
    "InvalidPath",
    "InvalidRequest",
    "IsADirectory",
    "Lost",
    "MissingFile",
    "NotADirectory",
    "NotFound",
    "OutcomeUnknown",
    "OutputLimitExceeded",
    "PreconditionFailed",
    "ProgramMissing",
    "ProgramNotExecutable",
    "RequestTimeout",
    "SandboxEnded",
    "SandseaError",
    "StartFailed",
    "StreamEnded",
    "Unauthenticated",
    "Unavailable",
    "WorkdirMissing",
]


class SandseaError(Exception):
    """The base of all. `detail` holds the server's facts (kind, object, field, limit, hint, ...)."""

    kind = "internal"

    def __init__(self, message: str, detail: dict[str, Any] | None = None) -> None:
        self.message = message
        self.detail: dict[str, Any] = detail or {}
        super().__init__(message)

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.detail))

    @property
    def hint(self) -> str:
        """What to do next."""
        return str(self.detail.get("hint", ""))

    @property
    def retryable(self) -> bool:
        """The same call may be sent again (after an unknown outcome: with the same key only)."""
        return bool(self.detail.get("retryable", False))

    @property
    def stage(self) -> str:
        """Where a create failed: "queue", "image" or "start"; empty elsewhere."""
        return str(self.detail.get("stage", ""))

    @property
    def retry_after(self) -> float | None:
        """Seconds after which a retry makes sense, if the server knows."""
        ms = int(self.detail.get("retry_after_ms", 0) or 0)
        return ms / 1000 if ms else None


class InvalidRequest(SandseaError, ValueError):
    """The request can never succeed as it is; `detail["field"]` names the field."""

    kind = "invalid"


class NotFound(SandseaError, LookupError):
    """No such sandbox, image or process among what the token may see."""

    kind = "not_found"


class AlreadyExists(SandseaError):
    """The name or key stands for something else."""

    kind = "already_exists"


class PreconditionFailed(SandseaError):
    """The object's state or the node's abilities forbid it."""

    kind = "failed_precondition"


class SandboxEnded(PreconditionFailed):
    """The sandbox is no more; `cause` says why."""

    @property
    def cause(self) -> str:
        """completed, stopped, ttl, idle, oom, disk, pids, output_limit, policy, agent_destroyed or infra_*."""
        return str(self.detail.get("cause", ""))


class Denied(SandseaError):
    """The token may not do this."""

    kind = "denied"


class Unauthenticated(SandseaError):
    """No valid token."""

    kind = "unauthenticated"


class Exhausted(SandseaError):
    """A limit or quota is met; `retry_after` says when to try again."""

    kind = "exhausted"


class RequestTimeout(SandseaError, TimeoutError):
    """The platform did not answer in time; the command itself may go on."""

    kind = "deadline"


class InfraError(SandseaError):
    """The platform's fault: never score it, run it again."""


class Unavailable(InfraError, ConnectionError):
    """A part of the platform is away."""

    kind = "unavailable"


class Lost(InfraError):
    """The sandbox is gone by the platform's fault, with its node or by its `cause`."""

    kind = "lost"

    @property
    def cause(self) -> str:
        """infra_lost, infra_killed, infra_orphaned, ...; empty when nobody knows."""
        return str(self.detail.get("cause", ""))


class OutcomeUnknown(InfraError):
    """It may have happened. Ask again with the same key."""

    kind = "unknown"


class DataLoss(InfraError):
    """Bytes are gone or changed under the reader."""

    kind = "data_loss"


class CommandFailed(SandseaError):
    """`Result.check()` of a command that did not exit with 0."""

    def __init__(self, message: str, result: Result) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.message, self.result))


class CommandTimeout(CommandFailed, TimeoutError):
    """The command's own time limit ended it; `partial` is what it wrote until then."""

    @property
    def partial(self) -> Result:
        """The result with the output so far."""
        return self.result


class OutputLimitExceeded(CommandFailed):
    """`Result.check()` of a command that wrote more than its limit, with overflow="fail"."""

    @property
    def partial(self) -> Result:
        """The result with the first bytes of the output."""
        return self.result


class StartFailed(CommandFailed, OSError):
    """`Result.check()` of a command that never ran; `result.start_failure` says why in one word."""

    def __init__(self, message: str, result: Result) -> None:
        CommandFailed.__init__(self, message, result)
        self.errno = result.start_errno or None
        self.strerror = os.strerror(result.start_errno) if result.start_errno else message
        self.filename = result.argv[0] if result.argv else None


class ProgramMissing(StartFailed, FileNotFoundError):
    """No such program."""


class ProgramNotExecutable(StartFailed, PermissionError):
    """The acting user may not execute it, or nothing can."""


class WorkdirMissing(StartFailed, FileNotFoundError):
    """The directory that the command should run in is not there."""


_START_FAILURES: dict[str, type[StartFailed]] = {
    "not_found": ProgramMissing,
    "not_executable": ProgramNotExecutable,
    "cwd": WorkdirMissing,
}


def start_failed(message: str, result: Result) -> StartFailed:
    """Make the exception for a command that never ran."""
    return _START_FAILURES.get(result.start_failure or "", StartFailed)(message, result)


class StreamEnded(SandseaError, EOFError):
    """The output was over before what was waited for came."""


class FileError(SandseaError, OSError):
    """A file call failed inside the sandbox."""

    def __init__(self, message: str, detail: dict[str, Any] | None = None) -> None:
        SandseaError.__init__(self, message, detail)
        code = int(self.detail.get("errno", 0) or 0) or _errno.EIO
        self.errno = code
        self.strerror = os.strerror(code)
        self.filename = self.detail.get("filename")


class MissingFile(FileError, NotFound, FileNotFoundError):
    """No such file or directory."""


class IsADirectory(FileError, IsADirectoryError):
    """A file was wanted."""


class NotADirectory(FileError, NotADirectoryError):
    """A directory was wanted."""


class FilePermissionError(FileError, Denied, PermissionError):
    """The acting user may not."""


class FileExists(FileError, AlreadyExists, FileExistsError):
    """The path is taken."""


class InvalidPath(FileError, InvalidRequest):
    """No path that a file could have: relative where an absolute one is needed, too long, with a NUL."""


class FileTooLarge(FileError):
    """Larger than `max_bytes`; nothing was sent."""


_KINDS: dict[str, type[SandseaError]] = {
    c.kind: c
    for c in (
        InvalidRequest,
        NotFound,
        AlreadyExists,
        PreconditionFailed,
        Denied,
        Unauthenticated,
        Exhausted,
        RequestTimeout,
        Unavailable,
        Lost,
        OutcomeUnknown,
        DataLoss,
    )
}

# Connect codes, for answers that carry no detail of ours (a proxy's, the library's own).
_CODES = {
    "invalid_argument": "invalid",
    "permission_denied": "denied",
    "resource_exhausted": "exhausted",
    "deadline_exceeded": "deadline",
    "aborted": "unavailable",
    "unimplemented": "failed_precondition",
    "unknown": "internal",
}

_FILE_ERRORS: dict[int, type[FileError]] = {
    _errno.ENOENT: MissingFile,
    _errno.EEXIST: FileExists,
    _errno.EINVAL: InvalidPath,
    _errno.ENAMETOOLONG: InvalidPath,
    _errno.EISDIR: IsADirectory,
    _errno.ENOTDIR: NotADirectory,
    _errno.EACCES: FilePermissionError,
    _errno.EPERM: FilePermissionError,
    _errno.EFBIG: FileTooLarge,
}


def from_connect(error: dict[str, Any], filename: str | None = None) -> SandseaError:
    """Make the exception for a Connect error document."""
    code = str(error.get("code", "internal"))
    message = str(error.get("message", code))
    detail: dict[str, Any] = {}
    for d in error.get("details") or []:
        if d.get("type") == "sandsea.v1.ErrorDetail" and isinstance(d.get("debug"), dict):
            detail = {_snake(k): v for k, v in d["debug"].items()}
    if code == "unimplemented" and not detail:
        message = "the server does not know this call. It is older than this package: bring both to one release"
    return from_detail(message, detail, str(detail.get("kind") or _CODES.get(code, code)), filename)


def from_detail(message: str, detail: dict[str, Any], kind: str = "", filename: str | None = None) -> SandseaError:
    """Make the exception for the facts of an error; `kind` is that of the facts when empty."""
    kind = kind or str(detail.get("kind", "internal"))
    number = int(detail.get("errno", 0) or 0)
    if number and filename is not None:
        return _FILE_ERRORS.get(number, FileError)(message, {**detail, "filename": filename})
    if detail.get("cause") and kind in ("failed_precondition", "not_found"):
        return (Lost if str(detail["cause"]).startswith("infra_") else SandboxEnded)(message, detail)
    return _KINDS.get(kind, InfraError if kind == "internal" else SandseaError)(message, detail)


def _snake(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name)
