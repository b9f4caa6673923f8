"""Provider of sandboxes for inspect-ai: `Task(sandbox=("sandsea", "IMAGE"))`, or `SandseaConfig` for more."""

# mypy: disable-error-code="import-not-found,misc,call-arg,no-any-return"

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict, Field

from .. import Client, ContainerRunArgs, Sandbox, errors
from ._errors import raising

_LABEL = "adaptor"
_NAME = "inspect"


class SandseaConfig(BaseModel, frozen=True):
    """What the sandbox of a sample shall be."""

    model_config = ConfigDict(extra="forbid")

    #: name or digest of an image
    image: str = ""
    #: who commands and files act as; empty: the image's
    user: str = ""
    #: where relative paths lead; empty: the image's
    workdir: str = ""
    memory_mb: int = 0
    cpus: float = 0
    disk_mb: int = 0
    pids: int = 0
    env: dict[str, str] = Field(default_factory=dict)
    #: seconds after which it ends in any case; 0: the server's default of a day
    ttl: float = 0
    #: seconds that a sample waits for its sandbox
    ready_timeout: float = 600.0

    def __hash__(self) -> int:
        # inspect keeps configs in dictionaries; a model with a mapping in it has no hash of its own.
        return hash(self.model_dump_json())


@sandboxenv(name="sandsea")
class SandseaSandboxEnvironment(SandboxEnvironment):
    """One sandbox, for one sample."""

    def __init__(self, client: Client, sandbox: Sandbox) -> None:
        super().__init__()
        self.client = client
        self.sandbox = sandbox

    # --- life

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        with raising(SandboxUnavailableError):
            async with Client():
                return

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        c = _config(config)
        client = Client()
        args = ContainerRunArgs(
            container_image=c.image, init_user=c.user, workdir=c.workdir, memory_limit_mb=c.memory_mb,
            cpu_cores_limit=c.cpus, disk_limit_mb=c.disk_mb, pids_limit=c.pids, env=c.env, ttl=c.ttl,
            labels={_LABEL: _NAME, "task": task_name[:256]},
        )  # fmt: skip
        try:
            with raising(SandboxUnavailableError):
                return {"default": cls(client, await client.run_container(args, timeout=c.ready_timeout))}
        except BaseException:
            await client.close()
            raise

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        for env in environments.values():
            own = env.as_type(cls)
            # One that cannot be stopped now ends by its time limit; what the sample gave must not be lost for it.
            with contextlib.suppress(errors.SandseaError):
                await own.sandbox.stop()
            await own.client.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        async with Client() as c:
            for sb in await c.list({_LABEL: _NAME}):
                if id is None or sb.id.startswith(id):
                    await c.sandbox(sb.id).stop()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return SandseaConfig(**config)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        if not await self.sandbox.is_alive():
            raise ConnectionError(f"sandbox {self.sandbox.id[:8]} does not run")
        who = ["--user", user] if user else []
        command = " ".join(["sandsea", "exec", "-it", *who, self.sandbox.id, "--", "sh", "-l"])
        return SandboxConnection(type="sandsea", command=command, container=self.sandbox.id)

    # --- commands

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        with raising(SandboxUnavailableError):
            r = await self.sandbox.run(
                cmd, stdin=input, cwd=cwd or "", env=env, user=user or "", timeout=timeout,
                max_output=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE, overflow="tail",
            )  # fmt: skip
        if r.timed_out:
            # Never tried again: what the command did until then is done.
            e = TimeoutError(f"Command timed out after {timeout} seconds")
            e.truncated_output = r.stdout + r.stderr  # type: ignore[attr-defined]
            raise e
        if r.start_failure == "not_executable":
            raise PermissionError(r.start_errno or errno.EACCES, r.start_message or "not executable", cmd[0])
        if r.start_failure:
            return ExecResult(False, r.exit_code, "", f"{r.start_message}\n")
        return ExecResult(r.exit_code == 0, r.exit_code, r.stdout, r.stderr)

    # --- files

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = contents.encode() if isinstance(contents, str) else contents
        with raising(SandboxUnavailableError):
            await self.sandbox.files.write(file, data)

    async def read_file(self, file: str, text: bool = True) -> Any:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            with raising(SandboxUnavailableError):
                data = await self.sandbox.files.read(file, max_bytes=limit)
        except errors.FileTooLarge as e:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from e
        return data.decode() if text else data


def _config(config: Any) -> SandseaConfig:
    if config is None:
        return SandseaConfig(image=os.environ.get("SANDSEA_IMAGE", ""))
    if isinstance(config, str):
        return SandseaConfig(image=config)
    if isinstance(config, SandseaConfig):
        return config
    raise ValueError(f"sandbox config {type(config).__name__}: give the name of an image, or a SandseaConfig")
