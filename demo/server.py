"""A server of the demo's own, and the proof that it left nothing behind."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator


class ServerError(Exception):
    """The server did not come up."""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def up(binary: pathlib.Path, data: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Run `sandsea up` for the block, then `sandsea down`; gives the URL and the token file.

    A ^C ends the block, which may still need the server; once the undoing has begun, it and a termination wait for it.
    """
    url = f"127.0.0.1:{_free_port()}"
    log = data.parent / "demo-server.log"
    with log.open("wb") as errors:
        server = subprocess.Popen(
            [binary, "up", "--data", data, "--listen", url],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield _ready(server, log), data / "admin.token"
        finally:
            with _undisturbed():
                server.terminate()
                try:
                    server.wait(30)
                except subprocess.TimeoutExpired:
                    server.kill()
                subprocess.run(
                    [binary, "down", "--data", data, "--yes"],
                    check=False,
                    stdout=subprocess.DEVNULL,
                    timeout=120,
                    start_new_session=True,
                )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No ^C and no termination within the block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ready(server: subprocess.Popen[str], log: pathlib.Path) -> str:
    timer = threading.Timer(90, server.kill)
    timer.start()
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if line.startswith("ready "):
                return line.split()[1]
    finally:
        timer.cancel()
    raise ServerError(f"sandsea up did not come up: {log.read_text()[-2000:]}")


def egress(binary: pathlib.Path, data: pathlib.Path) -> str:
    """What the doctor says of egress by policy."""
    out = subprocess.run(
        [binary, "doctor", "--data", data, "--json"], capture_output=True, text=True, check=False
    ).stdout
    features = json.loads(out)["features"] if out else []
    found = next((f for f in features if f["name"] == "egress"), {"mechanism": "sandsea doctor knows nothing of it"})
    return ": ".join(filter(None, (found["mechanism"], found.get("fix"))))


def tag(data: pathlib.Path) -> str:
    """The part of every kernel name that is this server's own."""
    return (data / "id").read_text().strip()[:8]


def left_behind(data: pathlib.Path, tag: str, patience: float = 10.0) -> list[str]:
    """Everything of the server that is still there: processes, mounts, cgroups, loop devices, writable layers.

    What has been killed needs a moment to be gone.
    """
    deadline = time.monotonic() + patience
    while (out := _look(data, tag)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return out


def _look(data: pathlib.Path, tag: str) -> list[str]:
    out: list[str] = []
    for proc in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            program, *argv = (proc / "cmdline").read_text().split("\0")
            ours = program.endswith("sandsea") and any(str(data) in arg for arg in argv)
            # One that has ended and waits for its parent to notice holds nothing any more.
            ended = (proc / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            if not ended and (ours or f"sandsea-{tag}" in (proc / "cgroup").read_text()):
                out.append(f"process {proc.name} {program}")
    for line in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        if str(data) in line:
            out.append("mount " + line.split()[4])
    for mount in pathlib.Path("/proc/self/mountinfo").read_text().splitlines():
        fields = mount.split()
        if fields[fields.index("-") + 1] in ("cgroup", "cgroup2"):
            out += [f"cgroup {p}" for p in pathlib.Path(fields[4]).glob(f"sandsea-{tag}*")]
    for backing in pathlib.Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if str(data) in backing.read_text():
                out.append(f"loop device {backing.parts[3]}")
    for folder in ("upper", "trash"):
        out += [f"file {p}" for p in (data / folder).glob("*")]
    return out
