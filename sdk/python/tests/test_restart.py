"""The server's process is killed in the middle of everything: callers of the SDK notice a pause."""

from __future__ import annotations

import asyncio
import io
import pathlib

import pytest
from conftest import begun, busybox_image, running
from waiting import until

from sandsea import Client, ContainerRunArgs


async def test_a_killed_server_loses_nothing(server: tuple[str, str], tmp_path: pathlib.Path) -> None:
    await asyncio.wait_for(killed(tmp_path), 180)


async def killed(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as (url, up):
        async with Client(url, token_file=str(tmp_path / "admin.token")) as c:
            await c.import_rootfs(io.BytesIO(busybox_image()), "busybox")
            async with c.run_container(ContainerRunArgs(container_image="busybox", ttl=600)) as sb:
                script = "for i in 1 2 3; do echo $i; while ! test -e /go$i; do sleep 0.05; done; done; exit 7"
                plain = asyncio.ensure_future(sb.run(script))
                keyed = asyncio.ensure_future(sb.run(script, key="k"))
                session = await sb.shell()
                await session.run("A=1")
                terminal = await sb.pty()
                await terminal.send("echo be''fore\n")
                await terminal.read_until("before\r\n", 20)

                async def both_run() -> bool:
                    return (
                        sum("/go$i" in str(p.command) and p.state.endswith("RUNNING") for p in await sb.processes())
                        == 2
                    )

                await until(both_run, "both run")
                await sb.files.write("/go1", "")
                up[0].kill()
                up[0].wait()
                reading = asyncio.ensure_future(sb.files.read("/etc/passwd"))
                up[0] = await asyncio.to_thread(begun, tmp_path, url.removeprefix("http://"))
                assert (await reading).startswith(b"root:")
                await sb.files.write_many({"/go2": "", "/go3": ""})
                for r in await asyncio.gather(plain, keyed):
                    assert (r.exit_code, r.stdout, r.truncated) == (7, "1\n2\n3\n", False)
                assert (await session.run("echo $A")).stdout == "1\n"
                await terminal.send("echo af''ter\n")
                await terminal.read_until("after\r\n", 20)
                await terminal.close()


def test_a_server_that_never_was_is_not_waited_for() -> None:
    with pytest.raises(ConnectionError, match="Start it"):
        asyncio.run(Client("http://127.0.0.1:1", token="t").open())
