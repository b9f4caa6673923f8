"""A trainer's loop: sandboxes in parallel, each works on the task, each diff is graded in a fresh one.

python examples/rollouts.py IMAGE

IMAGE needs bash, diff and patch: sandsea image import debian:bookworm --include patch
"""

import asyncio
import contextlib
import sys

from sandsea import Client, ContainerRunArgs, InfraError

ARGS = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
TASK = {"/w/add.sh": "echo $(($1 - $2))\n", "/before/add.sh": "echo $(($1 - $2))\n"}
TEST = "test $(sh add.sh 2 3) = 5 && test $(sh add.sh -1 1) = 0"
ATTEMPTS = ["sed -i s/-/+/ add.sh", "true", "echo echo 5 >add.sh", "exit 3"]


async def roll_out(client: Client, action: str) -> str:
    async with client.run_container(ARGS) as sandbox:
        (await sandbox.run_shell("type diff patch")).check()  # an image without them is an error, never a score
        await sandbox.files.write_many(TASK)
        await sandbox.run_shell(action, cwd="/w", timeout=60)
        return (await sandbox.run_shell("diff -ru before w", cwd="/")).stdout


async def grade(client: Client, diff: str) -> float:
    async with client.run_container(ARGS) as sandbox:
        await sandbox.files.write_many({**TASK, "/patch": diff})
        await sandbox.run_shell("patch -p1 -i /patch", cwd="/w")
        return 1.0 if (await sandbox.run_shell(TEST, cwd="/w", timeout=60)).exit_code == 0 else 0.0


async def reward(client: Client, action: str) -> float:
    for _ in range(2):
        with contextlib.suppress(InfraError):  # the platform's fault is never a score, and worth another try
            return await grade(client, await roll_out(client, action))
    return await grade(client, await roll_out(client, action))


async def main() -> None:
    async with Client() as client:
        print(await asyncio.gather(*(reward(client, action) for action in ATTEMPTS)))


asyncio.run(main())
