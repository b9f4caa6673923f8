"""What the demo's program says of itself: what it was asked for, its figures, and how it ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import types
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from demo import __main__ as program
from demo import grader
from demo.images import Images
from demo.rollout import Figures
from demo.tasks import Task, load_all
from sandsea import Client


@pytest.mark.parametrize("argv", [["--task", "none"], ["--parallel", "0"], ["--parallel", "many"]])
def test_what_cannot_be_done_is_refused_before_anything_starts(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        program.parse(argv)
    assert end.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_every_task_can_be_named() -> None:
    assert program.parse([a for t in load_all() for a in ("--task", t.name)]).task == [t.name for t in load_all()]


def test_an_interrupt_ends_with_the_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(program, "parse", lambda: argparse.Namespace())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert program.main() == 130
    assert capsys.readouterr().out == "demo: failed: interrupted\n"


def test_the_rate_is_of_the_creates_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Figures(creates=[0.1] * 5)  # made before, to show the tasks

    @contextlib.asynccontextmanager
    async def sandbox() -> AsyncIterator[None]:
        yield

    async def open_sandbox(*_: Any, **__: Any) -> contextlib.AbstractAsyncContextManager[None]:
        figures.creates.append(0.1)
        return sandbox()

    async def roll_out(*_: Any, **__: Any) -> str:
        figures.creates.append(0.1)
        return ""

    async def grade(sb: None, task: Task, diff: str) -> grader.Verdict:
        return grader.Verdict("failed", "")

    monkeypatch.setattr(program, "open_sandbox", open_sandbox)
    monkeypatch.setattr(program, "roll_out", roll_out)
    monkeypatch.setattr(grader, "grade", grade)
    monkeypatch.setattr(program, "time", types.SimpleNamespace(monotonic=itertools.count(0.0, 4.0).__next__))
    out = asyncio.run(program.roll_all(cast(Client, None), load_all()[:1], Images(), figures, 2, networked=False))
    assert out["creates_per_second"] == 2 * 8 / 4
