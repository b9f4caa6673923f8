"""inspect-ai: its own conformance checks with a user that is not root, and an evaluation with a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("inspect_ai", reason="needs inspect-ai: make test-adaptors")

from inspect_ai import Task, eval_async
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageUser, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, Target, accuracy, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUnavailableError, sandbox
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from sandsea import sync
from sandsea.adaptors.inspect import SandseaConfig, SandseaSandboxEnvironment

AGENT = "useradd --home-dir /home/agent --shell /bin/sh agent && chown agent /home/agent"


@pytest.fixture
async def sandbox_env(image: str) -> AsyncIterator[SandseaSandboxEnvironment]:
    config = SandseaConfig(image=image, user="agent", workdir="/home/agent", memory_mb=1024)
    made = await SandseaSandboxEnvironment.sample_init("checks", config, {})
    env = made["default"].as_type(SandseaSandboxEnvironment)
    try:
        assert (await env.exec(["sh", "-c", AGENT], user="root")).success
        assert (await env.exec(["id", "-un"])).stdout == "agent\n"
        yield env
    finally:
        await SandseaSandboxEnvironment.sample_cleanup("checks", config, made, False)


def test_inspect_finds_the_provider_by_its_name() -> None:
    assert registry_find_sandboxenv("sandsea") is SandseaSandboxEnvironment


async def test_output_beyond_the_limit_keeps_its_end(sandbox_env: SandseaSandboxEnvironment) -> None:
    r = await sandbox_env.exec(["sh", "-c", "yes | head -c 20000000; echo the end"])
    assert len(r.stdout) <= 10 << 20
    assert r.stdout.endswith("the end\n")


async def test_a_timeout_tells_what_was_written(sandbox_env: SandseaSandboxEnvironment) -> None:
    with pytest.raises(TimeoutError) as e:
        await sandbox_env.exec(["sh", "-c", "echo so far; sleep 30"], timeout=1)
    assert e.value.truncated_output == "so far\n"  # type: ignore[attr-defined]


async def test_a_missing_program_is_a_failed_result(sandbox_env: SandseaSandboxEnvironment) -> None:
    r = await sandbox_env.exec(["/no/such"])
    assert not r.success
    assert r.returncode == 127
    assert "/no/such" in r.stderr


async def test_a_sandbox_that_is_gone_is_unavailable_never_a_result(sandbox_env: SandseaSandboxEnvironment) -> None:
    await sandbox_env.sandbox.stop()
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await sandbox_env.read_file("x")
    with pytest.raises(ConnectionError):
        await sandbox_env.connection()


def said(output: ModelOutput) -> ModelOutput:
    # Without it inspect fetches a tokenizer to count.
    output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return output


@scorer(metrics=[accuracy()])
def answer() -> Any:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="C" if await sandbox().read_file("answer.txt") == target.text else "I")

    return score


async def test_an_evaluation_with_a_scripted_model_scores(
    image: str, here: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSPECT_DISPLAY", "none")
    model = get_model(
        "mockllm/model",
        custom_outputs=[
            said(ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "tr abc xyz < seed.txt > answer.txt"})),
            said(ModelOutput.from_content("mockllm/model", "done")),
        ],
    )
    task = Task(
        dataset=[Sample(input=[ChatMessageUser(content="translate it")], target="xyz", files={"seed.txt": "abc"})],
        solver=[use_tools(bash(timeout=60)), generate()],
        scorer=answer(),
        sandbox=SandboxEnvironmentSpec("sandsea", SandseaConfig(image=image, workdir="/work")),
    )
    (log,) = await eval_async(task, model=model, log_dir=str(tmp_path))
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    with sync.Client(here[0], token_file=here[1]) as c:
        assert c.list({"adaptor": "inspect"}) == []
