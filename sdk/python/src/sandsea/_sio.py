"""What the synchronous front needs of its world. `_aio` is the same for the asynchronous one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import httpx

T = TypeVar("T")

STREAM_TIMEOUT = httpx.Timeout(None, connect=5.0)


class Pools:
    """One pool of connections, which threads share."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._pool: httpx.Client | None = None

    def get(self) -> httpx.Client:
        with self._lock:
            if self._pool is None or self._pool.is_closed:
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
                self._pool = httpx.Client(base_url=self._url, limits=limits, timeout=STREAM_TIMEOUT)
            return self._pool

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def body(messages: Iterator[bytes]) -> Iterator[bytes]:
    return messages


Event = threading.Event


def shielded(op: T) -> T:
    """Threads are not cancelled."""
    return op


@contextmanager
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
