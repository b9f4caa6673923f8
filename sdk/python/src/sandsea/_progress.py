"""One line that is written over and over: in terminals and notebooks, nowhere else."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO


class Line:
    """Tells how far n creates are, as "381/512, 2 failed, 640/s". Silent when not wanted, in pipes and in files."""

    def __init__(self, n: int, wanted: bool) -> None:
        self._n = n
        self._out = _screen() if wanted else None
        self._began = time.monotonic()
        self._shown = 0.0
        self._state = (0, 0)
        self._width = 0

    def show(self, done: int, failed: int) -> None:
        """Write the line again, at most ten times a second."""
        now = time.monotonic()
        self._state = (done, failed)
        if now - self._shown >= 0.1:
            self._shown = now
            self._write()

    def end(self) -> None:
        """Leave the line as it stands last."""
        if self._out is not None:
            self._write()
            self._out.write("\n")
            self._out.flush()

    def _write(self) -> None:
        if self._out is None:
            return
        done, failed = self._state
        text = f"{done}/{self._n}"
        if failed:
            text += f", {failed} failed"
        text += f", {done / max(time.monotonic() - self._began, 0.001):.0f}/s"
        text = text[: shutil.get_terminal_size().columns - 1]
        self._out.write("\r" + text.ljust(self._width))
        self._out.flush()
        self._width = len(text)


def _screen() -> TextIO | None:
    """Where a line can be written over: the output of a notebook's cell, or a terminal."""
    if "ipykernel" in sys.modules:
        return sys.stdout
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return sys.stderr
    return None
