"""Files: one, many, a whole tree both ways, and what changes.

python examples/files.py IMAGE
"""

import asyncio
import pathlib
import sys
import tempfile

from sandsea import Client, ContainerRunArgs


async def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=256, ttl_running_stop=300)
    async with Client() as client, client.run_container(args) as sandbox:
        files = sandbox.files
        await files.write("/w/data.bin", b"\0\1\2", mode=0o600)
        print((await files.stat("/w/data.bin")).size, "bytes")

        await files.write_many({f"/w/parts/{i}": f"part {i}" for i in range(100)})
        parts = await files.read_many(["/w/parts/7", "/w/parts/none"])  # one answer for each, in order
        print([p.decode() if isinstance(p, bytes) else type(p).__name__ for p in parts])

        with tempfile.TemporaryDirectory() as local:
            tree = pathlib.Path(local, "tree")
            tree.mkdir()
            (tree / "run.sh").write_text("#!/bin/sh\necho built >result\n")
            (tree / "run.sh").chmod(0o755)
            await files.upload(tree, "/w/tree")
            async with files.watch("/w/tree") as changes:
                (await sandbox.run(["./run.sh"], cwd="/w/tree")).check()
                change = await changes.next(timeout=10)
                print(change.change, change.path)
            await files.download("/w/tree", tree)
            print((tree / "result").read_text(), end="")


asyncio.run(main())
