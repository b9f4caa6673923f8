"""What the asynchronous front needs of its world. `_sio` is the same for the synchronous one."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TypeVar

import httpx

T = TypeVar("T")

STREAM_TIMEOUT = httpx.Timeout(None, connect=5.0)


class Pools:
    """One pool of connections for each event loop, since connections belong to the loop that made them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    def get(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None or pool.is_closed:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            pool = httpx.AsyncClient(base_url=self._url, limits=limits, timeout=STREAM_TIMEOUT)
            self._pools[loop] = pool
        return pool

    async def close(self) -> None:
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.aclose()


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def body(messages: Iterator[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


Event = asyncio.Event


async def shielded(op: Awaitable[T]) -> T:
    """Finish even when the caller is being cancelled."""
    return await asyncio.shield(asyncio.ensure_future(op))


@asynccontextmanager
async def beside(task: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Run a task beside the block; it is over when the block is."""
    running = asyncio.ensure_future(task()) if task is not None else None
    try:
        yield
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
