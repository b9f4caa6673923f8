"""The images of the demo, made once and found again by their content."""

from __future__ import annotations

import dataclasses
import io
import tarfile
from collections.abc import Callable

from sandsea import Client, ContainerRunArgs

from . import tasks
from .tasks import GO_ENV, Task


@dataclasses.dataclass
class Images:
    """Names of images by their role."""

    base: str = ""
    workspaces: dict[str, str] = dataclasses.field(default_factory=dict)
    hidden: dict[str, str] = dataclasses.field(default_factory=dict)
    toolkits: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    #: bytes of the layers that they are made of, each once
    shared_bytes: int = 0


async def prepare(client: Client, all_tasks: list[Task], say: Callable[[str], None]) -> Images:
    """Import what is missing."""
    have = {i.name for i in await client.images()}
    out = Images()

    async def put(role: str, tar: bytes) -> str:
        name = tasks.name_for(role, tar)
        if name not in have:
            say(f"  layer {role:24} {len(tar) / 2**20:7.1f} MiB")
            await client.import_rootfs(io.BytesIO(tar), name)
        return name

    say("base image: Debian bookworm with python3, patch and git")
    out.base = (await client.import_debian("bookworm", ["python3", "patch", "git"])).name
    out.toolkits["python"] = [await put("toolkit-python", tasks.python_toolkit())]
    for t in all_tasks:
        out.workspaces[t.name] = await put("workspace-" + t.name, tasks.workspace(t))
        out.hidden[t.name] = await put("hidden-" + t.name, tasks.hidden(t))
    if any(t.kind == "go" for t in all_tasks):
        chain = await put("toolkit-go", tasks.go_toolkit())
        cache = "demo-gocache-" + chain.rsplit("-", 1)[-1]
        if cache not in have:
            await _fill_go_cache(client, out, [t for t in all_tasks if t.kind == "go"], chain, cache, say)
        out.toolkits["go"] = [chain, cache]
    toolkits = {name for stack in out.toolkits.values() for name in stack}
    used = toolkits | {out.base, *out.workspaces.values(), *out.hidden.values()}
    layers = {layer.digest: layer.bytes for i in await client.images() if i.name in used for layer in i.layers}
    out.shared_bytes = sum(layers.values())
    return out


async def _fill_go_cache(
    client: Client, images: Images, go_tasks: list[Task], chain: str, name: str, say: Callable[[str], None]
) -> None:
    """Build the standard library and the modules once, in a sandbox, and keep the caches as a layer."""
    say("  layer gocache: building the standard library in a sandbox, about a minute")
    with tarfile.open(fileobj=(buf := io.BytesIO()), mode="w") as tar:
        for number, task in enumerate(go_tasks):
            args = ContainerRunArgs(
                base=images.base, workspace=images.workspaces[task.name], toolkits=[chain], memory_limit_mb=3072,
                cpu_cores_limit=2, env=GO_ENV, ttl=1800,
            )  # fmt: skip
            async with await client.run_container(args) as sb:
                # The tests are compiled, not run: their dependencies end up in the cache.
                line = "mkdir -p /opt/gocache /opt/gomod && go vet . >/dev/null 2>&1; go test -count=1 -run '^$' ."
                (await sb.run_shell(line, cwd=task.workdir, timeout=900)).check()
                for folder in ("gocache", "gomod"):
                    got = io.BytesIO()
                    await sb.files.download_tar(f"/opt/{folder}", got)
                    got.seek(0)
                    _merge(tar, got, f"opt/{folder}", skip_known=number > 0)
    buf.seek(0)
    await client.import_rootfs(buf, name)


def _merge(out: tarfile.TarFile, source: io.BytesIO, prefix: str, *, skip_known: bool) -> None:
    """Add the entries of a tar below prefix, those that are there already left out."""
    known = set(out.getnames()) if skip_known else set()
    with tarfile.open(fileobj=source, mode="r:") as tar:
        for member in tar:
            member.name = f"{prefix}/{member.name.lstrip('./')}".rstrip("/")
            if member.name not in known:
                out.addfile(member, tar.extractfile(member) if member.isfile() else None)
