"""A process that lives on while it is talked to: a tool server on standard input and output, and a log that is watched.

python examples/live_process.py IMAGE
"""

import asyncio
import sys

from sandsea import Client, ContainerRunArgs

SERVER = 'while read a b; do echo "$a + $b = $((a + b))"; done; echo "bye" >&2'
LOG = "echo first; until test -e /go; do sleep 0.1; done; echo second; echo third"


async def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
    async with Client() as client, client.run_container(args) as sandbox:
        async with sandbox.start(SERVER, stdin=True) as server:
            for question in ("1 2", "40 2"):
                await server.send(question + "\n")
                print((await anext(aiter(server))).text, end="")
            await server.close_input()
            end = await server.wait()
            print(f"{end.stderr.strip()}, exit code {end.exit_code}")

        log = await sandbox.start(LOG, detached=True)  # it needs no reader, and no client
        first = await anext(aiter(log))
        await log.aclose()
        await sandbox.files.write("/go", b"")

        after = first.offset + len(first.data)  # what was read once is not read again
        rest = await sandbox.attach(log.number, stdout_offset=after).wait()
        print(f"from byte {after}: {rest.stdout}", end="")


asyncio.run(main())
