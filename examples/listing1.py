"""Listing 1 of the DSec paper: packages come from PyPI, and nothing else is reached.

python examples/listing1.py IMAGE    # needs ./sdk/libdsec
"""

import asyncio
import sys

from libdsec import DSecClient, DSecContainerRunArgs


async def main() -> None:
    client = DSecClient()
    await client.open()
    args = DSecContainerRunArgs(
        container_image=sys.argv[1],
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=300,  # idle timeout
        network_rules={"npm": False, "pypi": True},
        init_user="root",
    )
    sandbox = await client.run_container(args, timeout=120)
    result = await sandbox.run_shell("id -un")
    print(result.exit_code, result.stdout)
    await sandbox.stop()
    await client.close()


asyncio.run(main())
