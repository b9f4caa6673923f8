"""The code of the README runs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import pathlib
import re
import textwrap

import httpx
import pytest

import sandsea
import sandsea.sync
from sandsea import Client, ContainerRunArgs

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.split("\n", 1)[0][:40])
def test_a_block_runs(
    block: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/a").write_text("a")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"asyncio": asyncio, "httpx": httpx, "sandsea": sandsea}
    names["ContainerRunArgs"] = ContainerRunArgs
    if "set_network" in block:
        request.getfixturevalue("network")
    with contextlib.redirect_stdout(io.StringIO()):
        if re.search(r"^(await|async|    await|.*= await)", block, re.MULTILINE) and "asyncio.run(" not in block:
            exec("async def block(c, sb):\n" + textwrap.indent(block, "    "), names)

            async def run() -> None:
                async with Client() as c, c.run_container(ContainerRunArgs(container_image="py", ttl=600)) as sb:
                    await names["block"](c, sb)  # type: ignore[operator]

            asyncio.run(run())
        else:
            exec(block, names)
            if "test_it" in names:
                with sandsea.sync.Client() as c, c.run_container(ContainerRunArgs(container_image="py")) as sb:
                    names["test_it"](sb)  # type: ignore[operator]
