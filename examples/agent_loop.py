"""An agent's loop: a model says a command, a shell session runs it, the model sees what came of it.

python examples/agent_loop.py IMAGE
"""

import asyncio
import sys
from collections.abc import Generator

from sandsea import Client, ContainerRunArgs

SAID = ["mkdir -p /work && cd /work", "export NAME=sandsea", "echo I am $NAME in $PWD", "if true; then", "sleep 60"]


def model() -> Generator[str, str, None]:
    """Stands for a language model: it is sent an observation and says the next command."""
    for command in SAID:
        observation = yield command
        print(f"$ {command}\n{observation}")


async def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
    async with Client() as client, client.run_container(args) as sandbox, sandbox.shell() as shell:
        agent = model()
        command = next(agent)
        while True:
            result = await shell.run(command, timeout=3, merge_stderr=True, max_output=10_000, overflow="tail")
            seen = result.stdout or "(no output)\n"
            if result.timed_out:
                seen += "(timed out; the session goes on)\n"
            elif result.syntax_error:
                seen = "(this is no shell script; nothing of it was run)\n"
            try:
                command = agent.send(seen)
            except StopIteration:
                break


asyncio.run(main())
