"""Many sandboxes at once, without await: made together, used by threads, stopped together.

python examples/batch.py IMAGE
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from sandsea import ContainerRunArgs, InfraError, SandseaError
from sandsea.sync import Client, Sandbox

N = 16


def square(item: tuple[int, Sandbox | SandseaError]) -> int | None:
    number, sandbox = item
    if isinstance(sandbox, SandseaError):  # one that could not be made is an exception in its place
        return None
    try:
        return int(sandbox.run_shell(f"echo $(({number} * {number}))").check().stdout)
    except InfraError:  # the platform's fault: no result, and no verdict
        return None


def main() -> None:
    args = ContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=64, ttl=600, labels={"job": "squares"})
    with Client() as client:
        sandboxes = client.create_many(args, n=N, progress=True)  # one line, if this is a terminal
        try:
            with ThreadPoolExecutor(N) as threads:
                print(list(threads.map(square, enumerate(sandboxes))))
            print(len(client.list({"job": "squares"})), "sandboxes")
        finally:
            client.stop_many(sandboxes)
        print(len(client.list({"job": "squares"})), "left")


main()
