"""Terminals."""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import AsyncIterator

from .. import _aio as aio
from .. import _core as core
from .. import errors
from .._core import Output
from .._result import Result
from .process import Process

#: unread output that read_until keeps
_MOST_UNREAD = 1 << 20


class Pty:
    """A command on a terminal. `async with` ends it, unless it was detached from or attached to.

    It outlives a broken link and this program: what it writes is kept, and attach_pty(number, offset) reads on.
    """

    def __init__(self, process: Process, offset: int, owned: bool) -> None:
        self._process = process
        self._pull = aio.Puller(aiter(process), process._link)
        self._owned = owned
        self._unread = bytearray()
        self._gaps: list[tuple[int, int]] = []  # where in it bytes are missing, and how many
        self._offset = offset
        self._ended = False

    def __repr__(self) -> str:
        return f"<Pty {self.number} of {self._process._follow.id[:8]}>"

    async def __aenter__(self) -> Pty:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def number(self) -> int:
        """Its number among the sandbox's processes."""
        return self._process.number

    @property
    def offset(self) -> int:
        """Bytes of output that were read so far: where attach_pty goes on."""
        return self._offset

    async def send(self, data: bytes | str) -> None:
        """Type."""
        await self._process.send(data)

    async def read(self, timeout: float | None = None) -> str:
        """What it wrote since; waits for the first of it. Empty at the end. Raises RequestTimeout."""
        deadline = _deadline(timeout)
        while not self._whole() and await self._more(deadline):
            pass
        return self._take(self._whole() or len(self._unread))

    async def read_until(self, pattern: str | re.Pattern[str], timeout: float | None = None) -> str:
        """What it wrote up to and with the pattern, a text or a regular expression.

        Raises RequestTimeout, and StreamEnded when it ends before; what was written then stays for the next read. Of
        more than 1 MiB without a match the oldest is dropped.
        """
        deadline = _deadline(timeout)
        while True:
            end = self._find(pattern)
            if end is not None:
                return self._take(end)
            if len(self._unread) > _MOST_UNREAD:
                self._take(len(self._unread) - _MOST_UNREAD)
            if not await self._more(deadline):
                name = pattern if isinstance(pattern, str) else pattern.pattern
                raise errors.StreamEnded(
                    f"terminal {self.number} ended before {name!r}: {bytes(self._unread[-200:])!r}"
                )

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        text = await self.read()
        if not text:
            raise StopAsyncIteration
        return text

    async def resize(self, cols: int, rows: int) -> None:
        """Set its size, in characters."""
        op = core.resize(self._process._follow.id, self.number, cols, rows)
        await self._process._client._drive(op)

    async def kill(self, signal: int = 9) -> None:
        """Send a signal to the command and all that it started."""
        await self._process.kill(signal)

    async def wait(self) -> Result:
        """Read on to the end."""
        while await self._more(None):
            self._take(len(self._unread))
        return await self._process.wait()

    async def detach(self) -> None:
        """Let go of it: it runs on."""
        self._owned = False
        await self.close()

    async def close(self) -> None:
        """Let go of it, and end it if it was opened here."""
        if self._owned and not self._ended:
            await self._process._client._cleanups.run(self._process._end)
        self._owned = False
        await self._pull.close()
        await self._process.aclose()

    async def _more(self, deadline: float | None) -> bool:
        """Wait for another piece of output; False at the end."""
        if self._ended:
            return False
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            output: Output | None = await self._pull.next(left)
        except TimeoutError as e:
            if isinstance(e, errors.SandseaError):
                raise
            tail = bytes(self._unread[-200:])
            raise errors.RequestTimeout(f"terminal {self.number}: not in time; unread so far: {tail!r}") from None
        if output is None:
            self._ended = True
            return False
        if output.gap:
            self._gaps.append((len(self._unread), output.gap))
        self._unread += output.data
        return True

    def _whole(self) -> int:
        """Bytes of whole characters at the front of what is unread."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self._unread[-4:]))
        return len(self._unread) - len(decoder.getstate()[0])

    def _find(self, pattern: str | re.Pattern[str]) -> int | None:
        """Where the pattern ends in what is unread."""
        if isinstance(pattern, str):
            wanted = pattern.encode()
            at = self._unread.find(wanted)
            return None if at < 0 else at + len(wanted)
        # Each byte that is no character stands for itself, so that the length comes out right.
        text = bytes(self._unread[: None if self._ended else self._whole()]).decode("utf-8", "surrogateescape")
        found = pattern.search(text)
        return None if found is None else len(text[: found.end()].encode("utf-8", "surrogateescape"))

    def _take(self, size: int) -> str:
        data = bytes(self._unread[:size])
        del self._unread[:size]
        self._offset += size
        self._gaps = [(at - size, gap) for at, gap in self._gaps]
        while self._gaps and self._gaps[0][0] <= 0:
            self._offset += self._gaps.pop(0)[1]
        return data.decode("utf-8", "replace")


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout
