"""Environment for mini-swe-agent: `environment_class: sandsea.adaptors.mini.SandseaEnvironment`."""

# mypy: disable-error-code="import-not-found,misc,no-any-return"

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import platform
import threading
import weakref
from typing import Any

from minisweagent.exceptions import Submitted
from pydantic import BaseModel

from .. import ContainerRunArgs, errors
from ..sync import Client, Sandbox
from ._errors import raising

_SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
# Of the output that a model may see, far more than any keeps.
_MAX_OUTPUT = 10 << 20


class SandseaError(RuntimeError):
    """The platform failed or the sandbox is gone: the run is over, and its state is no result."""


class SandseaEnvironmentConfig(BaseModel):
    """What the sandbox shall be, and how commands run in it."""

    #: name or digest of an image
    image: str
    #: where commands run; empty: the image's working directory
    cwd: str = ""
    env: dict[str, str] = {}
    #: variables of this process that are handed on if they are set; those of env win
    forward_env: list[str] = []
    #: seconds that a command may take
    timeout: float = 30
    #: the command is its last argument
    interpreter: list[str] = ["bash", "-lc"]
    #: who commands act as; empty: the image's user
    user: str = ""
    memory_mb: int = 0
    cpus: float = 0
    disk_mb: int = 0
    #: seconds after which it ends in any case
    ttl: float = 7200
    #: seconds to wait for it
    ready_timeout: float = 600


class SandseaEnvironment:
    """One sandbox, for one run of an agent."""

    def __init__(
        self, *, config_class: type = SandseaEnvironmentConfig, logger: logging.Logger | None = None, **kwargs: Any
    ) -> None:
        self.logger = logger or logging.getLogger("minisweagent.environment")
        self.config = config_class(**kwargs)
        self._lock = threading.Lock()
        self._client = Client()
        c = self.config
        args = ContainerRunArgs(
            container_image=c.image, init_user=c.user, workdir=c.cwd, memory_limit_mb=c.memory_mb,
            cpu_cores_limit=c.cpus, disk_limit_mb=c.disk_mb, ttl=c.ttl, labels={"adaptor": "mini-swe-agent"},
        )  # fmt: skip
        with raising(SandseaError):
            self.sandbox: Sandbox | None = self._client.run_container(args, timeout=c.ready_timeout)
        self.logger.info("started sandbox %s", self.sandbox.id)
        # Also when the program ends without a word.
        self._at_exit = functools.partial(_clean, weakref.WeakMethod(self.cleanup))
        atexit.register(self._at_exit)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        # What a prompt says of the machine is true of the sandbox: Linux, on the node's processor.
        machine = {
            "system": "Linux",
            "machine": platform.machine(),
            "release": platform.release(),
            "version": "",
            "node": "",
        }
        return {**self.config.model_dump(), **machine, **kwargs}

    def serialize(self) -> dict[str, Any]:
        own = type(self)
        return {
            "info": {
                "config": {
                    "environment": self.config.model_dump(mode="json"),
                    "environment_type": f"{own.__module__}.{own.__name__}",
                }
            }
        }

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None) -> dict[str, Any]:
        """Run a command to its end, its two streams merged as they came."""
        if self.sandbox is None:
            raise SandseaError("the sandbox was stopped")
        limit = timeout or self.config.timeout
        env = {k: os.environ[k] for k in self.config.forward_env if k in os.environ}
        with raising(SandseaError):
            r = self.sandbox.run(
                [*self.config.interpreter, str(action.get("command", ""))], cwd=cwd or self.config.cwd,
                env={**env, **self.config.env}, timeout=limit, merge_stderr=True, max_output=_MAX_OUTPUT,
            )  # fmt: skip
        output: dict[str, Any] = {"output": r.stdout, "returncode": r.exit_code, "exception_info": ""}
        if r.timed_out:
            output |= _failed("TimeoutExpired", f"the command timed out after {limit} seconds")
        elif r.start_failure:
            output |= _failed("OSError", r.start_message or r.start_failure)
        self._check_finished(output)
        return output

    def _check_finished(self, output: dict[str, Any]) -> None:
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == _SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            raise Submitted(
                {
                    "role": "exit",
                    "content": submission,
                    "extra": {"exit_status": "Submitted", "submission": submission},
                }
            )

    def cleanup(self) -> None:
        """Stop the sandbox; a second time does nothing."""
        with self._lock:
            sandbox, self.sandbox = self.sandbox, None
        if sandbox is None:
            return
        atexit.unregister(self._at_exit)
        # One that cannot be stopped now ends by its time limit.
        with contextlib.suppress(errors.SandseaError):
            sandbox.stop()
        self._client.close()

    def __del__(self) -> None:
        if getattr(self, "sandbox", None) is not None:
            self.cleanup()


def _clean(method: weakref.WeakMethod[Any]) -> None:
    cleanup = method()
    if cleanup is not None:
        cleanup()


def _failed(kind: str, what: str) -> dict[str, Any]:
    return {
        "returncode": -1,
        "exception_info": f"An error occurred while executing the command: {what}",
        "extra": {"exception_type": kind, "exception": what},
    }
