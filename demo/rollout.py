"""One rollout: open a sandbox, look around, work on the project, hand in a diff."""

from __future__ import annotations

import dataclasses
import time

from sandsea import Client, ContainerRunArgs, Result, Sandbox

from . import cheats, grader, network
from .images import Images
from .tasks import GO_ENV, Task


@dataclasses.dataclass
class Figures:
    """What the demo measures from outside."""

    creates: list[float] = dataclasses.field(default_factory=list)
    #: of a rollout's first command, from the call to its end
    first_commands: list[float] = dataclasses.field(default_factory=list)
    memory: list[int] = dataclasses.field(default_factory=list)
    sandboxes: int = 0
    #: what was tried by network
    network: list[network.Outcome] = dataclasses.field(default_factory=list)


async def open_sandbox(
    client: Client, task: Task, images: Images, figures: Figures, *, phase: str, networked: bool, kind: str = ""
) -> Sandbox:
    """A fresh sandbox of base, workspace and toolkits; the hidden layer goes to the grader's only.

    networked gives it the network of its phase, else it has none. One that cheats by network has every toolkit.
    """
    kinds = ["python", "go"] if kind == "network" else [task.kind]
    toolkits = [layer for k in kinds for layer in images.toolkits.get(k, [])]
    env = dict(GO_ENV) if task.kind == "go" else {}
    if phase == network.GRADE:
        toolkits.append(images.hidden[task.name])
    elif networked:
        # The agent's go command asks the package service, not the file proxy of the grader's.
        for name in ("GOPROXY", "GOSUMDB"):
            env.pop(name, None)
    args = ContainerRunArgs(
        base=images.base,
        workspace=images.workspaces[task.name],
        toolkits=toolkits,
        memory_limit_mb=1536 if task.kind == "go" else 512,
        cpu_cores_limit=2 if task.kind == "go" else 1,
        disk_limit_mb=2048,
        ttl_running_stop=600,
        ttl=1800,
        env=env,
        labels={"demo": task.name},
        job="demo",
        **(network.policy(task, phase) if networked else {}),
    )
    began = time.monotonic()
    sandbox = await client.run_container(args, timeout=120)
    figures.creates.append(time.monotonic() - began)
    figures.sandboxes += 1
    return sandbox


async def roll_out(client: Client, task: Task, kind: str, images: Images, figures: Figures, *, networked: bool) -> str:
    """Do what one kind of agent does; the diff is all that is kept."""
    async with await open_sandbox(
        client, task, images, figures, phase=network.AGENT, networked=networked, kind=kind
    ) as sb:
        began = time.monotonic()
        look = await _sh(sb, "ls -a && wc -l " + " ".join(task.sources) + " 2>/dev/null; cat README* | head -40", task)
        figures.first_commands.append(time.monotonic() - began)
        if task.wrong[0].file.rsplit("/", 1)[-1] not in look.stdout:
            raise RuntimeError(
                f"{task.name}: {task.wrong[0].file} is not in the workspace: {look.stdout!r} {look.stderr!r}"
            )
        (await _sh(sb, "mkdir /tmp/before && cp -a . /tmp/before/a && ln -s $PWD /tmp/before/b", task)).check()
        patch = cheats.patch(task, kind)
        if patch:
            (await grader.apply(sb, task, patch)).check()
        command = cheats.command(task, kind)
        if command:
            (await _sh(sb, command, task)).check()
        if kind == "network":
            figures.network += await network.cheat(sb, task)
        diff = await _sh(sb, "cd /tmp/before && diff -ruN -x __pycache__ -x .pytest_cache a b/", task)
        info = await sb.refresh()
        if info.usage is not None:
            figures.memory.append(info.usage.memory_bytes)
        if diff.exit_code > 1 or diff.truncated:
            raise RuntimeError(f"{task.name}: diff failed: {diff.stderr}")
        return diff.stdout


async def _sh(sb: Sandbox, line: str, task: Task) -> Result:
    return await sb.run_shell(line, cwd=task.workdir, timeout=120)
