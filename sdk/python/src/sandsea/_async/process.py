"""Commands that run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from typing import IO, TYPE_CHECKING

from .. import _aio as aio
from .. import _core as core
from .. import errors
from .._core import Output
from .._result import Result, make

if TYPE_CHECKING:
    from .client import Client

_PIECE = 1 << 20


class Process:
    """A command: an async iterator of its output. `await` it to have it started, `wait()` for its end.

    Leaving it early, also by cancellation, kills the command and all that it started, unless it was started detached or
    with a key, or attached to.
    """

    def __init__(
        self, client: Client, follow: core.Follow, argv: tuple[str, ...], errors_mode: str, timeout: float | None
    ) -> None:
        self._client = client
        self._follow = follow
        self._argv = argv
        self._errors = errors_mode
        self._timeout = timeout
        self._home = aio.Home()
        self._link = aio.Link()
        self._turn = aio.Lock()  # one message at a time is taken
        self._begun = aio.Event()  # the number is known, or never will be
        self._input = aio.Lock()
        self._sent: int | None = 0 if follow.number == 0 else None
        self._messages = self._run()
        self._ready: deque[Output] = deque()
        self._over = False
        self._failure: errors.SandseaError | None = None
        #: what kept `feed` from giving it all of its input
        self.unfed: Exception | None = None

    def __repr__(self) -> str:
        state = "ended" if self._follow.process else "running" if self.number else "new"
        return f"<Process {self.number} of {self._follow.id[:8]} {state}>"

    # <asynchronous>
    def __await__(self) -> Generator[object, None, Process]:
        return self.begin().__await__()

    # </asynchronous>
    async def __aenter__(self) -> Process:
        return await self.begin()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def number(self) -> int:
        """Its number in the sandbox, 0 until it has started."""
        return self._follow.number

    @property
    def result(self) -> Result | None:
        """What it left, once the end of its output was read; see wait and poll."""
        p = self._follow.process
        if p is None:
            return None
        self._follow.check()
        out, err, cut = self._follow.value()
        return make(
            self._follow.id, p, out, err, cut=cut, errors=self._errors, argv=self._argv, exceeded=self._follow.exceeded
        )

    async def begin(self) -> Process:
        """Start it, if that has not been done."""
        while not self._over and not self.number:
            if await aio.try_lock(self._turn):
                try:
                    if not self._over and not self.number:
                        await self._step()
                finally:
                    self._turn.release()
            else:
                await self._begun.wait()
        if self._failure is not None and not self.number:
            raise self._failure
        return self

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        while not self._ready and not self._over:
            await self._turn.acquire()
            try:
                if not self._ready and not self._over:
                    await self._step()
            finally:
                self._turn.release()
        if self._ready:
            return self._ready.popleft()
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    async def wait(self) -> Result:
        """Read on to the end."""
        async for _ in self:
            pass
        result = self.result
        if result is None:
            raise errors.OutcomeUnknown(f"process {self.number} of {self._follow.id[:8]}: reading it was given up")
        return result

    async def poll(self) -> int | None:
        """The exit code if it has ended, without reading its output; None while it runs."""
        if self.number and self._follow.process is None:
            for p in await self._client._drive(core.processes(self._follow.id)):
                if p.number == self.number and p.state != "PROCESS_STATE_RUNNING":
                    return p.result.exit_code if p.result else None
        return self._follow.process.result.exit_code if self._follow.process and self._follow.process.result else None

    async def send(self, data: bytes | str | IO[bytes]) -> None:
        """Write to standard input, all of it; returns when it was taken."""
        await self.begin()
        async with self._input:
            if self._sent is None:  # somebody else may have written before
                self._sent = await self._client._drive(core.send_input(self._follow.id, self.number, 0, b""))
            for piece in _pieces(data):
                op = core.send_input(self._follow.id, self.number, self._sent, piece)
                self._sent = await self._client._drive(op)

    async def close_input(self) -> None:
        """Give standard input its end."""
        await self.begin()
        async with self._input:
            await self._client._drive(core.close_input(self._follow.id, self.number))

    async def kill(self, signal: int = 9, *, tree: bool = True) -> None:
        """Send a signal to the command and all that it started; with tree=False to the command alone."""
        await self.begin()
        await self._client._drive(core.signal(self._follow.id, self.number, signal, tree))

    async def terminate(self) -> None:
        """Ask the command to end: SIGTERM, to it alone."""
        await self.kill(15, tree=False)

    async def aclose(self) -> None:
        """Stop reading. A command that this object started is killed with all that it started, unless it has a key, is
        detached, or has ended."""
        if self._follow.leashed and self.number and self._follow.process is None:
            await self._client._cleanups.run(self._end)
        self._over = True
        self._begun.set()
        if await aio.try_lock(self._turn):
            try:
                await self._messages.aclose()
            finally:
                self._turn.release()
        else:
            # Another one reads: it stops at the next message.
            self._link.cut()

    async def _end(self) -> bool:
        """Kill it with all that it started.

        False when it has ended, or the server cannot be asked: then that kills what lost its caller.
        """
        try:
            await self._client._drive(core.signal(self._follow.id, self.number, 9, True, timeout=5.0))
        except errors.SandseaError:
            return False
        return True

    async def _step(self) -> None:
        """Take one message. To be called with the turn."""
        self._home.check("this process", f"Take it up again: sandbox.attach({self.number})")
        try:
            output = await anext(self._messages)
            if output is not None:
                self._ready.append(output)
        except StopAsyncIteration:
            self._over = True
        except errors.SandseaError as e:
            self._over, self._failure = True, e
            raise
        except BaseException:
            self._over = True
            self._failure = errors.SandseaError("the reader of this process was cancelled, and the process with it")
            raise
        finally:
            if self._over or self.number:
                self._begun.set()

    async def _run(self) -> AsyncGenerator[Output | None, None]:
        """The messages of its story; None stands for one without output."""
        began = time.monotonic()
        broken: float | None = None
        attempt = 0
        while not self._link.over:
            limit = self._limit(began)
            path, body = self._follow.request()
            starting = self._follow.number == 0
            stream = self._client._stream(path, body, limit=limit, link=self._link)
            try:
                async for doc in stream:
                    broken, attempt = None, 0
                    yield self._follow.take(doc)
                    if self._follow.process is not None:
                        for output in self._follow.rest():
                            yield output
                        if not self._follow.attached:
                            await self._client._drive(core.alive_after(self._follow.id, self._follow.process.result))
                        return
                if not (starting and self._follow.number):  # else detached, and followed from here on
                    raise core.broken_off(f"process {self.number}: the stream ended before it did. Try again")
            except errors.SandseaError as e:
                # Who closed the client wants no new link, and without one the command is killed.
                given_up = not self._follow.can_resume or (self._follow.leashed and stream.hung_up)
                if e.detail.get("broken") and given_up:
                    raise errors.OutcomeUnknown(f"{e.message}. It may have run: look before a retry") from e
                now = time.monotonic()
                if broken is None:
                    broken = now
                trying = now - broken
                wait = self._client._pause(e, attempt, trying, (limit or core.RECONNECT_SECONDS) - trying)
                if wait is None:
                    raise
                self._follow.broke = self._follow.number > 0
                attempt += 1
                await aio.sleep(wait)
            finally:
                await stream.aclose()

    def _limit(self, began: float) -> float | None:
        """How long to wait for a word of the server: the command's own limit and a grace."""
        if not self._timeout:
            return None
        return max(core.GRACE_SECONDS, self._timeout + core.GRACE_SECONDS - (time.monotonic() - began))


async def feed(p: Process, data: bytes | str | IO[bytes]) -> None:
    """Write all of a command's standard input and close it. A command whose input cannot be read or sent would wait for
    the rest of it for ever, or take a part for the whole: it is killed, and `unfed` says why."""
    try:
        await p.send(data)
        await p.close_input()
    except (errors.PreconditionFailed, errors.NotFound, errors.Lost):
        # The command ended or closed its input; its own result tells.
        return
    except Exception as e:
        p.unfed = e
        if p.number:
            await p._end()


def _pieces(data: bytes | str | IO[bytes]) -> Generator[bytes, None, None]:
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes):
        for i in range(0, len(data), _PIECE):
            yield data[i : i + _PIECE]
        return
    while piece := data.read(_PIECE):
        if not isinstance(piece, bytes):
            raise TypeError(f"standard input gives {type(piece).__name__}: open it in binary mode")
        yield piece
