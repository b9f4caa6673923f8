"""Environment for Harbor: `harbor run --env sandsea.adaptors.harbor:SandseaEnvironment`.

A task needs a ready image (`docker_image` in its task.toml, or `--ek image=NAME`): one that the server has, or one of a
registry, which is then imported.
"""

# mypy: disable-error-code="import-not-found,misc,no-any-return"

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.models.trial.config import ResourceMode

from .. import Client, ContainerRunArgs, Sandbox, errors
from ._errors import raising

# What Harbor calls a public network: every name, and the package services by their mirrors.
_PUBLIC = dict.fromkeys(("pypi", "npm", "golang", "crates", "debian", "maven", "rubygems", "*"), True)


class SandseaError(RuntimeError):
    """The platform failed or the sandbox is gone: an error of the trial, never a result."""


class SandseaEnvironment(BaseEnvironment):
    """One sandbox, for one trial."""

    def __init__(self, *args: Any, image: str | None = None, ready_timeout: float = 600.0, **kwargs: Any) -> None:
        self._image = image
        self._ready_timeout = float(ready_timeout)
        self._client: Client | None = None
        self._sandbox: Sandbox | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "sandsea"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    def _validate_definition(self) -> None:
        if not (self._image or self.task_env_config.docker_image):
            raise FileNotFoundError(
                f"{self.environment_dir}: no image. "
                "Set docker_image under [environment] in task.toml, or --ek image=NAME"
            )

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the trial, once it is started."""
        if self._sandbox is None:
            raise SandseaError("the environment is not started")
        return self._sandbox

    # --- life

    async def start(self, force_build: bool) -> None:
        image = self._image or self.task_env_config.docker_image or ""
        self._client = Client()
        network = dict(_PUBLIC) if self._network_is_public else {}
        if network and not (await self._client.capabilities()).network_entries:
            self.logger.warning("no node enforces network policies: what the task fetches will not be there")
            network = {}
        args = ContainerRunArgs(
            container_image=image,
            workdir=self.task_env_config.workdir or "",
            cpu_cores_limit=self._resource_limit_value("cpu", auto_mode=ResourceMode.LIMIT) or 0,
            memory_limit_mb=self._resource_limit_value("memory", auto_mode=ResourceMode.LIMIT) or 0,
            disk_limit_mb=self._effective_storage_mb or 0,
            env=self._startup_env(),
            labels={"adaptor": "harbor", "session": self.session_id[:256]},
            network_rules=network,
        )
        with raising(SandseaError):
            try:
                self._sandbox = await self._client.run_container(args, timeout=self._ready_timeout)
            except errors.NotFound:
                self.logger.info("image %s is not here: importing it", image)
                await self._client.import_registry(image)
                self._sandbox = await self._client.run_container(args, timeout=self._ready_timeout)
        targets = self._mount_targets(writable_only=True)
        if targets:
            await self.ensure_dirs(targets)
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        sandbox, client = self._sandbox, self._client
        self._sandbox = self._client = None
        try:
            if sandbox is not None and delete:
                with raising(SandseaError):
                    await sandbox.stop()
            elif sandbox is not None:
                sandbox.disown()
        finally:
            if client is not None:
                await client.close()

    # --- commands

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        with raising(SandseaError):
            # Cancelled, as Harbor does with an agent that is out of time, it kills all that the command started.
            r = await self.sandbox.run_shell(
                command, timeout=timeout_sec, cwd=cwd or "", env=self._merge_env(env),
                user="" if who is None else str(who),
            )  # fmt: skip
        if r.timed_out:
            raise TimeoutError(
                f"Command timed out after {timeout_sec} seconds; it wrote:\n{_tail(r.stdout + r.stderr)}"
            )
        if r.start_failure and r.start_failure != "cwd":
            raise SandseaError(f"the command was not started: {r.start_message}")
        stderr = r.stderr if not r.start_failure else f"{r.start_message}\n"
        return ExecResult(stdout=r.stdout, stderr=stderr, return_code=r.exit_code)

    # --- files; natively, so that an image needs no tar

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        source = Path(source_path)
        with raising(SandseaError):
            await self.sandbox.files.write(
                target_path,
                await asyncio.to_thread(source.read_bytes),
                user="root",
                mode=source.stat().st_mode & 0o7777,
            )

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        with raising(SandseaError):
            await self.sandbox.files.make_dir(target_dir, user="root")
            await self.sandbox.files.upload(source_dir, target_dir, user="root", owner="root")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        with raising(SandseaError):
            data = await self.sandbox.files.read(source_path, user="root")
        target = Path(target_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(target.write_bytes, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        target = Path(target_dir)
        target.mkdir(parents=True, exist_ok=True)
        with raising(SandseaError):
            await self.sandbox.files.download(source_dir, target, user="root")

    async def is_dir(self, path: str, user: str | int | None = None) -> bool:
        return await self._is(path, user, "FILE_TYPE_DIRECTORY")

    async def is_file(self, path: str, user: str | int | None = None) -> bool:
        return await self._is(path, user, "FILE_TYPE_REGULAR")

    async def _is(self, path: str, user: str | int | None, kind: str) -> bool:
        who = self._resolve_user(user)
        try:
            with raising(SandseaError):
                info = await self.sandbox.files.stat(path, user="" if who is None else str(who))
        except errors.FileError:
            return False
        return info.type == kind


def _tail(text: str, most: int = 4096) -> str:
    return text if len(text) <= most else "…" + text[-most:]
