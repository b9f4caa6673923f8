"""The names of the DSec paper's listing, on top of the `sandsea` client.

client = DSecClient()
await client.open()
args = DSecContainerRunArgs(container_image="py", memory_limit_mb=4096, cpu_cores_limit=4, ttl_running_stop=300)
sandbox = await client.run_container(args, timeout=120)
result = await sandbox.run_shell("pytest -q")
await sandbox.stop()
"""

from sandsea import Client as DSecClient
from sandsea import ContainerRunArgs as DSecContainerRunArgs
from sandsea import Result as DSecResult
from sandsea import Sandbox as DSecSandbox
from sandsea import SandseaError as DSecError

__all__ = ["DSecClient", "DSecContainerRunArgs", "DSecError", "DSecResult", "DSecSandbox"]
