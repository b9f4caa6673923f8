"""What the asynchronous front needs of its world. `_sio` is the same for the synchronous one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import httpx

from . import errors
from ._net import STREAM_TIMEOUT, transport_options

T = TypeVar("T")

#: how often a cleanup is begun whose task is cancelled
_CLEANUP_ATTEMPTS = 3
#: turns of a loop in which a task that lost its connection has begun to clean up
_QUIET_TURNS = 50

Event = asyncio.Event
Lock = asyncio.Lock
sleep = asyncio.sleep
to_thread = asyncio.to_thread


class Pools:
    """One pool of connections for each event loop, since connections belong to the loop that made them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        # Guarded by the lock. The generator closes the pool when its loop shuts its asynchronous generators down, as
        # asyncio.run does at the end.
        self._pools: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None, None]]] = {}

    def get(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        with self._lock:
            for other in [other for other in self._pools if other.is_closed()]:
                del self._pools[other]
            if loop in self._pools and not self._pools[loop][0].is_closed:
                return self._pools[loop][0]
            direct = transport_options(self._url)
            pool = httpx.AsyncClient(
                base_url=self._url,
                transport=httpx.AsyncHTTPTransport(**direct) if direct else None,
                timeout=STREAM_TIMEOUT,
            )
            keeper = _keep(pool)
            # Its first step waits for nothing, and makes it known to the loop.
            with contextlib.suppress(StopIteration):
                keeper.__anext__().__await__().__next__()
            self._pools[loop] = (pool, keeper)
            return pool

    async def close(self) -> None:
        with self._lock:
            entry = self._pools.pop(asyncio.get_running_loop(), None)
        if entry is not None:
            await entry[1].aclose()


async def _keep(pool: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await pool.aclose()


class Home:
    """The event loop to which a stream belongs."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def check(self, what: str, cure: str) -> None:
        """Note the first loop; raise in any other."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            state = "closed since" if self._loop.is_closed() else "another one"
            raise errors.SandseaError(f"{what} belongs to an event loop that is {state}. {cure}")


async def body(messages: Iterator[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message


async def try_lock(lock: asyncio.Lock) -> bool:
    """Take the lock if nobody has it."""
    if lock.locked():
        return False
    await lock.acquire()
    return True


class Cleanups:
    """What must be done though its caller is cancelled: sandboxes to stop, commands to kill."""

    def __init__(self) -> None:
        self._under_way: set[asyncio.Future[None]] = set()
        self._tasks: set[asyncio.Future[Any]] = set()  # a loop holds its tasks weakly

    async def run(self, make: Callable[[], Awaitable[T]]) -> T:
        """Do it to its end; only then a cancellation of the caller goes on.

        asyncio.run cancels all tasks when it ends, also the one that does this: then it is done again.
        """
        over = asyncio.get_running_loop().create_future()
        self._under_way.add(over)
        try:
            return await _to_the_end(make)
        finally:
            self._under_way.discard(over)
            if not over.done():
                over.set_result(None)

    def start(self, make: Callable[[], Awaitable[object]]) -> None:
        """Do it beside the caller."""
        task = asyncio.ensure_future(self.run(make))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, seconds: float) -> None:
        """Wait until nothing of this loop is under way or about to begin, but no longer than that."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        quiet = 0
        while quiet < _QUIET_TURNS and (left := deadline - loop.time()) > 0:
            if mine := {f for f in (*self._under_way, *self._tasks) if f.get_loop() is loop}:
                await asyncio.wait(mine, timeout=left)
                quiet = 0
            else:
                await asyncio.sleep(0)
                quiet += 1


async def _to_the_end(make: Callable[[], Awaitable[T]]) -> T:
    cancelled: asyncio.CancelledError | None = None
    attempts = 0
    while True:
        task = asyncio.ensure_future(make())
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as e:
                cancelled = e
        attempts += 1
        if task.cancelled() and attempts < _CLEANUP_ATTEMPTS:
            continue
        if cancelled is not None:
            if not task.cancelled():
                task.exception()  # looked at: the cancellation is what the caller hears of
            raise cancelled
        return task.result()


@contextlib.asynccontextmanager
async def beside(task: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
    """Run a task beside the block; it is over when the block is."""
    running = asyncio.ensure_future(task()) if task is not None else None
    try:
        yield
    finally:
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Managed(Protocol):
    """Something for `async with`."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None: ...


M = TypeVar("M", bound=Managed)


class Opening(Coroutine[Any, Any, M], Generic[M]):
    """What makes something: `await` it, or use it in `async with`, which also ends what was made."""

    def __init__(self, making: Coroutine[Any, Any, M]) -> None:
        self._making = making
        self._made: M | None = None

    def __await__(self) -> Generator[Any, Any, M]:
        return self._making.__await__()

    def send(self, value: Any) -> Any:
        return self._making.send(value)

    def throw(self, *args: Any) -> Any:
        return self._making.throw(*args)

    def close(self) -> None:
        self._making.close()

    async def __aenter__(self) -> M:
        self._made = await self._making
        await self._made.__aenter__()
        return self._made

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, e, trace)


opening = Opening


def started(new: T) -> T:
    """Nothing is awaited here: it starts when it is used."""
    return new


class Link:
    """A way to end a read from outside. A task is cancelled, which needs no help."""

    #: nobody reads any more
    over = False

    def hold(self, response: httpx.Response) -> None:
        """Note what is being read."""

    def cut(self) -> None:
        """End it."""


class Puller(Generic[T]):
    """Takes the items of an iterator one by one, each within a limit of time, and loses none of them."""

    def __init__(self, items: AsyncIterator[T], link: Link) -> None:
        self._items = items
        self._task: asyncio.Future[T | None] | None = None

    async def next(self, timeout: float | None) -> T | None:
        """The next item; None at the end. Raises TimeoutError, after which it may be asked again."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._one())
        done, _ = await asyncio.wait({self._task}, timeout=timeout)
        if not done:
            raise TimeoutError
        task, self._task = self._task, None
        return task.result()

    async def _one(self) -> T | None:
        try:
            return await anext(self._items)
        except StopAsyncIteration:
            return None

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
