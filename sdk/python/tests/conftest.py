"""A real server for the tests that need one: `build/sandsea up` on scratch data, with an image of busybox."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import socket
import subprocess
import tarfile
import threading
from collections.abc import Iterator

import pytest

from sandsea import sync

ROOT = pathlib.Path(__file__).resolve().parents[3]
BINARY = pathlib.Path(os.environ.get("SANDSEA_BINARY", ROOT / "build/sandsea"))
BUSYBOX = pathlib.Path("/bin/busybox")
APPLETS = (
    "sh", "cat", "echo", "sleep", "true", "false", "id", "env", "pwd", "ls", "dd", "kill", "seq", "head", "wc",
    "mkdir", "chmod", "ln", "stat", "yes", "setsid", "nproc", "printf", "cp", "diff", "grep", "md5sum", "mkfifo", "mv",
    "patch", "readlink", "rm", "sed", "sort", "stty", "tail", "top", "touch", "tr", "tty", "uname", "test", "date",
    "httpd",
)  # fmt: skip
# Programs that the snippets of the guide and of the README call.
SCRIPTS = {
    "bash": 'exec /bin/sh "$@"',
    "pytest": "echo 3 passed; echo FAILED test_a.py::test_b; exit 1",
    "make": "for i in 1 2 3; do echo building $i; sleep 0.05; done",
}

USERS = b"""root:x:0:0::/root:/bin/sh
user:x:1000:1000::/home:/bin/sh
nobody:x:65534:65534::/nonexistent:/bin/sh
"""

pytest_plugins = ["pytester"]


def busybox_image() -> bytes:
    """A root file system tar with one program."""
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w") as tar:

        def add(name: str, kind: bytes, data: bytes = b"", mode: int = 0o755, link: str = "") -> None:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.mode, info.linkname = kind, len(data), mode, link
            tar.addfile(info, io.BytesIO(data))

        for d in ("bin", "dev", "etc", "proc", "root", "sys", "home"):
            add(d, tarfile.DIRTYPE)
        add("tmp", tarfile.DIRTYPE, mode=0o1777)
        add("bin/busybox", tarfile.REGTYPE, BUSYBOX.read_bytes())
        for a in APPLETS:
            add("bin/" + a, tarfile.SYMTYPE, link="busybox")
        for name, script in SCRIPTS.items():
            add("bin/" + name, tarfile.REGTYPE, f"#!/bin/sh\n{script}\n".encode())
        add("etc/passwd", tarfile.REGTYPE, USERS, 0o644)
        add("etc/group", tarfile.REGTYPE, b"root:x:0:\nuser:x:1000:\nextra:x:2000:user\nnogroup:x:65534:\n", 0o644)
    return buf.getvalue()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URL and token file of a running server; skips where it cannot run."""
    if os.geteuid() != 0:
        pytest.skip("a server needs root")
    for file in (BINARY, BUSYBOX):
        if not file.exists():
            pytest.skip(f"no {file}: make build")
    data = tmp_path_factory.mktemp("sandsea")
    with running(data) as (url, _):
        token = str(data / "admin.token")
        with sync.Client(url, token_file=token) as c:
            c.import_rootfs(io.BytesIO(busybox_image()), "busybox")
            c.import_rootfs(io.BytesIO(busybox_image()), "py")
        yield url, token


@contextlib.contextmanager
def running(data: pathlib.Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """`sandsea up` on data, and `sandsea down` at the end. Its URL, and its process, which may be replaced."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    up = [begun(data, address)]
    try:
        yield "http://" + address, up
    finally:
        up[0].terminate()
        try:
            up[0].wait(30)
        finally:
            subprocess.run([BINARY, "down", "--data", data, "--yes"], check=True, stdin=subprocess.DEVNULL, timeout=60)


def begun(data: pathlib.Path, address: str) -> subprocess.Popen[str]:
    """`sandsea up`, when it is ready."""
    up = subprocess.Popen([BINARY, "up", "--data", data, "--listen", address], stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(60, up.kill)
    timer.start()
    try:
        assert up.stdout is not None
        for line in up.stdout:
            if line.startswith("ready "):
                return up
        pytest.fail("sandsea up did not come up")
    finally:
        timer.cancel()


@pytest.fixture
def network(here: tuple[str, str]) -> None:
    """Skips where the node enforces no network policies."""
    with sync.Client() as c:
        if not c.capabilities().network_changes:
            pytest.skip("the node enforces no network policies: sandsea doctor says why")


@pytest.fixture
def here(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The server as this process's default, as a user has it."""
    monkeypatch.setenv("SANDSEA_URL", server[0])
    monkeypatch.setenv("SANDSEA_TOKEN_FILE", server[1])
    monkeypatch.delenv("SANDSEA_TOKEN", raising=False)
    return server
