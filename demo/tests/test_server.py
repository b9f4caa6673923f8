"""The demo's server outlives a ^C until what needs it has ended, and is always taken down."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

#: notes in its data directory what reaches it
SANDSEA = """#!/bin/sh
case $1 in
up)
  trap 'echo interrupted >>"$3/log"' INT
  trap 'echo stopped >>"$3/log"; exit 0' TERM
  echo ready http://127.0.0.1:1
  while :; do sleep 0.02; done ;;
down)
  echo going >>"$3/log"
  while ! test -e "$3/go"; do sleep 0.02; done
  echo down >>"$3/log" ;;
esac
"""
PROGRAM = """
import pathlib, signal, sys, time
from demo import server
signal.signal(signal.SIGINT, signal.default_int_handler)  # who tests in the background ignores it
with server.up(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])):
    try:
        print("up", flush=True)
        time.sleep(60)
    finally:
        pathlib.Path(sys.argv[2], "log").open("a").write("undone\\n")
"""


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_interrupts_leave_nothing(tmp_path: pathlib.Path) -> None:
    binary, data = tmp_path / "sandsea", tmp_path / "data"
    binary.write_text(SANDSEA)
    binary.chmod(0o755)
    data.mkdir()
    log = data / "log"
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, binary, data],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        os.killpg(program.pid, signal.SIGINT)
        until(lambda: log.exists() and "going" in log.read_text())
        os.killpg(program.pid, signal.SIGINT)
        os.killpg(program.pid, signal.SIGTERM)
        (data / "go").touch()
        program.wait(60)
    finally:
        (data / "go").touch()
        program.kill()
        program.wait()
    assert log.read_text().split() == ["undone", "stopped", "going", "down"]
