"""The twelve snippets that the SDK is built to, run against a real server. `py` is an image of busybox."""

from __future__ import annotations

import pathlib
import pickle
import re
import textwrap

import pytest

import sandsea
import sandsea.sync
from sandsea import Client
from sandsea import ContainerRunArgs as Args

pytestmark = pytest.mark.usefixtures("here")

ARGS = Args(container_image="py", memory_limit_mb=64, ttl=600)


async def test_1_a_sandbox_stops_at_the_end_of_its_block() -> None:
    async with Client() as c, await c.run_container(Args(container_image="py")) as sb:
        assert repr(sb) == f"<Sandbox {sb.id[:8]} running py>"
    assert sb.state == "ended"
    async with Client() as c, c.run_container(Args(container_image="py")) as sb:
        assert await sb.is_alive()
    assert sb.state == "ended"


async def test_2_a_command_that_fails_is_no_exception() -> None:
    async with Client() as c, await c.run_container(ARGS) as sb:
        r = await sb.run_shell("pytest -q", timeout=60)
        assert (r.exit_code, r.stdout, r.cause) == (1, "3 passed\nFAILED test_a.py::test_b\n", "completed")
        assert repr(r).startswith("<Result exit=1 ")
        with pytest.raises(sandsea.CommandFailed) as e:
            r.check()
        assert str(e.value) == f"`pytest -q` exited 1 in {sb.id[:8]}: FAILED test_a.py::test_b"


async def test_3_output_streams_and_offsets_resume() -> None:
    async with Client() as c, await c.run_container(ARGS) as sb:
        text, offsets = "", []
        p = sb.start("make")
        async for ev in p:
            text += ev.text
            offsets.append(ev.offset)
        assert text == "building 1\nbuilding 2\nbuilding 3\n"
        assert offsets[0] == 0
        rest = sb.attach(p.number, stdout_offset=offsets[-1])
        assert text.endswith("".join([ev.text async for ev in rest]))


async def test_4_files_and_trees(tmp_path: pathlib.Path) -> None:
    (tmp_path / "src/sub").mkdir(parents=True)
    (tmp_path / "src/sub/a.txt").write_text("a")
    async with Client() as c, await c.run_container(ARGS) as sb:
        await sb.files.write("/w/a", b"\0")
        assert await sb.files.read("/w/a") == b"\0"
        await sb.files.upload(tmp_path / "src", "/w/src")
        assert await sb.files.read_text("/w/src/sub/a.txt") == "a"


async def test_5_a_terminal() -> None:
    async with Client() as c, await c.run_container(ARGS) as sb, sb.pty(cols=120) as p:
        await p.send("top\n")
        await p.read_until(re.compile("load", re.IGNORECASE), timeout=20)  # busybox says Load


async def test_6_a_shell_keeps_directory_and_environment() -> None:
    async with Client() as c, await c.run_container(ARGS) as sb:
        await sb.files.make_dir("/w")
        async with sb.shell() as sh:
            await sh.run("cd /w; export K=v")
            assert (await sh.run("pwd; echo $K")).stdout == "/w\nv\n"
            assert sh.cwd == "/w"


@pytest.mark.skip(reason="fork comes with a later wave of the server")
async def test_7_fork() -> None: ...


@pytest.mark.usefixtures("network")
async def test_8_network_rules_change_at_run_time() -> None:
    async with Client() as c, await c.run_container(ARGS) as sb:
        assert not (await sb.check_network(service="pypi")).allowed
        await sb.set_network({"pypi": True}, as_of="2024-06-01")
        assert sb.info.spec is not None
        assert sb.info.spec.network is not None
        assert sb.info.spec.network.services == {"pypi": True}
        assert (await sb.check_network(service="pypi")).allowed
        assert not (await sb.check_network(service="npm")).allowed
        assert (await sb.run("echo $PIP_INDEX_URL")).stdout != "\n"
        await sb.set_network()
        assert not (await sb.check_network(service="pypi")).allowed


async def test_9_errors_by_fault() -> None:
    async with Client() as c:
        sb = await c.run_container(Args(container_image="py", ttl=600))
        late = await sb.run("echo so far; sleep 9", timeout=2)
        with pytest.raises(sandsea.CommandTimeout) as timeout:
            late.check()
        assert timeout.value.partial.stdout == "so far\n"
        assert isinstance(timeout.value, TimeoutError)
        assert not isinstance(timeout.value, (sandsea.RequestTimeout, sandsea.SandboxEnded))
        await sb.stop()
        with pytest.raises(sandsea.SandboxEnded) as ended:
            await sb.run("true")
        assert ended.value.cause == "stopped"
        assert str(ended.value).startswith(f"sandbox {sb.id[:8]}")
        assert not isinstance(ended.value, sandsea.InfraError)
        with pytest.raises(sandsea.Exhausted) as full:
            await c.run_container(Args(container_image="py", memory_limit_mb=1 << 30), timeout=1)
        assert full.value.retry_after is None
        with pytest.raises(sandsea.InfraError):
            await Client("http://127.0.0.1:1", token="t").open()


async def test_10_many_with_one_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    async with Client() as c:
        boxes = await c.create_many(ARGS, n=12, progress=True)
        assert [type(b) for b in boxes] == [sandsea.Sandbox] * 12
        await c.stop_many(boxes)
        assert not {s.id for s in await c.list()} & {b.id for b in boxes if isinstance(b, sandsea.Sandbox)}
    assert capsys.readouterr() == ("", "")  # a pipe is no place for it


async def test_11_handles_travel(here: tuple[str, str]) -> None:
    async with Client() as c, await c.run_container(ARGS) as sb:
        data = pickle.dumps(sb)
        assert pathlib.Path(here[1]).read_text().strip().encode() not in data
        sb2 = pickle.loads(data)
        assert (await sb2.run("echo there")).stdout == "there\n"
        assert (await sb2.refresh()).spec == sb.info.spec
        await sb2._client.close()


def test_12_the_pytest_plugin(here: tuple[str, str], pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nsandsea_image = py\n")
    pytester.makepyfile(
        textwrap.dedent("""
        def test_it(sandsea_sandbox):
            sandsea_sandbox.run("id -u").check()

        def test_that_fails(sandsea_sandbox):
            sandsea_sandbox.run("echo to be seen").check()
            sandsea_sandbox.run("pytest -q").check()
        """)
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*CommandFailed: `pytest -q` exited 1*",
            "*sandsea log of <Sandbox s* running py>*",
            "*[[]1] bash -c echo to be seen (exit 0)",
            "to be seen",
            "*[[]2] bash -c pytest -q (exit 1)",
            "FAILED test_a.py::test_b",
        ]
    )
    with sandsea.sync.Client() as c:
        (short,) = set(re.findall(r"<Sandbox (s\w+) running py>", "\n".join(result.outlines)))
        (after,) = [s for s in c.list(all=True) if s.id.startswith(short)]
        assert after.end is not None
        assert after.end.cause == "stopped"
