"""Waiting for what is about to happen."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

LIMIT = 30.0


async def until(met: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Return when met() is true; fail when that takes too long."""
    deadline = time.monotonic() + LIMIT
    while True:
        answer = met()
        if await answer if inspect.isawaitable(answer) else answer:
            return
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.02)
