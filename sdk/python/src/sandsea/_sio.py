"""What the synchronous front needs of its world. `_aio` is the same for the asynchronous one."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, ParamSpec, Protocol, TypeVar

import httpx

from ._net import STREAM_TIMEOUT, transport_options

T = TypeVar("T")
P = ParamSpec("P")

Event = threading.Event
Lock = threading.Lock
sleep = time.sleep


class Pools:
    """One pool of connections, which threads share."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._pool: httpx.Client | None = None

    def get(self) -> httpx.Client:
        with self._lock:
            if self._pool is None or self._pool.is_closed:
                direct = transport_options(self._url)
                self._pool = httpx.Client(
                    base_url=self._url,
                    transport=httpx.HTTPTransport(**direct) if direct else None,
                    timeout=STREAM_TIMEOUT,
                )
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


class Home:
    """Threads may share what a stream belongs to."""

    def check(self, what: str, cure: str) -> None:
        """Nothing to check."""


def body(messages: Iterator[bytes]) -> Iterator[bytes]:
    return messages


def to_thread(f: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """This thread will do."""
    return f(*args, **kwargs)


def try_lock(lock: threading.Lock) -> bool:
    """Take the lock if nobody has it."""
    return lock.acquire(blocking=False)


class Cleanups:
    """What must be done before the connections are closed: sandboxes to stop, commands to kill."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0  # guarded by the condition

    def run(self, make: Callable[[], T]) -> T:
        """Do it. Threads are not cancelled."""
        self._count(1)
        try:
            return make()
        finally:
            self._count(-1)

    def start(self, make: Callable[[], object]) -> None:
        """Do it beside the caller. The interpreter waits for it at its end."""
        self._count(1)

        def do() -> None:
            try:
                make()
            finally:
                self._count(-1)

        threading.Thread(target=do, daemon=False).start()

    def settle(self, seconds: float) -> None:
        """Wait until nothing is under way, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0, seconds)

    def _count(self, by: int) -> None:
        with self._changed:
            self._under_way += by
            self._changed.notify_all()


class Startable(Protocol):
    """Something that begins when it is told to."""

    def begin(self) -> object: ...


S = TypeVar("S", bound=Startable)


def started(new: S) -> S:
    """Start it at once."""
    new.begin()
    return new


def opening(made: T) -> T:
    """What was made is there already."""
    return made


@contextlib.contextmanager
def beside(task: Callable[[], None] | None) -> Iterator[None]:
    """Run a task beside the block; it is over when the block is."""
    if task is None:
        yield
        return
    running = threading.Thread(target=task, daemon=True)
    running.start()
    try:
        yield
    finally:
        running.join(timeout=5)


class Link:
    """A way to end a read of another thread."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        #: nobody reads any more
        self.over = False

    def hold(self, response: httpx.Response) -> None:
        """Note what is being read."""
        stream = response.extensions.get("network_stream")
        self._socket = stream.get_extra_info("socket") if stream is not None else None
        if self.over:
            self.cut()

    def cut(self) -> None:
        """End it."""
        self.over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class Puller(Generic[T]):
    """Takes the items of an iterator one by one, each within a limit of time, and loses none of them.

    A thread of its own waits for them, one at a time.
    """

    def __init__(self, items: Iterator[T], link: Link) -> None:
        self._items = items
        self._link = link
        self._asked = False
        self._wanted: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def next(self, timeout: float | None) -> T | None:
        """The next item; None at the end. Raises TimeoutError, after which it may be asked again."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        if not self._asked:
            self._asked = True
            self._wanted.put(True)
        try:
            item, failure = self._found.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None
        self._asked = False
        if failure is not None:
            raise failure
        return item

    def _read(self) -> None:
        while self._wanted.get():
            try:
                self._found.put((next(self._items, None), None))
            except BaseException as e:
                self._found.put((None, e))

    def close(self) -> None:
        """Stop reading."""
        if self._thread is not None:
            self._wanted.put(False)
            if self._asked:
                self._link.cut()
            self._thread.join(timeout=5)
