"""Client of Sandsea: thousands of isolated, stateful computers for agents.

The names here are asynchronous; `sandsea.sync` has the same ones without `await`.
"""

from . import _models as models
from . import errors
from ._async import Client, Files, NetworkLog, Process, Pty, Sandbox, Shell, Watch
from ._core import ContainerRunArgs, FileEvent, Output, Overflow
from ._network import Moment, NetworkRules, PhaseRules
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
    OutputLimitExceeded,
    PreconditionFailed,
    RequestTimeout,
    SandboxEnded,
    SandseaError,
    StartFailed,
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
    "FileEvent",
    "Files",
    "InfraError",
    "InvalidRequest",
    "Lost",
    "Moment",
    "NetworkLog",
    "NetworkRules",
    "NotFound",
    "OutcomeUnknown",
    "Output",
    "OutputLimitExceeded",
    "Overflow",
    "PhaseRules",
    "PreconditionFailed",
    "Process",
    "Pty",
    "RequestTimeout",
    "Result",
    "Sandbox",
    "SandboxEnded",
    "SandseaError",
    "Shell",
    "StartFailed",
    "Unauthenticated",
    "Unavailable",
    "Watch",
    "errors",
    "models",
]
