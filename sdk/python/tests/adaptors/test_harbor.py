"""Harbor on a ready image: the oracle gets everything, doing nothing gets nothing."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("harbor", reason="needs harbor, and so Python 3.12 or later: make test-adaptors")

from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

from sandsea import sync
from sandsea.adaptors.harbor import SandseaEnvironment, SandseaError


@pytest.fixture
def task(tmp_path: Path, image: str) -> Path:
    root = tmp_path / "hello"
    for name, text in {
        "task.toml": f'version = "1.0"\n[verifier]\ntimeout_sec = 60\n[agent]\ntimeout_sec = 60\n'
        f'[environment]\ndocker_image = "{image}"\nworkdir = "/app"\ncpus = 1\nmemory_mb = 512\n',
        "instruction.md": "Write hello into /app/hello.txt.\n",
        "environment/data.txt": "hello\n",
        "solution/solve.sh": "#!/bin/bash\ncp data.txt /app/hello.txt\n",
        "tests/test.sh": '#!/bin/bash\nif [ "$(cat /app/hello.txt)" = hello ]; then echo 1; else echo 0; fi '
        "> /logs/verifier/reward.txt\n",
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        if name.endswith(".sh"):
            file.chmod(0o755)
    return root


@pytest.mark.parametrize(("agent", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_a_trial_is_worth_what_was_done(
    task: Path, tmp_path: Path, here: tuple[str, str], agent: str, reward: float
) -> None:
    jobs = tmp_path / "jobs"
    argv = [
        str(Path(sys.executable).with_name("harbor")), "run", "-p", str(task), "-a", agent, "-n", "1", "-o", str(jobs),
        "--env", "sandsea.adaptors.harbor:SandseaEnvironment",
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, env=os.environ | {"HOME": str(tmp_path)})
    results = [json.loads(f.read_text()) for f in jobs.glob("*/*/result.json")]
    assert len(results) == 1, done.stdout + done.stderr
    assert results[0]["exception_info"] is None, results[0]["exception_info"]
    assert results[0]["verifier_result"]["rewards"] == {"reward": reward}
    with sync.Client(here[0], token_file=here[1]) as c:
        assert c.list({"adaptor": "harbor"}) == []


def environment(tmp_path: Path, **config: Any) -> SandseaEnvironment:
    (tmp_path / "environment").mkdir(exist_ok=True)
    return SandseaEnvironment(
        environment_dir=tmp_path / "environment",
        environment_name="t",
        session_id="t__abc__env",
        trial_paths=TrialPaths(tmp_path / "trial"),
        task_env_config=EnvironmentConfig(**config),
        logger=logging.getLogger("test"),
    )


async def test_files_and_commands(tmp_path: Path, image: str) -> None:
    env = environment(tmp_path, docker_image=image, workdir="/app", env={"A": "task", "B": "task"})
    await env.start(False)
    try:
        r = await env.exec("echo $A $B; echo oops >&2; pwd; exit 3", env={"B": "call"})
        assert (r.stdout, r.stderr, r.return_code) == ("task call\n/app\n", "oops\n", 3)
        assert (await env.exec("id -u", user="nobody")).stdout == "65534\n"
        assert (await env.exec("id -u", user=1234)).stdout == "1234\n"
        with pytest.raises(TimeoutError, match="so far"):
            await env.exec("echo so far; sleep 30", timeout_sec=1)
        tree = tmp_path / "tree"
        (tree / "empty").mkdir(parents=True)
        (tree / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (tree / "run.sh").chmod(0o750)
        (tree / "link").symlink_to("run.sh")
        await env.upload_dir(tree, "/up/here")
        assert (await env.exec("/up/here/link; stat -c %a:%U /up/here/run.sh; ls /up/here")).stdout == (
            "ran\n750:root\nempty\nlink\nrun.sh\n"
        )
        await env.upload_file(tree / "run.sh", "/one/file.sh")
        assert (await env.exec("/one/file.sh")).stdout == "ran\n"
        assert await env.is_dir("/up/here/empty")
        assert await env.is_file("/one/file.sh")
        assert not await env.is_dir("/one/file.sh")
        assert not await env.is_file("/none")
        await env.download_dir("/up/here", tmp_path / "down")
        assert (tmp_path / "down/run.sh").stat().st_mode & 0o777 == 0o750
        assert (tmp_path / "down/link").is_symlink()
        assert (tmp_path / "down/empty").is_dir()
        await env.download_file("/one/file.sh", tmp_path / "one.sh")
        assert (tmp_path / "one.sh").read_text().endswith("ran\n")
        await env.sandbox.stop()
        with pytest.raises(SandseaError, match="ended"):
            await env.exec("true")
    finally:
        await env.stop(delete=True)


def test_what_cannot_be_enforced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="docker_image"):
        environment(tmp_path)
    with pytest.raises(RuntimeError, match="GPU"):
        environment(tmp_path, docker_image="x", gpus=1)
    env = environment(tmp_path, docker_image="x", cpus=0.5)
    assert env.capabilities == EnvironmentCapabilities(disable_internet=True)
