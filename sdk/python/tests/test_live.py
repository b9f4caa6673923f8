"""The SDK against a real server."""

from __future__ import annotations

import asyncio
import io
import os
import pathlib
import pickle
import tarfile

import pytest
from waiting import until

import sandsea
import sandsea.sync
from sandsea import Client, ContainerRunArgs

ARGS = ContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl_running_stop=120, ttl=600)
Server = tuple[str, str]


def connect(server: Server) -> Client:
    return Client(server[0], token_file=server[1])


async def test_a_command_that_fails_is_a_result(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        r = await sb.run_shell("echo out; echo err >&2; exit 3")
        assert (r.exit_code, r.stdout, r.stderr, r.cause) == (3, "out\n", "err\n", "completed")
        with pytest.raises(sandsea.CommandFailed):
            r.check()
        assert (await sb.run(["/no/such"])).start_failure == "not_found"
        killed = await sb.run_shell("kill -9 $$")
        assert (killed.exit_code, killed.signal, killed.cause) == (137, "SIGKILL", "signal")


async def test_a_time_limit_kills_the_tree_and_keeps_the_output(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        r = await sb.run_shell("echo so far; setsid sleep 77 & sleep 77", timeout=2)
        assert (r.exit_code, r.cause, r.stdout, r.timed_out) == (124, "timeout", "so far\n", True)
        with pytest.raises(TimeoutError):
            r.check()
        left = await sb.run_shell("cat /proc/[0-9]*/cmdline")
        assert "77" not in left.stdout


async def test_standard_input_is_exact(server: Server) -> None:
    data = bytes(range(256)) * 20_000  # 5 MB, more than one request may carry
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        r = await sb.run(["cat"], stdin=data, max_output=16 << 20)
        assert r.stdout_bytes == data
        assert not r.truncated
        assert (await sb.run(["cat"])).stdout_bytes == b""


async def test_output_streams_and_can_be_read_again(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        p = sb.start(["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.05; done"])
        text = "".join([out.text async for out in p])
        assert text == "1\n2\n3\n"
        assert p.result is not None
        assert p.result.exit_code == 0
        again = await sb.attach(p.number).wait()
        assert again.stdout == text


async def test_input_goes_to_a_live_process(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        p = sb.start(["cat"], stdin=True)
        reader = asyncio.ensure_future(p.wait())
        await p.send("one\n")
        await p.send("two\n")
        await p.close_input()
        assert (await reader).stdout == "one\ntwo\n"


async def test_a_cancelled_run_kills_the_command(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        task = asyncio.ensure_future(sb.run(["sleep", "88"]))

        async def in_state(state: str) -> bool:
            return [p.state for p in await sb.processes()] == ["PROCESS_STATE_" + state]

        await until(lambda: in_state("RUNNING"), "the command runs")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: in_state("EXITED"), "the command has ended")


async def test_big_output_is_cut_in_the_middle(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        r = await sb.run_shell("seq 1 200000", max_output=1000)
        assert r.truncated
        assert r.stdout.startswith("1\n2\n")
        assert r.stdout.endswith("199999\n200000\n")
        assert r.stdout_total == len("".join(f"{i}\n" for i in range(1, 200_001)))


async def test_files(server: Server, tmp_path: pathlib.Path) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        await sb.files.write("/w/deep/a.bin", b"\0\xff" * 100_000, mode=0o600)
        info = await sb.files.stat("/w/deep/a.bin")
        assert (info.size, info.mode) == (200_000, 0o600)
        assert await sb.files.read("/w/deep/a.bin", offset=1, length=2) == b"\xff\0"
        assert [f.path for f in await sb.files.list("/w/deep")] == ["/w/deep/a.bin"]
        with pytest.raises(FileNotFoundError) as missing:
            await sb.files.read("/nope")
        assert missing.value.filename == "/nope"
        with pytest.raises(IsADirectoryError):
            await sb.files.write("/w", b"")
        with pytest.raises(PermissionError):
            await sb.files.read("/w/deep/a.bin", user="user")
        with pytest.raises(sandsea.FileError):
            await sb.files.read("/w/deep/a.bin", max_bytes=10)
        assert not await sb.files.exists("/w/none")
        await sb.files.move("/w/deep/a.bin", "/w/b.bin")
        await sb.files.remove("/w", recursive=True)
        assert not await sb.files.exists("/w")


async def test_trees_go_both_ways(server: Server, tmp_path: pathlib.Path) -> None:
    (tmp_path / "src/empty").mkdir(parents=True)
    (tmp_path / "src/run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "src/run.sh").chmod(0o755)
    (tmp_path / "src/link").symlink_to("run.sh")
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        await sb.files.upload(tmp_path / "src", "/w/src")
        assert (await sb.run(["/w/src/link"])).stdout == "ran\n"
        await sb.files.download("/w/src", tmp_path / "back")
    assert os.readlink(tmp_path / "back/link") == "run.sh"
    assert (tmp_path / "back/empty").is_dir()
    assert (tmp_path / "back/run.sh").stat().st_mode & 0o777 == 0o755


async def test_users_environment_and_directories(server: Server) -> None:
    async with connect(server) as c, await c.run_container(ARGS) as sb:
        r = await sb.run_shell("id -u; id -G; echo $HOME $USER $K; pwd", user="user", env={"K": "v"}, cwd="/tmp")
        assert r.stdout.split("\n")[:4] == ["1000", "1000 2000", "/home user v", "/tmp"]
        assert (await sb.run(["env"], env={"A": "b"}, replace_env=True)).stdout.strip() == "A=b"
        assert (await sb.run(["true"], user="nobody-here")).start_failure == "user"
        assert (await sb.run(["true"], cwd="/none")).start_failure == "cwd"


async def test_an_ended_sandbox_says_why(server: Server) -> None:
    async with connect(server) as c:
        sb = await c.run_container(ARGS)
        await sb.stop()
        await sb.stop()
        assert not await sb.is_alive()
        with pytest.raises(sandsea.SandboxEnded) as e:
            await sb.run(["true"])
        assert e.value.cause == "stopped"


async def test_the_same_key_gives_the_same_sandbox_and_the_same_result(server: Server) -> None:
    args = ContainerRunArgs(container_image="busybox", key="one-key", ttl=600)
    async with connect(server) as c, await c.run_container(args) as sb:
        again = await c.run_container(args)
        assert again.id == sb.id
        again.disown()
        r = await sb.run_shell("cat /proc/uptime", key="k1")
        repeated = await sb.run_shell("cat /proc/uptime", key="k1")
        assert repeated.stdout == r.stdout
        assert repeated.number == r.number
        with pytest.raises(sandsea.AlreadyExists):
            await sb.run_shell("true", key="k1")
        with pytest.raises(sandsea.AlreadyExists):
            await c.run_container(ContainerRunArgs(container_image="busybox", key="one-key", memory_limit_mb=99))


async def test_many_are_made_and_failures_keep_their_place(server: Server) -> None:
    async with connect(server) as c:
        boxes = await c.create_many(ARGS, 5)
        assert all(isinstance(b, sandsea.Sandbox) for b in boxes)
        await asyncio.gather(*(b.stop() for b in boxes if isinstance(b, sandsea.Sandbox)))
        failed = await c.create_many(ContainerRunArgs(container_image="busybox", memory_limit_mb=1 << 30), 2)
        assert all(isinstance(b, sandsea.SandseaError) for b in failed)


async def test_bad_requests_name_the_field(server: Server) -> None:
    async with connect(server) as c:
        with pytest.raises(sandsea.InvalidRequest) as e:
            await c.run_container(ContainerRunArgs(container_image="busybox", memory_limit_mb=1))
        assert e.value.detail["field"] == "limits.memory_bytes"
        with pytest.raises(sandsea.NotFound, match="busybox"):
            await c.run_container(ContainerRunArgs(container_image="busybx"))
        with pytest.raises(sandsea.InvalidRequest, match="phases"):
            await c.run_container(ContainerRunArgs(container_image="busybox", phases={"a b": {}}))
        if not (await c.capabilities()).network_entries:  # what cannot be enforced is refused
            with pytest.raises(sandsea.PreconditionFailed):
                await c.run_container(ContainerRunArgs(container_image="busybox", network_rules={"pypi": True}))


def test_one_client_works_over_several_event_loops(server: Server) -> None:
    c = connect(server)
    sb = asyncio.run(c.run_container(ARGS))
    for i in range(3):
        assert asyncio.run(sb.run(["echo", str(i)])).stdout == f"{i}\n"
    asyncio.run(sb.stop())


def test_a_handle_travels(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDSEA_TOKEN_FILE", server[1])
    with sandsea.sync.Client(server[0], token_file=server[1]) as c, c.run_container(ARGS) as sb:
        again = pickle.loads(pickle.dumps(sb))
        assert again.run(["echo", "there"]).stdout == "there\n"


def test_the_synchronous_front_does_the_same(server: Server) -> None:
    with sandsea.sync.Client(server[0], token_file=server[1]) as c, c.run_container(ARGS) as sb:
        assert sb.run_shell("cat", stdin="x" * 3_000_000, max_output=8 << 20).stdout == "x" * 3_000_000
        p = sb.start(["sh", "-c", "echo a; until test -e /go; do sleep 0.05; done; echo b"])
        assert next(p).text == "a\n"
        sb.files.write("/go", "")
        assert [o.text for o in p] == ["b\n"]
        sb.files.write("/w/a", "text")
        assert sb.files.read_text("/w/a") == "text"
        buf = io.BytesIO()
        assert sb.files.download_tar("/w", buf) == []
        buf.seek(0)
        with tarfile.open(fileobj=buf) as tar:
            assert [m.name.strip("./") for m in tar if m.isfile()] == ["a"]
        with pytest.raises(sandsea.CommandTimeout) as late:
            sb.run(["sleep", "9"], timeout=0.2).check()
        assert late.value.partial.timed_out


async def test_the_listing_of_the_paper_runs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from libdsec import DSecClient, DSecContainerRunArgs

    monkeypatch.setenv("SANDSEA_URL", server[0])
    monkeypatch.setenv("SANDSEA_TOKEN_FILE", server[1])
    async with connect(server) as c:
        if not (await c.capabilities()).network_entries:
            pytest.skip("no network rule can be enforced here")
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image="busybox",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("id -u")
    assert (result.exit_code, result.stdout) == (0, "0\n")

    # Its rules are in force.
    pypi = await sandbox.run_shell("busybox wget -O /tmp/six http://100.64.0.1/pypi/simple/six/", timeout=120)
    if pypi.exit_code != 0:  # this machine reaches no registry
        assert "HTTP/1.1 503" in pypi.stderr
    npm = await sandbox.run_shell("printf 'GET /npm/ms HTTP/1.0\\r\\n\\r\\n' | busybox nc 100.64.0.1 80", timeout=60)
    assert npm.stdout.splitlines()[0].split()[1] == "403"
    assert "Sandsea-Rule: service npm" in npm.stdout
    await sandbox.stop()
    await client.close()
