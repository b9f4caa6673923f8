"""mini-swe-agent with a scripted model."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("minisweagent", reason="needs mini-swe-agent: make test-adaptors")

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.models.test_models import DeterministicModel, make_output

from sandsea import sync
from sandsea.adaptors.mini import SandseaEnvironment, SandseaError

CLASS = "sandsea.adaptors.mini.SandseaEnvironment"


def test_an_agent_submits(image: str, here: tuple[str, str]) -> None:
    env = get_environment({"environment_class": CLASS, "image": image, "cwd": "/work", "env": {"WHO": "agent"}})
    model = DeterministicModel(
        outputs=[
            make_output("write", [{"command": "echo fixed by $WHO > patch && ls"}]),
            make_output("submit", [{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch"}]),
        ]
    )
    agent = DefaultAgent(model, env, system_template="s", instance_template="{{task}} on {{system}}")
    result = agent.run("do it")
    assert result["exit_status"] == "Submitted"
    assert result["submission"] == "fixed by agent\n"
    assert env.serialize()["info"]["config"]["environment_type"] == CLASS
    env.cleanup()
    with sync.Client(here[0], token_file=here[1]) as c:
        assert c.list({"adaptor": "mini-swe-agent"}) == []


def test_streams_are_merged_and_a_timeout_keeps_the_output(image: str) -> None:
    env = SandseaEnvironment(image=image, interpreter=["sh", "-c"])
    try:
        assert env.execute({"command": "echo a; echo b >&2; echo c; exit 3"}) == {
            "output": "a\nb\nc\n",
            "returncode": 3,
            "exception_info": "",
        }
        late = env.execute({"command": "echo so far; sleep 30"}, timeout=1)
        assert late["output"] == "so far\n"
        assert late["returncode"] == -1
        assert "timed out" in late["exception_info"]
        assert env.execute({"command": "pwd"}, cwd="/usr")["output"] == "/usr\n"
        missing = SandseaEnvironment(image=image, interpreter=["no-such-shell"])
        try:
            assert missing.execute({"command": "true"})["returncode"] == -1
        finally:
            missing.cleanup()
    finally:
        env.cleanup()


def test_a_sandbox_that_is_gone_ends_the_run(image: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    env = SandseaEnvironment(image=image)
    assert env.sandbox is not None
    env.sandbox.stop()
    with pytest.raises(SandseaError, match="ended"):
        env.execute({"command": "true"})
    env.cleanup()
    with pytest.raises(SandseaError):
        env.execute({"command": "true"})
    with pytest.raises(SandseaError, match="no-such-image"):
        SandseaEnvironment(image="no-such-image")
