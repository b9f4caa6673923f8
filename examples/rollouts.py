"""A trainer's loop in 40 lines: sandboxes in parallel, each works on the task, each diff is graded in a fresh one.

python examples/rollouts.py debian:bookworm+patch,python3
"""

import asyncio
import sys

from sandsea import Client, ContainerRunArgs, InfraError

TASK = {"/w/calc.py": "def add(a, b):\n    return a - b\n"}
TEST = "from calc import add\nassert add(2, 3) == 5\nassert add(-1, 1) == 0\n"
ATTEMPTS = ["sed -i s/-/+/ calc.py", "true", "echo 'add = lambda a, b: 5' > calc.py", "exit 3"]


async def roll_out(client: Client, args: ContainerRunArgs, action: str) -> str:
    async with await client.run_container(args) as sb:
        for path, text in TASK.items():
            await sb.files.write(path, text)
        (await sb.run_shell("cp -r /w /before", timeout=60)).check()
        await sb.run_shell(action, cwd="/w", timeout=60)
        return (await sb.run_shell("diff -ru before w", cwd="/")).stdout


async def grade(client: Client, args: ContainerRunArgs, diff: str) -> float:
    async with await client.run_container(args) as sb:
        for path, text in TASK.items():
            await sb.files.write(path, text)
        await sb.files.write("/patch", diff)
        await sb.run_shell("patch -p1 -i /patch", cwd="/w")
        await sb.files.write("/w/test_calc.py", TEST)
        return 1.0 if (await sb.run_shell("python3 test_calc.py", cwd="/w", timeout=60)).exit_code == 0 else 0.0


async def reward(client: Client, args: ContainerRunArgs, action: str) -> float:
    while True:
        try:
            return await grade(client, args, await roll_out(client, args, action))
        except InfraError as e:  # the platform's fault is never a score
            print("again:", e)


async def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
    async with Client() as client:
        print(await asyncio.gather(*(reward(client, args, action) for action in ATTEMPTS)))


asyncio.run(main())
