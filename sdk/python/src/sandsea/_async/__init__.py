"""The asynchronous front."""

from .client import Client
from .files import Files, Watch
from .network import NetworkLog
from .process import Process
from .sandbox import Sandbox
from .shell import Shell
from .terminal import Pty

__all__ = ["Client", "Files", "NetworkLog", "Process", "Pty", "Sandbox", "Shell", "Watch"]
