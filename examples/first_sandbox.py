"""The first five minutes: a sandbox, a command, a result, an error.

python examples/first_sandbox.py IMAGE
"""

import asyncio
import sys

import sandsea
from sandsea import Client, ContainerRunArgs


async def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
    async with Client() as client, client.run_container(args) as sandbox:
        hello = await sandbox.run_shell("echo hello from $(uname -s)", timeout=10)
        print(hello.stdout, end="")

        broken = await sandbox.run_shell("echo no such luck >&2; exit 3")  # a failure is a result
        print(f"exit code {broken.exit_code}, {broken.cause}: {broken.stderr}", end="")

        slow = await sandbox.run_shell("echo so far; sleep 60", timeout=2)
        print(f"after its time limit: {slow.cause}, and it had written {slow.stdout!r}")

        try:
            await sandbox.files.read("/no/such/file")
        except FileNotFoundError as e:  # errors are the builtin ones, too
            print(f"errno {e.errno}: {e.filename}")

    try:
        await sandbox.run_shell("true")
    except sandsea.SandboxEnded as e:
        print(f"ended: {e.cause}")


asyncio.run(main())
