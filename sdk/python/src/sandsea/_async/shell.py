"""Shell sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import _core as core
from .. import _models as m
from .._result import Result, make

if TYPE_CHECKING:
    from .client import Client


class Shell:
    """A shell that keeps its working directory, variables, functions and options from command to command.

    Each command is a shell process of its own, so nothing that it does ends the session. `async with` closes it.
    """

    def __init__(self, client: Client, id: str, info: m.Shell) -> None:
        self._client = client
        self._id = id
        self.info = info

    def __repr__(self) -> str:
        return f"<Shell {self.name} of {self._id[:8]} in {self.cwd}>"

    async def __aenter__(self) -> Shell:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def name(self) -> str:
        """Its name, unique in its sandbox."""
        return self.info.name

    @property
    def cwd(self) -> str:
        """Its working directory after the last command."""
        return self.info.cwd

    async def run(
        self,
        script: str,
        *,
        timeout: float | None = None,
        stdin: bytes | str | None = None,
        merge_stderr: bool = False,
        max_output: int = core.MAX_OUTPUT,
        overflow: core.Overflow = "head_tail",
        errors: str = "replace",
        key: str = "",
    ) -> Result:
        """Run any piece of shell script and wait for its end; the session then stands where it left it.

        After a time limit, `exec` or `kill -9 $$` the session is as before (result.state_lost). A script that cannot be
        parsed runs not at all (result.syntax_error). Calls take turns. A cancelled call kills the command, unless it
        has a key.
        """
        request = m.RunInShellRequest(
            id=self._id,
            shell=self.name,
            script=script,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            merge_stderr=merge_stderr,
            timeout_ms=core.milliseconds(timeout),
            max_output_bytes=max_output,
            overflow=core.overflow_name(overflow),
            key=key,
        )
        answer = await self._client._drive(core.run_in_shell(request, timeout))
        self.info = answer.shell or self.info
        run = answer.run or m.RunResponse()
        await self._client._drive(core.alive_after(self._id, run.result))
        return make(
            self._id,
            m.Process(number=run.number, result=run.result),
            run.stdout,
            run.stderr,
            cut=bool(run.stdout_gap_bytes or run.stderr_gap_bytes),
            errors=errors,
            argv=(script,),
            syntax_error=answer.syntax_error,
            state_lost=answer.state_lost,
        )

    async def interrupt(self, signal: int = 2) -> bool:
        """Send SIGINT to the command that runs in it and all that it started; False when none runs."""
        running = [
            p
            for p in await self._client._drive(core.processes(self._id))
            if p.shell == self.name and p.state == "PROCESS_STATE_RUNNING"
        ]
        for p in running:
            await self._client._drive(core.signal(self._id, p.number, signal, True))
        return bool(running)

    async def close(self) -> None:
        """Forget it and kill the command that runs in it; a second time does nothing."""
        await self._client._drive(core.close_shell(self._id, self.name))
