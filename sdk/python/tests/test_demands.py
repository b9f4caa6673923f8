"""The demands that frameworks make of a sandbox (D1 to D40), where the SDK adds meaning. test/demands has the same
numbers for the core. The last tests repeat the important ones without await."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import json
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator

import httpx
import pytest
from waiting import until

import sandsea
import sandsea.sync
from sandsea import Client, ContainerRunArgs, Sandbox

pytestmark = pytest.mark.usefixtures("here")

ARGS = ContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl=600)


@pytest.fixture
async def sb() -> AsyncIterator[Sandbox]:
    async with Client() as c, await c.run_container(ARGS) as sandbox:
        yield sandbox


async def outcome(call: Awaitable[object]) -> object:
    """What a call returns or raises."""
    try:
        return await call
    except sandsea.SandseaError as e:
        return e


async def commands_in(sb: Sandbox) -> str:
    return (await sb.run_shell("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")).stdout


# --- commands


async def test_d1_a_list_is_no_shell_and_big_arguments_arrive(sb: Sandbox) -> None:
    words = ["a b", "$HOME", "*", "'", "\n", "x" * 65536]
    r = await sb.run(["printf", "%s|", *words])
    assert r.stdout == "".join(w + "|" for w in words)
    too_long = await sb.run(["echo", "x" * 131_072])
    assert too_long.start_failure == "argument_too_long"
    with pytest.raises(sandsea.StartFailed) as e:
        too_long.check()
    assert e.value.errno == errno.E2BIG


async def test_d2_the_shell_is_the_callers_choice(sb: Sandbox) -> None:
    assert (await sb.run_shell("echo $0", shell="sh")).stdout == "sh\n"
    assert (await sb.run(["sh", "-lc", "echo $0"])).stdout == "sh\n"
    assert (await sb.run("echo $((1 + 1))")).stdout == "2\n"
    assert (await sb.run_shell("true", shell="zsh")).start_failure == "not_found"


@pytest.mark.parametrize(
    ("argv", "options", "word", "builtin"),
    [
        (["/no/such"], {}, "not_found", FileNotFoundError),
        (["/etc/passwd"], {}, "not_executable", PermissionError),
        (["true"], {"cwd": "/none"}, "cwd", FileNotFoundError),
        (["true"], {"user": "nobody-here"}, "user", sandsea.StartFailed),
    ],
)
async def test_d3_start_failures_are_typed(
    sb: Sandbox, argv: list[str], options: dict[str, str], word: str, builtin: type[Exception]
) -> None:
    r = await sb.run(argv, **options)  # type: ignore[arg-type]
    assert (r.start_failure, r.cause) == (word, "start_failure")
    with pytest.raises(builtin):
        r.check()
    assert (await sb.run("exit 127")).start_failure is None


async def test_d4_a_time_limit_leaves_the_output_and_nothing_else(sb: Sandbox) -> None:
    began = time.monotonic()
    r = await sb.run("echo so far; setsid sleep 77 & sleep 78", timeout=2)
    assert time.monotonic() - began < 2 + 10
    assert (r.exit_code, r.cause, r.timed_out) == (124, "timeout", True)
    with pytest.raises(TimeoutError) as e:
        r.check()
    assert isinstance(e.value, sandsea.CommandTimeout)
    assert e.value.partial.stdout == "so far\n"
    assert "sleep" not in await commands_in(sb)


async def test_d5_a_signal_is_no_time_limit(sb: Sandbox) -> None:
    r = await sb.run("kill -SEGV $$", timeout=30)
    assert (r.exit_code, r.signal, r.timed_out, r.cause) == (139, "SIGSEGV", False, "signal")


async def test_d6_time_limits_are_fractions_or_none(sb: Sandbox) -> None:
    assert (await sb.run(["sleep", "9"], timeout=0.2)).timed_out
    for timeout in (None, 0, 24 * 3600):
        assert (await sb.run(["sleep", "0.3"], timeout=timeout)).exit_code == 0


async def test_d7_a_cancelled_call_kills_the_tree(sb: Sandbox) -> None:
    task = asyncio.ensure_future(sb.run("setsid sleep 77 & sleep 78"))

    async def runs() -> bool:
        return "sleep 77" in await commands_in(sb)

    await until(runs, "the command runs")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "sleep 7" not in await commands_in(sb)  # dead when the caller goes on, not some time later


async def test_d7_a_time_limit_of_the_caller_kills_the_tree(sb: Sandbox) -> None:
    task = asyncio.ensure_future(sb.run("sleep 78"))

    async def runs() -> bool:
        return "sleep 78" in await commands_in(sb)

    await until(runs, "the command runs")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(task, 0.1)
    assert "sleep 78" not in await commands_in(sb)


async def test_d7_leaving_a_stream_early_kills_the_tree(sb: Sandbox) -> None:
    async with sb.start("yes & yes") as p:
        async for ev in p:
            if ev.stream == "stdout":
                break
    assert "yes" not in await commands_in(sb)


async def test_d7_what_is_detached_or_has_a_key_runs_on(sb: Sandbox) -> None:
    p = await sb.start(["sleep", "77"], detached=True)
    await p.aclose()
    q = await sb.start(["sleep", "78"], key="k")
    await q.aclose()
    running = await commands_in(sb)
    assert "sleep 77" in running
    assert "sleep 78" in running
    await p.kill()
    assert (await sb.attach(p.number).wait()).signal == "SIGKILL"


def test_d7_a_client_that_vanishes_takes_its_command_along(here: tuple[str, str]) -> None:
    program = "import sandsea.sync, sys; sandsea.sync.Client().sandbox(sys.argv[1]).run('echo up >/up; sleep 78')"
    with sandsea.sync.Client() as c, c.run_container(ARGS) as sb:
        child = subprocess.Popen([sys.executable, "-c", program, sb.id])
        deadline = time.monotonic() + 20
        while not sb.files.exists("/up"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        child.kill()
        child.wait()
        while sb.processes()[0].state == "PROCESS_STATE_RUNNING":
            assert time.monotonic() < deadline
            time.sleep(0.02)


async def test_d8_standard_input_is_exact(sb: Sandbox, tmp_path: pathlib.Path) -> None:
    assert (await sb.run(["wc", "-c"])).stdout == "0\n"
    assert (await sb.run(["wc", "-c"], stdin=b"")).stdout == "0\n"
    assert (await sb.run(["cat"], stdin="grün\0")).stdout == "grün\0"
    data = os.urandom(1 << 20) * 50
    file = tmp_path / "data"
    file.write_bytes(data)
    want = hashlib.md5(data).hexdigest() + "  -\n"
    assert (await sb.run(["md5sum"], stdin=data)).stdout == want
    with file.open("rb") as f:
        assert (await sb.run(["md5sum"], stdin=f)).stdout == want
    assert (await sb.run(["head", "-c", "3"], stdin=data)).stdout_bytes == data[:3]  # closed before it is all sent


async def test_d9_the_environment_is_merged_or_replaced() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, env={"A": "create", "B": "create"})
    async with Client() as c, c.run_container(args) as sb:
        assert (await sb.run("echo $A $B $PATH", env={"B": "call"})).stdout.startswith("create call /")
        assert (await sb.run(["/bin/env"], env={"B": "call"}, replace_env=True)).stdout == "B=call\n"


async def test_d12_merged_streams_keep_their_order(sb: Sandbox) -> None:
    r = await sb.run("echo a; echo b >&2; echo c", merge_stderr=True)
    assert (r.stdout, r.stderr) == ("a\nb\nc\n", "")


@pytest.mark.parametrize(
    ("overflow", "kept"),
    [("head_tail", "1\n2\n200\n"), ("tail", "\n199\n200\n"), ("head", "1\n2\n3\n4\n5"), ("fail", "1\n2\n3\n4\n5")],
)
async def test_d13_what_is_kept_of_too_much_output_is_chosen(
    sb: Sandbox, overflow: sandsea.Overflow, kept: str
) -> None:
    r = await sb.run("seq 1 200; echo err >&2", max_output=9 if overflow != "head_tail" else 8, overflow=overflow)
    assert (r.stdout, r.stderr, r.truncated) == (kept, "err\n", True)
    assert (r.stdout_total, r.stderr_total, r.exit_code) == (692, 4, 0)
    assert r.output_exceeded == (overflow == "fail")
    if overflow == "fail":
        with pytest.raises(sandsea.OutputLimitExceeded) as e:
            r.check()
        assert e.value.partial is r


async def test_d13_output_beyond_the_record_is_missing_and_said_to_be() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, output_limit_mb=1)
    async with Client() as c, c.run_container(args) as sb:
        p = await sb.start("yes | head -c 8000000", detached=True)

        async def over() -> bool:
            return await p.poll() is not None

        await until(over, "the command ends")
        late = sb.attach(p.number)
        pieces = [ev async for ev in late]
        assert sum(len(ev.data) + ev.gap for ev in pieces) == 8_000_000
        assert late.result is not None
        assert late.result.truncated
        assert late.result.stdout_total == 8_000_000


async def test_d13_a_reader_misses_nothing() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, output_limit_mb=1)
    async with Client() as c, c.run_container(args) as sb:
        size = 0
        async for ev in sb.start("yes | head -c 100000000"):
            assert ev.gap == 0
            assert ev.offset == size
            size += len(ev.data)
        assert size == 100_000_000


async def test_d14_bytes_become_text_as_the_caller_says(sb: Sandbox) -> None:
    command = ["printf", "a\\377b"]
    assert (await sb.run(command)).stdout == "a�b"
    r = await sb.run(command, errors="backslashreplace")
    assert (r.stdout, r.stdout_bytes) == ("a\\xffb", b"a\xffb")
    with pytest.raises(UnicodeDecodeError):
        await sb.run(command, errors="strict")
    half = await sb.run("printf 'gr\\303'; sleep 0.1; printf '\\274n'", errors="strict")
    assert half.stdout == "grün"
    p = sb.start("printf 'gr\\303'; sleep 0.1; printf '\\274n'")
    assert "".join([ev.text async for ev in p]) == "grün"


async def test_d15_a_command_outlives_its_stream(sb: Sandbox) -> None:
    p = await sb.start("echo one; until test -e /go; do sleep 0.05; done; echo two; exit 5", detached=True)
    assert await p.poll() is None
    first = await anext(aiter(p))
    await p.aclose()
    await sb.files.write("/go", "")
    rest = sb.attach(p.number, stdout_offset=first.offset + len(first.data))
    r = await rest.wait()
    assert (first.text + r.stdout, r.exit_code) == ("one\ntwo\n", 5)
    for _ in range(2):
        again = await sb.attach(p.number).wait()
        assert (again.stdout, again.exit_code, again.truncated) == ("one\ntwo\n", 5, False)


async def test_d16_a_live_process_is_talked_to(sb: Sandbox) -> None:
    p = sb.start("while read x; do echo got $x; echo err $x >&2; done; exit 4", stdin=True)
    assert await p.poll() is None
    await p.send("one\n")
    seen: dict[str, str] = {"stdout": "", "stderr": ""}
    async for ev in p:
        seen[ev.stream] += ev.text
        if seen == {"stdout": "got one\n", "stderr": "err one\n"}:
            break
    assert await p.poll() is None
    await p.send(b"two\n")
    await p.close_input()
    r = await p.wait()
    assert (r.exit_code, r.stdout, r.stderr) == (4, "got one\ngot two\n", "err one\nerr two\n")
    assert await p.poll() == 4
    async with sb.start("trap 'echo bye; exit 9' TERM; echo up; while :; do sleep 0.05; done") as q:
        async for ev in q:
            if ev.text == "up\n":
                await q.terminate()
        assert q.result is not None
        assert (q.result.exit_code, q.result.stdout) == (9, "up\nbye\n")


async def test_d17_many_commands_at_once(sb: Sandbox) -> None:
    results = await asyncio.gather(*(sb.run(f"sleep 0.2; echo {i}") for i in range(64)))
    assert [r.stdout for r in results] == [f"{i}\n" for i in range(64)]


async def test_d18_a_shell_survives_what_is_done_in_it(sb: Sandbox) -> None:
    async with sb.shell() as sh:
        await sh.run("cd /tmp; export A=1; B=2; f() { echo f$1; }")
        assert (await sh.run("pwd; echo $A$B")).stdout == "/tmp\n12\n"
        for script, code, out in [
            ("exit 3", 3, ""),
            ("cat <<E\nx\nE", 0, "x\n"),
            ("# nothing", 0, ""),
            ("", 0, ""),
            ("echo a; false; echo b", 0, "a\nb\n"),
            ("set -e; false; echo never", 1, ""),
        ]:
            r = await sh.run(script)
            assert (r.exit_code, r.stdout, r.syntax_error) == (code, out, False), script
        async with sb.shell() as other:
            assert (await other.run("echo $A$B")).stdout == "\n"
        bad = await sh.run("if then")
        assert bad.syntax_error
        assert bad.exit_code != 0
        late = await sh.run("cd /; echo so far; sleep 9", timeout=2)
        assert (late.timed_out, late.stdout, late.state_lost) == (True, "so far\n", True)
        assert (await sh.run("kill -9 $$")).state_lost
        assert (await sh.run("pwd; echo $A$B")).stdout == "/tmp\n12\n"
        assert sh.cwd == "/tmp"


async def test_d18_a_shell_is_interrupted(sb: Sandbox) -> None:
    async with sb.shell() as sh:
        assert not await sh.interrupt()
        running = asyncio.ensure_future(sh.run("echo begun; sleep 30; echo never"))

        async def interrupted() -> bool:
            return await sh.interrupt()

        await until(interrupted, "the command runs")
        r = await running
        assert "never" not in r.stdout
        assert r.exit_code == 130
        assert (await sh.run("echo on")).stdout == "on\n"


async def test_d18_a_shell_takes_input_users_and_directories(sb: Sandbox) -> None:
    async with sb.shell(user="user", cwd="/tmp", env={"K": "v"}) as sh:
        assert (await sh.run("id -u; pwd; echo $K; cat", stdin="in")).stdout == "1000\n/tmp\nv\nin"
    with pytest.raises(sandsea.SandseaError):
        await sh.run("true")
    await sh.close()


async def test_d19_is_alive_is_quick(sb: Sandbox) -> None:
    times = []
    for _ in range(20):
        began = time.monotonic()
        assert await sb.is_alive()
        times.append(time.monotonic() - began)
    assert sorted(times)[10] < 0.15


@pytest.mark.parametrize(
    ("argv", "options", "field"),
    [(["a\0b"], {}, "argv"), (["true"], {"env": {"K": "a\0b"}}, "env"), (["true"], {"cwd": "/a\0b"}, "cwd")],
)
async def test_d20_a_nul_is_an_error_that_names_its_field(
    sb: Sandbox, argv: list[str], options: dict[str, str], field: str
) -> None:
    with pytest.raises(ValueError, match=field) as e:
        await sb.run(argv, **options)  # type: ignore[arg-type]
    assert isinstance(e.value, sandsea.InvalidRequest)
    assert field in e.value.detail["field"]


# --- files


async def test_d21_d24_file_errors_are_the_builtins(sb: Sandbox) -> None:
    await sb.files.write("/w/f", "x", mode=0o600)
    await sb.files.make_dir("/w/d")
    for call, builtin, number, path in [
        (sb.files.read("/w/none"), FileNotFoundError, errno.ENOENT, "/w/none"),
        (sb.files.read("/w/d"), IsADirectoryError, errno.EISDIR, "/w/d"),
        (sb.files.write("/w/d", ""), IsADirectoryError, errno.EISDIR, "/w/d"),
        (sb.files.write("/w/f/g", ""), NotADirectoryError, errno.ENOTDIR, "/w/f/g"),
        (sb.files.read("/w/f", user="user"), PermissionError, errno.EACCES, "/w/f"),
        (sb.files.stat("/w/none"), FileNotFoundError, errno.ENOENT, "/w/none"),
        (sb.files.list("/w/f"), NotADirectoryError, errno.ENOTDIR, "/w/f"),
        (sb.files.download_tar("/w/none", io.BytesIO()), FileNotFoundError, errno.ENOENT, "/w/none"),
    ]:
        with pytest.raises(builtin) as e:
            await call
        assert isinstance(e.value, OSError)
        assert isinstance(e.value, sandsea.FileError)
        assert (e.value.errno, e.value.filename, e.value.strerror) == (number, path, os.strerror(number))
    assert await sb.files.read("/w/f", user="root") == b"x"


async def test_d22_write_makes_parents_and_replaces(sb: Sandbox) -> None:
    info = await sb.files.write("/w/a/b/f", "long text")
    assert info.size == 9
    assert (await sb.files.write("/w/a/b/f", b"x")).size == 1
    await sb.files.write("/tmp/u/f", "x", user="user")
    assert [(await sb.files.stat(p)).uid for p in ("/tmp/u", "/tmp/u/f")] == [1000, 1000]
    await sb.files.write("/w/owned", "x", owner="1000:2000")
    owned = await sb.files.stat("/w/owned")
    assert (owned.uid, owned.gid) == (1000, 2000)


async def test_d23_a_file_that_is_too_large_is_refused_with_its_size(sb: Sandbox) -> None:
    await sb.files.write("/w/f", b"x" * 1000)
    with pytest.raises(sandsea.errors.FileTooLarge, match="1000") as e:
        await sb.files.read("/w/f", max_bytes=999)
    assert e.value.errno == errno.EFBIG
    assert len(await sb.files.read("/w/f", max_bytes=1000)) == 1000


async def test_d25_trees_keep_modes_links_and_owners(sb: Sandbox, tmp_path: pathlib.Path) -> None:
    src = tmp_path / "src"
    (src / "empty").mkdir(parents=True)
    (src / "run.sh").write_text("#!/bin/sh\nid -u\n")
    (src / "run.sh").chmod(0o755)
    (src / "link").symlink_to("/outside")
    await sb.files.upload(src, "/w/src", owner="user")
    assert (await sb.run(["/w/src/run.sh"], user="user")).stdout == "1000\n"
    assert [(await sb.files.stat("/w/src/" + n, no_follow=True)).uid for n in ("run.sh", "empty", "link")] == [1000] * 3
    await sb.run("mkfifo /w/src/pipe")
    skipped = await sb.files.download("/w/src", tmp_path / "back")
    assert [pathlib.PurePosixPath(s).name for s in skipped] == ["pipe"]
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == ["empty", "link", "run.sh"]
    assert os.readlink(tmp_path / "back/link") == "/outside"
    await sb.files.upload(src / "run.sh", "/w/one")
    assert (await sb.files.stat("/w/one/run.sh")).mode == 0o755


async def test_d26_batches_answer_item_by_item(sb: Sandbox) -> None:
    await sb.files.make_dir("/w/dir")
    written = await sb.files.write_many({"/w/new/a": b"a", "/w/dir": "no", "relative": "no", "/w/b": ""})
    assert [type(w) for w in written] == [
        sandsea.models.FileInfo, sandsea.errors.IsADirectory, sandsea.errors.InvalidPath, sandsea.models.FileInfo,
    ]  # fmt: skip
    read = await sb.files.read_many(["/w/new/a", "/none", "/w/dir", "/w/b"])
    assert read[0] == b"a"
    assert isinstance(read[1], FileNotFoundError)
    assert read[1].filename == "/none"
    assert isinstance(read[2], IsADirectoryError)
    assert read[3] == b""
    many = {f"/w/many/{i}": str(i) for i in range(1500)}
    assert not [w for w in await sb.files.write_many(many) if isinstance(w, Exception)]
    assert await sb.files.read_many(many) == [str(i).encode() for i in range(1500)]


async def test_files_are_changed_and_linked(sb: Sandbox) -> None:
    await sb.files.write("/w/f", "x")
    info = await sb.files.change("/w/f", mode=0o4711, owner="user", modified_at=1e9)
    assert (info.mode & 0o777, info.uid) == (0o711, 1000)
    assert info.modified_at is not None
    assert info.modified_at.timestamp() == 1e9
    link = await sb.files.symlink("/w/l", "f")
    assert (link.link, await sb.files.read("/w/l")) == ("f", b"x")
    with pytest.raises(FileExistsError):
        await sb.files.symlink("/w/l", "g")
    with pytest.raises(PermissionError):
        await sb.files.change("/w/f", owner="root", user="user")


async def test_changes_are_watched(sb: Sandbox) -> None:
    await sb.files.make_dir("/w")
    async with sb.files.watch("/w", recursive=True) as watch:
        for command, change, path, source in [
            ("mkdir /w/d", "created", "/w/d", ""),
            ("echo x >/w/d/f", "created", "/w/d/f", ""),
            ("mv /w/d/f /w/g", "moved", "/w/g", "/w/d/f"),
            ("echo y >>/w/g", "modified", "/w/g", ""),
            ("chmod 600 /w/g", "attributes", "/w/g", ""),
            ("rm /w/g", "removed", "/w/g", ""),
        ]:
            (await sb.run(command)).check()
            while (ev := await watch.next(10)) and ev.change != change:
                pass
            assert (ev.path, ev.source) == (path, source), command


# --- life


async def test_d27_a_failed_create_names_its_stage() -> None:
    async with Client() as c:
        with pytest.raises(sandsea.NotFound) as image:
            await c.run_container(ContainerRunArgs(container_image="no-such-image"))
        assert (image.value.stage, image.value.retryable) == ("image", False)
        with pytest.raises(sandsea.Exhausted) as room:
            await c.run_container(ContainerRunArgs(container_image="busybox", memory_limit_mb=1 << 30))
        assert room.value.stage == "queue"


async def test_d28_a_create_that_is_given_up_leaves_nothing() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, labels={"test": "d28"})
    async with Client() as c:
        for delay in (0, 0.001, 0.002, 0.004, 0.008, 0.016):
            task = asyncio.ensure_future(c.run_container(args))
            await asyncio.sleep(delay)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).stop()
        batch = asyncio.ensure_future(c.create_many(args, 20))
        await asyncio.sleep(0.01)
        batch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await c.stop_many(await batch)

        async def none_left() -> bool:
            return not await c.list({"test": "d28"})

        await until(none_left, "no sandbox is left")


def test_d28_a_failure_among_several_leaves_nothing(here: tuple[str, str]) -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, labels={"test": "d28g"})

    async def one(c: Client, i: int) -> None:
        async with c.run_container(args) as sb:
            (await sb.run(["sh", "-c", f"exit {int(i == 3)}"])).check()
            await sb.run(["sleep", "60"])

    async def main() -> None:
        async with Client() as c:
            await asyncio.gather(*(one(c, i) for i in range(8)))

    for _ in range(4):
        with pytest.raises(sandsea.CommandFailed):
            asyncio.run(main())
        with sandsea.sync.Client() as c:
            assert c.list({"test": "d28g"}) == []


async def test_d28_a_create_with_a_key_is_found_again() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, key="d28-key")
    async with Client() as c, c.run_container(args) as sb:
        again = await c.run_container(args)
        again.disown()
        assert again.id == sb.id


async def test_d29_stop_may_be_said_twice() -> None:
    async with Client() as c:
        sb = await c.run_container(ARGS)
        await asyncio.gather(sb.stop(), sb.stop())
        await sb.stop()
        assert sb.info.end is not None
        assert sb.info.end.cause == "stopped"


def test_d30_one_client_works_over_several_event_loops(here: tuple[str, str]) -> None:
    c = Client()
    sb = asyncio.run(c.run_container(ARGS))
    for i in range(3):
        assert asyncio.run(sb.run(["echo", str(i)])).stdout == f"{i}\n"
    seen: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: seen.append(asyncio.run(sb.run(["echo", str(i)])).stdout)) for i in range(8)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(seen) == [f"{i}\n" for i in range(8)]
    asyncio.run(sb.stop())


async def test_d31_handles_travel(here: tuple[str, str], sb: Sandbox) -> None:
    token = pathlib.Path(here[1]).read_text().strip()
    handle = json.dumps(sb.to_json())
    assert json.loads(handle) == {"schema": "sandsea.handle/1", "url": here[0], "id": sb.id}
    for data in (handle.encode(), pickle.dumps(sb)):
        assert token.encode() not in data
    program = textwrap.dedent("""
        import asyncio, json, sys, sandsea
        async def main():
            sb = sandsea.Sandbox.from_json(json.load(sys.stdin))
            print((await sb.run("echo there")).stdout, end="")
            again = await sandsea.Client().connect(sb.id)
            print(again.info.spec.limits.memory_bytes, dict(again.info.spec.env))
            print(again.info.image_digest == sys.argv[1] != "")
        asyncio.run(main())
    """)
    digest = next(i.digest for i in await sb._client.images() if i.name == "busybox")
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", program, digest],
        input=handle,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["there", f"{64 << 20} {{}}", "True"]


@pytest.mark.usefixtures("network")
async def test_d31_a_handle_made_elsewhere_knows_the_network_in_force() -> None:
    args = ContainerRunArgs(
        container_image="busybox",
        memory_limit_mb=64,
        ttl=600,
        network_rules={"pypi": True, "npm": False},
        as_of="2024-06-01",
        deny=["pypi:flask"],
        phases={"agent": {"example.org:443": True, "*.example.org": False}, "grade": {}},
    )
    async with Client() as c, c.run_container(args) as sb, Client() as other:
        again = await other.connect(sb.id)
        assert again.info.network_phase == "agent"
        spec = again.info.spec
        assert spec is not None
        assert spec.network is not None
        assert spec.network.services == {"pypi": True, "npm": False}
        assert spec.network.deny == ["pypi:flask"]
        assert str(spec.network.as_of) == "2024-06-01 00:00:00+00:00"
        agent, grade = spec.network.phases
        assert [(r.domain, r.reject, [p.first for p in r.ports]) for r in agent.rules[:1]] == [
            ("example.org", False, [443])
        ]
        assert (agent.rules[1].domain, agent.rules[1].reject, grade.rules) == ("*.example.org", True, [])
        await sb.set_phase("grade")
        assert (await again.refresh()).network_phase == "grade"
        # What is in force can be put in force again.
        await again.set_network(spec.network)
        assert again.info.spec is not None
        assert again.info.spec.network == spec.network
        log = [e async for e in sb.network_log()]
        assert [e.seq for e in log] == list(range(len(log)))


async def test_d32_asking_is_no_use() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, ttl_running_stop=1)
    async with Client() as c:
        sb = await c.run_container(args)

        async def idle() -> bool:
            return (await sb.refresh()).state == "SANDBOX_STATE_ENDED"

        await until(idle, "the idle limit ends it though it is asked after")
        assert sb.info.end is not None
        assert sb.info.end.cause == "idle"


async def test_d33_names_are_labels() -> None:
    labels = {"session.id": "hello-world__bZZeEkw__verifier__grade", "a/b.c": "x" * 256}
    async with (
        Client() as c,
        c.run_container(ContainerRunArgs(container_image="busybox", ttl=600, labels=labels)) as sb,
    ):
        assert [s.id for s in await c.list(labels)] == [sb.id]


async def test_d34_a_sandbox_that_is_gone_says_so_in_one_way(tmp_path: pathlib.Path) -> None:
    async with Client() as c:
        sb = await c.run_container(ARGS)
        p = await sb.start(["sleep", "77"], key="k")
        sh = await sb.shell()
        running = [
            asyncio.ensure_future(p.wait()),
            asyncio.ensure_future(sb.run("sleep 78")),
            asyncio.ensure_future(sh.run("sleep 79")),
        ]

        async def all_run() -> bool:
            return sum(i.state == "PROCESS_STATE_RUNNING" for i in await sb.processes()) == 3

        await until(all_run, "three commands run")
        await sb.stop()
        calls = [
            sb.run("true"),
            sb.start("true").wait(),
            sb.files.read("/etc/passwd"),
            sb.files.write("/f", b""),
            sb.files.list("/"),
            sb.files.upload(__file__, "/"),
            sb.files.download("/etc", tmp_path),
            sb.files.read_many(["/etc/passwd"]),
            sb.files.symlink("/a", "b"),
            sb.files.watch("/").begin(),
            sb.extend_ttl(60),
            sb.pty(),
            sb.shell(),
            sh.run("true"),
            *running,
        ]
        outcomes = [await outcome(call) for call in calls]
        assert [type(e).__name__ for e in outcomes] == ["SandboxEnded"] * len(calls)
        assert {e.cause for e in outcomes if isinstance(e, sandsea.SandboxEnded)} == {"stopped"}
        assert not await sb.is_alive()


async def test_d36_the_entrypoint_is_chosen() -> None:
    args = ContainerRunArgs(container_image="busybox", ttl=600, entrypoint=["sh", "-c", "echo entry; sleep 77"])
    async with Client() as c, c.run_container(args) as sb:
        (first,) = await sb.processes()
        assert (await anext(aiter(sb.attach(first.number)))).text == "entry\n"


async def test_d37_an_endpoint_is_a_url_and_headers(here: tuple[str, str], sb: Sandbox) -> None:
    await sb.files.write("/www/a.txt", "from inside")
    for port, address in ((8001, "127.0.0.1"), (8002, "0.0.0.0")):
        e = await sb.endpoint(port)
        assert e.url == f"{here[0]}/endpoint/{sb.id}/{port}/"
        async with httpx.AsyncClient(base_url=e.url, headers=e.headers) as http:
            early = await http.get("a.txt")
            assert (early.status_code, early.headers["sandsea-error"]) == (502, "unavailable")
            assert f"nobody listens at port {port} yet" in early.json()["message"]
            await sb.start(["httpd", "-f", "-p", f"{address}:{port}", "-h", "/www"], detached=True)

            async def there(http: httpx.AsyncClient = http) -> bool:
                return (await http.get("a.txt")).status_code == 200

            await until(there, "the server inside listens")
            answer = await http.get("a.txt")
            assert (answer.text, answer.headers.get("sandsea-error")) == ("from inside", None)
            assert (await http.get("b.txt")).status_code == 404
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.get(e.url)).status_code == 401
            assert (await stranger.get(e.browser_url, follow_redirects=True)).url == e.url
    with pytest.raises(sandsea.InvalidRequest):
        await sb.endpoint(65536)


async def test_d39_capabilities_are_asked_once() -> None:
    async with Client() as c:
        caps = await c.capabilities()
        assert caps.resources["memory"] == "limit"
        assert "endpoint" in caps.features
        kinds = {"service", "domain", "wildcard", "ipv4", "cidr", "git"}
        assert (set(caps.network_entries), caps.network_changes) in [(kinds, True), (set(), False)]
        assert await c.capabilities() is caps


# --- terminals


async def test_a_terminal_has_a_size_that_changes(sb: Sandbox) -> None:
    async with sb.pty(cols=120, rows=40) as p:
        await p.send("stty size; tty\n")
        assert re.search(r"\r\n40 120\r\n/dev/pts/\d+\r\n", await p.read_until(re.compile(r"/dev/pts/\d+\r\n"), 20))
        await p.resize(cols=100, rows=30)
        await p.send("stty size\n")
        await p.read_until("30 100\r\n", 20)
        await p.send("exit 3\n")
        assert (await p.wait()).exit_code == 3


async def test_a_terminal_is_left_and_taken_up_again(sb: Sandbox) -> None:
    async with sb.pty() as p:
        await p.send("echo mar''ker\n")
        await p.read_until("marker\r\n", 20)
        await p.detach()
    with pytest.raises(sandsea.PreconditionFailed):
        await sb.attach(p.number).close_input()
    async with sb.attach_pty(p.number, p.offset) as again:
        await again.send("echo mo''re\n")
        text = await again.read_until("more\r\n", 20)
        assert "marker" not in text
        await again.kill()
        assert (await again.wait()).signal == "SIGKILL"
    async with sb.pty() as ended:
        pass
    assert (await sb.attach(ended.number).wait()).signal == "SIGKILL"


# --- without await


@pytest.fixture
def box(here: tuple[str, str]) -> Iterator[sandsea.sync.Sandbox]:
    with sandsea.sync.Client() as c, c.run_container(ARGS) as sandbox:
        yield sandbox


Box = sandsea.sync.Sandbox


def test_sync_d4_a_time_limit_leaves_the_output(box: Box) -> None:
    with pytest.raises(sandsea.CommandTimeout) as e:
        box.run("echo so far; sleep 77", timeout=2).check()
    assert e.value.partial.stdout == "so far\n"


def test_sync_d7_an_interrupt_kills_the_tree(box: Box) -> None:
    """Ctrl-C in a program that waits for a command."""

    def interrupt() -> None:
        while not box.files.exists("/up"):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background ignores it
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            box.run("touch /up; sleep 77")
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert "sleep 77" not in box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout


def test_sync_d8_standard_input_is_exact(box: Box) -> None:
    data = bytes(range(256)) * 20_000
    assert box.run(["cat"], stdin=data).stdout_bytes == data


def test_sync_d13_d15_output_streams_and_is_read_again(box: Box) -> None:
    with box.start("for i in 1 2 3; do echo $i; sleep 0.05; done") as p:
        assert p.number > 0  # it starts at once here
        assert "".join(ev.text for ev in p) == "1\n2\n3\n"
    assert box.attach(p.number, stdout_offset=2).wait().stdout == "2\n3\n"


def test_sync_d16_a_live_process_is_talked_to(box: Box) -> None:
    with box.start("while read x; do echo got $x; done", stdin=True) as p:
        p.send("one\n")
        assert next(iter(p)).text == "got one\n"
        p.close_input()
        assert p.wait().exit_code == 0


def test_sync_d18_a_shell(box: Box) -> None:
    with box.shell() as sh:
        sh.run("cd /tmp; A=1")
        assert sh.run("pwd; echo $A").stdout == "/tmp\n1\n"


def test_sync_d24_d26_files(box: Box, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError) as e:
        box.files.read("/none")
    assert e.value.filename == "/none"
    (tmp_path / "a").write_text("a")
    box.files.upload(tmp_path, "/w")
    assert box.files.read_many(["/w/a"]) == [b"a"]


def test_sync_d37_an_endpoint(box: Box) -> None:
    e = box.endpoint(8000, ttl=60)
    assert (e.url.endswith("/8000/"), list(e.headers)) == (True, ["Sandsea-Endpoint-Token"])
    assert httpx.get(e.url, headers=e.headers).status_code == 502


def test_sync_d28_a_block_that_fails_stops_its_sandbox(here: tuple[str, str]) -> None:
    with sandsea.sync.Client() as c:
        with pytest.raises(ZeroDivisionError), c.run_container(ARGS) as sb:
            raise ZeroDivisionError
        assert sb.state == "ended"


def test_sync_a_terminal(box: Box) -> None:
    with box.pty(cols=100) as p:
        p.send("stty size\n")
        p.read_until("24 100\r\n", 20)
        with pytest.raises(sandsea.RequestTimeout):
            p.read_until("never", 0.1)


def test_sync_watch(box: Box) -> None:
    with box.files.watch("/tmp") as watch:
        box.files.write("/tmp/a", "x")
        assert watch.next(10).path.startswith("/tmp/")


def test_sync_threads_share_a_client(box: Box) -> None:
    seen: list[str] = []
    threads = [threading.Thread(target=lambda i=i: seen.append(box.run(["echo", str(i)]).stdout)) for i in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(seen, key=int) == [f"{i}\n" for i in range(16)]
