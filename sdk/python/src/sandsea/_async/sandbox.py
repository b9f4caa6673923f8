"""Handles of sandboxes."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Literal

from .. import _aio as aio
from .. import _core as core
from .. import _models as m
from .. import _network as network
from .. import errors
from .._result import Result
from .files import Files
from .network import NetworkLog
from .process import Process, feed
from .shell import Shell
from .terminal import Pty

if TYPE_CHECKING:
    from .client import Client

_NO_RULES: Mapping[str, bool] = MappingProxyType({})
#: bash if the image has it, else sh
_ANY_SHELL = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash -i || exec sh -i")


class Sandbox:
    """One sandbox. `async with` stops it at the end.

    Commands are lists of strings, which no shell sees, or one string, a command line of bash. Times are in seconds.
    """

    def __init__(self, client: Client, info: m.Sandbox, owned: bool = True) -> None:
        self._client = client
        self.info = info
        self.files = Files(client, info.id)
        self._owned = owned

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def state(self) -> str:
        """creating, running, stopping, ended or lost, when last heard of; empty before."""
        return self.info.state.removeprefix("SANDBOX_STATE_").lower()

    def __repr__(self) -> str:
        env = self.info.spec.environment if self.info.spec else None
        image = (env.image or env.base) if env else ""
        return " ".join(f"<Sandbox {self.id[:8]} {self.state} {image}".split()) + ">"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: object, e: BaseException | None, trace: object) -> None:
        try:
            await self.stop()
        except errors.SandseaError as failed:
            if e is None:
                raise
            # What went wrong first is what the caller must see.
            warnings.warn(
                f"sandbox {self.id[:8]} was not stopped and runs until its time limit: {failed}",
                RuntimeWarning,
                stacklevel=2,
            )

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and os.getpid() == self._client._pid:
            warnings.warn(
                f"sandbox {self.id[:8]} was dropped and runs on. Use it in `async with`, stop() it, or disown() it",
                RuntimeWarning,
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"client": self._client, "id": self.id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["client"], m.Sandbox(id=state["id"]), owned=False)  # type: ignore[misc]

    def to_json(self) -> dict[str, str]:
        """The handle as JSON: the server's URL and the id, no token. from_json makes it a handle again."""
        return {"schema": "sandsea.handle/1", "url": self._client.url, "id": self.id}

    @staticmethod
    def from_json(handle: Mapping[str, str], client: Client | None = None) -> Sandbox:
        """The handle that to_json wrote, in another program perhaps; asks nobody. Without a client it gets its own."""
        from .client import Client

        return (client or Client(handle["url"])).sandbox(handle["id"])

    def disown(self) -> None:
        """Let it run on when this handle is dropped."""
        self._owned = False

    # --- life

    async def refresh(self) -> m.Sandbox:
        """Ask its node for its state; neither wakes it nor counts as use."""
        self.info = await self._client._drive(core.get(self.id))
        if self.state in ("ended", "lost"):
            self._owned = False
        return self.info

    async def is_alive(self) -> bool:
        """True while it runs; never raises for a sandbox that is gone."""
        try:
            return (await self.refresh()).state == "SANDBOX_STATE_RUNNING"
        except (errors.NotFound, errors.Lost, errors.SandboxEnded):
            self._owned = False
            return False

    async def stop(self, grace: float = 0.0) -> None:
        """End it; a second time does nothing."""
        self._owned = False
        # A caller that is being cancelled still stops what it made.
        self.info = await self._client._cleanups.run(lambda: self._client._drive(core.stop(self.id, grace)))

    async def extend_ttl(self, seconds: float) -> None:
        """Move the hard end to so many seconds from now."""
        self.info = await self._client._drive(core.extend_ttl(self.id, seconds))

    async def processes(self) -> list[m.Process]:
        """What calls have started in it, ended ones too."""
        return await self._client._drive(core.processes(self.id))

    # --- network

    async def set_network(
        self,
        rules: network.NetworkRules = _NO_RULES,
        *,
        as_of: network.Moment | None = None,
        deny: Sequence[str] = (),
        phases: Mapping[str, network.PhaseRules] | None = None,
        phase: str = "",
    ) -> None:
        """Replace what may leave it, as in ContainerRunArgs; returns when that is in force.

        Connections that the new policy does not allow are cut within two seconds. After an error the old one holds.
        """
        policy = network.policy(rules, as_of=as_of, deny=deny, phases=phases, phase=phase)
        self.info = await self._client._drive(core.set_network(self.id, policy))

    async def set_phase(self, phase: str) -> None:
        """Put another phase of the policy in force, likewise."""
        self.info = await self._client._drive(core.set_phase(self.id, phase))

    async def check_network(
        self,
        host: str = "",
        *,
        port: int = 0,
        protocol: Literal["tcp", "udp"] = "tcp",
        service: str = "",
        package: str = "",
        version: str = "",
    ) -> m.CheckNetworkResponse:
        """Ask what the policy in force says of a host or address (port 443 unless given), or of a package service.

        Nothing is sent. That something is rejected is an answer, no exception: see `allowed`, `rule` and `reason`.
        """
        request = m.CheckNetworkRequest(
            id=self.id,
            host=host,
            port=port,
            protocol="NETWORK_PROTOCOL_" + protocol.upper(),
            service=service,
            package=package,
            version=version,
        )
        return await self._client._drive(core.check_network(request))

    def network_log(self, *, from_seq: int = 0, follow: bool = False, denied: bool = False) -> NetworkLog:
        """An async iterator of its flow log: DNS questions, connections, artefacts, denials, changes of the policy.

        from_seq is the first event wanted; denied chooses those that were rejected. With follow it goes on until the
        sandbox has ended. It can be read for as long as the output of commands.
        """
        return NetworkLog(self._client, m.NetworkLogRequest(self.id, from_seq, follow, denied))

    async def endpoint(self, port: int, *, ttl: float = 0) -> m.EndpointResponse:
        """The address of a TCP server inside: `url`, which ends in "/", and the `headers` that every request needs.

        The server may listen on any address or on the loopback one, and may start later: until then the answer is 502.
        What the platform answers has a header Sandsea-Error. It ends with the sandbox, or after ttl seconds.
        """
        return await self._client._drive(core.endpoint(self.id, port, ttl))

    # --- commands

    async def run(
        self,
        argv: str | Sequence[str],
        *,
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        stdin: bytes | str | IO[bytes] | None = None,
        merge_stderr: bool = False,
        max_output: int = core.MAX_OUTPUT,
        overflow: core.Overflow = "head_tail",
        errors: str = "replace",
        key: str = "",
    ) -> Result:
        """Run a command and wait for its end. Not exiting with 0 is no exception: see Result.check.

        timeout is the command's own: after it the whole tree is killed and the result says so; the client waits longer.
        max_output and overflow say how many bytes of each stream are returned, and which. errors is how bytes that are
        no UTF-8 become text. A cancelled call kills the command and all that it started, unless it has a key. So does a
        stdin that cannot be read; what it raises is raised here.
        """
        p = self.start(
            argv, timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env, stdin=stdin is not None,
            merge_stderr=merge_stderr, lossless=False, max_output=max_output, overflow=overflow, errors=errors, key=key,
        )  # fmt: skip
        try:
            async with aio.beside(None if stdin is None else functools.partial(feed, p, stdin)):
                result = await p.wait()
        finally:
            await p.aclose()
        if p.unfed is not None:
            raise p.unfed
        return result

    async def run_shell(
        self,
        line: str,
        *,
        shell: str = "bash",
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        stdin: bytes | str | IO[bytes] | None = None,
        merge_stderr: bool = False,
        max_output: int = core.MAX_OUTPUT,
        overflow: core.Overflow = "head_tail",
        errors: str = "replace",
        key: str = "",
    ) -> Result:
        """Run a command line by `shell -c`, which is no login shell; the options are those of run."""
        return await self.run(
            [shell, "-c", line], timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env, stdin=stdin,
            merge_stderr=merge_stderr, max_output=max_output, overflow=overflow, errors=errors, key=key,
        )  # fmt: skip

    def start(
        self,
        argv: str | Sequence[str],
        *,
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        stdin: bool = False,
        merge_stderr: bool = False,
        detached: bool = False,
        lossless: bool | None = None,
        max_output: int = core.MAX_OUTPUT,
        overflow: core.Overflow = "head_tail",
        errors: str = "replace",
        key: str = "",
    ) -> Process:
        """A command to read from while it runs, and to write to (stdin=True).

        It starts when it is first used: iterated over for its output, awaited, or sent to. detached lets it outlive
        this program. A reader that is more than 64 MiB behind makes the command wait, 60 s at most without progress;
        with lossless=False, and with detached, the command runs on and the reader may meet gaps.
        """
        lossless = not detached if lossless is None else lossless
        cmd = core.command(
            core.words(argv), timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env,
            merge_stderr=merge_stderr, overflow=overflow,
        )  # fmt: skip
        request = m.StartRequest(id=self.id, command=cmd, stdin=stdin, detached=detached, lossless=lossless, key=key)
        follow = core.Follow(self.id, request, limit=max_output, overflow=overflow, lossless=lossless, decode=errors)
        return aio.started(Process(self._client, follow, tuple(cmd.argv), errors, timeout))

    def attach(
        self,
        number: int,
        *,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        lossless: bool = True,
        max_output: int = core.MAX_OUTPUT,
        errors: str = "replace",
    ) -> Process:
        """The record of a command from byte offsets, while it runs and after it ended; lossless is as in start."""
        offsets = (stdout_offset, stderr_offset)
        follow = core.Follow(self.id, None, number, max_output, offsets=offsets, lossless=lossless, decode=errors)
        return Process(self._client, follow, (), errors, None)

    def pty(
        self,
        argv: str | Sequence[str] = _ANY_SHELL,
        *,
        cols: int = 80,
        rows: int = 24,
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
    ) -> aio.Opening[Pty]:
        """A command on a terminal of this size, a shell by default. Await it, or use it in `async with`."""
        cmd = core.command(
            core.words(argv), timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env, merge_stderr=False,
            overflow="head_tail",
        )  # fmt: skip
        # The key lets it outlive a broken link, and be detached from.
        request = m.StartRequest(
            id=self.id, command=cmd, key=core.new_key(), terminal=m.TerminalSize(columns=cols, rows=rows)
        )
        follow = core.Follow(self.id, request)
        return aio.opening(_open_pty(Process(self._client, follow, tuple(cmd.argv), "replace", timeout)))

    def attach_pty(self, number: int, offset: int = 0) -> aio.Opening[Pty]:
        """A terminal that runs, read on from a byte offset (Pty.offset). Leaving it does not end it."""
        follow = core.Follow(self.id, None, number, offsets=(offset, 0))
        return aio.opening(_attach_pty(Process(self._client, follow, (), "replace", None), offset))

    def shell(
        self,
        *,
        interpreter: str = "",
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        login: bool = False,
        name: str = "",
    ) -> aio.Opening[Shell]:
        """A shell session: what one command changes is there for the next. Await it, or use it in `async with`.

        interpreter is a path or name; without it bash if the image has it, else sh.
        """
        request = m.OpenShellRequest(
            id=self.id,
            name=name,
            interpreter=interpreter,
            user=user,
            cwd=cwd,
            env=dict(env or {}),
            env_mode="ENV_MODE_REPLACE" if replace_env else "",
            login=login,
            key=core.new_key(),
        )
        return aio.opening(_open_shell(self._client, request))


async def _open_pty(process: Process) -> Pty:
    return Pty(await process.begin(), 0, owned=True)


async def _attach_pty(process: Process, offset: int) -> Pty:
    return Pty(process, offset, owned=False)


async def _open_shell(client: Client, request: m.OpenShellRequest) -> Shell:
    return Shell(client, request.id, await client._drive(core.open_shell(request)))
