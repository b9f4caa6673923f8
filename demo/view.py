"""The live table of the demo: a block that repaints on a terminal, a line per finished rollout elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

from .cheats import TAMPER


class View:
    """Counts verdicts by project and column."""

    def __init__(self, projects: list[str], kinds: list[str]) -> None:
        """kinds of the rollouts of each project."""
        self.total = len(projects) * len(kinds)
        self.done = 0
        self.running = 0
        self._live = sys.stdout.isatty()
        self._began = time.monotonic()
        self._painted = 0
        self._last = 0.0
        self._right: dict[tuple[str, str], int] = {}
        self._now: dict[str, str] = dict.fromkeys(projects, "")
        self._want: dict[str, int] = {}
        for kind in kinds:
            column = _column(kind)
            self._want[column] = self._want.get(column, 0) + 1

    def say(self, text: str) -> None:
        """A line above the table."""
        self._erase()
        print(text, flush=True)

    def now(self, project: str, what: str) -> None:
        self._now[project] = what
        self._paint()

    def verdict(self, project: str, kind: str, right: bool, text: str) -> None:
        """A finished rollout."""
        self.done += 1
        column = _column(kind)
        self._right[project, column] = self._right.get((project, column), 0) + right
        if not right or not self._live:
            self.say(f"{self.done:3}/{self.total}  {project:13} {kind:7} {'right' if right else 'WRONG'}  {text}")
        self._paint(force=self.done == self.total)

    def _erase(self) -> None:
        if self._painted:
            sys.stdout.write(f"\x1b[{self._painted}A\x1b[J")
            self._painted = 0

    def _paint(self, force: bool = False) -> None:
        if not self._live or (not force and time.monotonic() - self._last < 0.1):
            return
        self._last = time.monotonic()
        self._erase()
        spent = self._last - self._began
        eta = spent / self.done * (self.total - self.done) if self.done else 0
        lines = [
            f"{self.total} rollouts: {self.done} done, {self.running} running, "
            f"{self.total - self.done - self.running} waiting    {_clock(spent)}, ETA {_clock(eta)}",
            f"{'PROJECT':14}" + "".join(f"{c.upper():8}" for c in self._want) + "NOW",
        ]
        for project, what in self._now.items():
            counts = "".join(f"{self._right.get((project, c), 0)}/{self._want[c]:<6}" for c in self._want)
            lines.append(f"{project:14}{counts}{what}")
        width = shutil.get_terminal_size().columns
        sys.stdout.write("".join(line[: width - 1] + "\n" for line in lines))
        sys.stdout.flush()
        self._painted = len(lines)


def _column(kind: str) -> str:
    return "tamper" if kind in TAMPER else kind


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
