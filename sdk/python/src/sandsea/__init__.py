"""Client of Sandsea: thousands of isolated, stateful computers for agents.

The names here are asynchronous; `sandsea.sync` has the same ones without `await`.
"""

from . import _models as models
from . import errors
from ._async import Client, Files, Process, Sandbox
from ._core import ContainerRunArgs, Output
from ._result import Result
from .errors import (
    AlreadyExists,
    CommandFailed,
    CommandTimeout,
    Denied,
    Exhausted,
    FileError,
    InfraError,
    InvalidRequest,
    Lost,
    NotFound,
    OutcomeUnknown,
    PreconditionFailed,
    RequestTimeout,
    SandboxEnded,
    SandseaError,
    Unauthenticated,
    Unavailable,
)

__version__ = "0.1.0"

__all__ = [
    "AlreadyExists",
    "Client",
    "CommandFailed",
    "CommandTimeout",
    "ContainerRunArgs",
    "Denied",
    "Exhausted",
    "FileError",
    "Files",
    "InfraError",
    "InvalidRequest",
    "Lost",
    "NotFound",
    "OutcomeUnknown",
    "Output",
    "PreconditionFailed",
    "Process",
    "RequestTimeout",
    "Result",
    "Sandbox",
    "SandboxEnded",
    "SandseaError",
    "Unauthenticated",
    "Unavailable",
    "errors",
    "models",
]
