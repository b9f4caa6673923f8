"""The flow log of a sandbox."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from .. import _aio as aio
from .. import _core as core
from .. import _models as m
from .. import errors

if TYPE_CHECKING:
    from .client import Client


class NetworkLog:
    """An async iterator of NetworkEvents. A broken link is taken up where it broke.

    `missing` counts events before the first that are gone, and `next_seq` is where to go on later.
    """

    def __init__(self, client: Client, request: m.NetworkLogRequest) -> None:
        self._client = client
        self._request = request
        self._home = aio.Home()
        self._events = self._run()
        self.next_seq = request.from_seq
        self.missing = 0

    async def __aenter__(self) -> NetworkLog:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[m.NetworkEvent]:
        return self

    async def __anext__(self) -> m.NetworkEvent:
        self._home.check("this network log", f"Make another: network_log(from_seq={self.next_seq})")
        return await anext(self._events)

    async def close(self) -> None:
        """Stop reading."""
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[m.NetworkEvent, None]:
        broken: float | None = None
        attempt = 0
        at = self._request.from_seq
        while True:
            self._request.from_seq = at
            stream = self._client._stream(core.network_path("Log"), self._request.to_json())
            try:
                async for doc in stream:
                    r = m.NetworkLogResponse.from_json(doc)
                    self.missing += r.missing
                    broken, attempt = None, 0
                    for event in r.events:
                        at = event.seq + 1
                        self.next_seq = at
                        yield event
                    at = max(at, r.next_seq)
                    self.next_seq = at
                return
            except errors.SandseaError as e:
                now = time.monotonic()
                broken = now if broken is None else broken
                wait = self._client._pause(e, attempt, now - broken, core.RECONNECT_SECONDS - (now - broken))
                if wait is None:
                    raise
                attempt += 1
                await aio.sleep(wait)
            finally:
                await stream.aclose()
