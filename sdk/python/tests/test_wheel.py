"""The package as its users get it: a wheel, built and installed in an environment without the source tree."""

from __future__ import annotations

import email
import os
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

PROJECTS = [pathlib.Path(__file__).resolve().parents[1], pathlib.Path(__file__).resolve().parents[2] / "libdsec"]

PROGRAM = """
import asyncio, pickle, sys, sandsea, sandsea.sync
from libdsec import DSecClient, DSecContainerRunArgs

assert sandsea.__file__.startswith(sys.prefix), sandsea.__file__
args = DSecContainerRunArgs(container_image="busybox", ttl=600)

async def main():
    async with DSecClient() as c, c.run_container(args) as sb:
        r = await sb.run_shell("echo out; echo err >&2; exit 3", timeout=30)
        assert (r.exit_code, r.stdout, r.stderr) == (3, "out\\n", "err\\n")
        await sb.files.write("/w/a", b"\\0" * 300_000)
        assert await sb.files.read("/w/a") == b"\\0" * 300_000
        assert [ev.text async for ev in sb.start("echo one")] == ["one\\n"]
        assert (await pickle.loads(pickle.dumps(sb)).run("true")).exit_code == 0
        try:
            await sb.files.read("/none")
        except FileNotFoundError as e:
            assert e.filename == "/none"
        task = asyncio.ensure_future(sb.run("sleep 60"))
        await asyncio.sleep(0.2)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        boxes = await c.create_many(args, n=2, progress=True)
        await c.stop_many(boxes)

asyncio.run(main())
with sandsea.sync.Client() as c, c.run_container(args) as sb:
    assert sb.run(["cat"], stdin="in").stdout == "in"
    with sb.start(["cat"], stdin=True) as p:
        p.send("x")
        p.close_input()
        assert p.wait().stdout == "x"
print("ran")
"""

TYPED = """
import re
from collections.abc import Sequence

import sandsea
import sandsea.sync
from sandsea import Client, ContainerRunArgs, Output, Result, Sandbox


async def main() -> None:
    args = ContainerRunArgs(container_image="py", network_rules={"pypi": True}, toolkits=("git",))
    async with Client() as c, await c.run_container(args) as sb, c.run_container(args) as other:
        both: list[Sandbox] = [sb, other]
        r: Result = await both[0].run_shell("pytest -q", timeout=60, overflow="tail")
        code: int = r.check().exit_code
        signal: str | None = r.signal
        async for ev in sb.start("make"):
            o: Output = ev
            print(o.text, o.offset, code, signal)
        async with sb.pty(cols=120) as p, sb.shell(cwd="/w") as sh:
            await p.send("top\\n")
            text: str = await p.read_until(re.compile("load"))
            print(text, (await sh.run("pwd")).stdout, sh.cwd)
        made: Sequence[Sandbox | sandsea.SandseaError] = await c.create_many(args, n=5, progress=True)
        read = await sb.files.read_many(["/a"])
        if isinstance(read[0], bytes):
            print(read[0].decode(), made)
        async with sb.files.watch("/w") as changes:
            async for change in changes:
                print(change.change, change.path)
        await sb.set_network({"pypi": True}, as_of="2024-06-01", phases={"a": {}, "b": {"*.example.org": False}})
        rules: sandsea.NetworkRules = {"example.org:443": True}
        await sb.set_network(rules, deny=["pypi:flask"])
        allowed: bool = (await sb.check_network("example.org")).allowed
        async for event in sb.network_log(follow=True):
            denied: bool = event.denied
            print(event.name, denied, allowed)
        endpoint = await sb.endpoint(8000, ttl=60)
        url: str = endpoint.url
        headers: dict[str, str] = endpoint.headers
        print(url, headers)
        try:
            await sb.run(["true"])
        except sandsea.Exhausted as e:
            wait: float | None = e.retry_after
            print(wait)
        except sandsea.CommandTimeout as e:
            partial: Result = e.partial
            print(partial)


def twin(sb: sandsea.sync.Sandbox) -> int:
    with sb.shell() as sh, sb.pty() as p:
        p.send("x")
        for ev in sb.start(["make"]):
            print(ev.text)
        return sh.run("true").exit_code


def test_it(sandsea_sandbox: sandsea.sync.Sandbox) -> None:
    sandsea_sandbox.run("id -u").check()
"""

WRONG = """
import sandsea
import sandsea.sync


def wrong(sb: sandsea.Sandbox, box: sandsea.sync.Sandbox) -> None:
    sb.run("x").exit_code  # not awaited
    box.run("x", timeout="60")
    box.run("x", overflow="middle")
    box.run("x").exitcode
    box.set_network({"pypi": "yes"})
"""


def run(*argv: object, **options: object) -> str:
    done = subprocess.run([str(a) for a in argv], capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    out = tmp_path_factory.mktemp("wheels")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, project)
    return sorted(out.iterdir())


def environment(python: str, at: pathlib.Path, wheels: list[pathlib.Path]) -> pathlib.Path:
    """A clean environment with the wheels; what they depend on comes from the package index."""
    run(python, "-m", "venv", "--without-pip", at)
    run(sys.executable, "-m", "pip", "--python", at / "bin/python", "install", "-q", *wheels)
    return at / "bin/python"


def test_the_wheel_is_pure_and_small(wheels: list[pathlib.Path]) -> None:
    assert [w.name for w in wheels] == ["libdsec-0.1.0-py3-none-any.whl", "sandsea-0.1.0-py3-none-any.whl"]
    with zipfile.ZipFile(wheels[1]) as wheel:
        names = wheel.namelist()
        metadata = email.message_from_bytes(wheel.read("sandsea-0.1.0.dist-info/METADATA"))
        entries = wheel.read("sandsea-0.1.0.dist-info/entry_points.txt").decode()
    assert {"sandsea/py.typed", "sandsea/sync/client.py", "pytest_sandsea.py"} <= set(names)
    assert not [n for n in names if n.split("/")[0] not in ("sandsea", "pytest_sandsea.py", "sandsea-0.1.0.dist-info")]
    assert metadata["Requires-Python"] == ">=3.10"
    assert [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r] == ["httpx>=0.27"]
    assert "[pytest11]" in entries


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("python", ["python3", "python3.10", "python3.11", "python3.12", "python3.13", "python3.14"])
def test_it_runs_without_the_source_tree(python: str, wheels: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    found = sys.executable if python == "python3" else shutil.which(python)
    if not found or subprocess.run([found, "-c", "import ensurepip"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {python} here")
    clean = environment(found, tmp_path / "env", wheels)
    assert run(clean, "-I", "-W", "error", "-c", PROGRAM, cwd=tmp_path) == "ran\n"


def test_its_types_are_seen_by_users(wheels: list[pathlib.Path], tmp_path: pathlib.Path) -> None:
    clean = environment(sys.executable, tmp_path / "env", wheels)
    (tmp_path / "right.py").write_text(TYPED)
    (tmp_path / "wrong.py").write_text(WRONG)
    seen = subprocess.run(
        [
            sys.executable, "-m", "mypy", "--strict", "--python-version", "3.10", "--python-executable", clean,
            "--config-file", os.devnull, "right.py", "wrong.py",
        ],
        capture_output=True, text=True, cwd=tmp_path, check=False, timeout=500,
    )  # fmt: skip
    errors = [line.split(":")[:2] for line in seen.stdout.splitlines() if ": error:" in line]
    assert errors == [["wrong.py", str(n)] for n in (7, 8, 9, 10, 11)], seen.stdout


def test_the_sources_are_python_3_10() -> None:
    for project in PROJECTS:
        run(
            sys.executable, "-m", "ruff", "check", "--isolated", "--target-version", "py310", "--select", "E9,F,UP036",
            project / "src",
        )  # fmt: skip
