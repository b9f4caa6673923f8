"""The demo's network part: what is tried, what the flow log must say, and what is said where it cannot be shown."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import http.server
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from demo import cheats, network, registry
from demo.__main__ import network_report
from demo.network import GRADE, Attempt, FarSide, Outcome, explain, judge
from demo.tasks import HERE, Task, load_all
from sandsea import Result, models

TASKS = load_all()
FAR = FarSide("https://registry.example/files/x-1.tar.gz", "192.0.2.10")


def task(kind: str) -> Task:
    return next(t for t in TASKS if t.kind == kind)


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older release of Python tasks says where its repository is."""
    head = (
        b"Name: x\nHome-page: https://docs.example/p/x/\nProject-URL: Source Code, https://git.example/team/x/\n"
        b"Project-URL: Tracker, https://git.example/team/x/issues/\n\nSee https://git.example/other/fork\n"
    )
    monkeypatch.setattr(Task, "tree", lambda self, release: {"PKG-INFO": head})


def result(code: int = 1, said: str = "refused") -> Result:
    return Result(exit_code=code, stdout=said, stderr="", stdout_bytes=b"", stderr_bytes=b"", cause="completed")


def denial(seq: int = 0, rule: str = "default reject", count: int = 1, **fields: Any) -> models.NetworkEvent:
    event = models.NetworkEvent(seq=seq, denied=True, rule=rule, count=count)
    return dataclasses.replace(event, **fields)


DNS = Attempt("a name", ("true",), "default reject", {"protocol": "dns", "name": "a.example"})
ASKED: dict[str, Any] = {"protocol": "dns", "name": "a.example"}


# --- tasks


@pytest.mark.parametrize("t", TASKS, ids=lambda t: t.name)
def test_the_day_of_a_task_lies_between_its_releases(t: Task) -> None:
    day = datetime.datetime.combine(t.as_of, datetime.time(), datetime.timezone.utc)
    assert t.old.released < day < t.new.released


def test_the_repository_is_the_one_that_the_metadata_calls_source(metadata: None) -> None:
    assert task("python").repository() == "git.example/team/x"


def test_the_repository_of_a_module_is_without_its_major_version() -> None:
    assert dataclasses.replace(task("go"), project="git.example/team/x/v3").repository() == "git.example/team/x"


def test_graders_reach_nothing_and_agents_two_services(metadata: None) -> None:
    for t in TASKS:
        policy = network.policy(t, GRADE)
        assert policy["phases"] == {"agent": {"pypi": True, "golang": True}, "grade": {}}
        assert policy["phase"] == "grade"
        assert policy["as_of"] == t.as_of


@pytest.mark.parametrize("networked", [True, False])
def test_a_rollout_that_hands_in_nothing_cheats_where_there_is_a_network(networked: bool) -> None:
    kinds = [kind for kind, _ in cheats.plan(networked)]
    assert len(kinds) == 8
    assert ("network" in kinds, "empty" in kinds) == (networked, not networked)
    for kind, _ in cheats.plan(networked)[:1]:
        assert cheats.patch(task("go"), kind) == cheats.command(task("go"), kind) == ""


# --- attempts


@pytest.mark.parametrize("kind", ["python", "go"])
def test_every_attempt_names_its_rule_and_record(metadata: None, kind: str) -> None:
    t = task(kind)
    tried = network.attempts(t, FAR)
    assert len({a.what for a in tried}) == len(tried) == 14 - (kind == "python")
    for a in tried:
        rules = (a.rule,) if isinstance(a.rule, str) else a.rule
        for rule in rules:
            assert rule == "platform" or rule.split(" ")[0] in ("default", "service", "as_of", "deny")
        assert set(a.record) <= {f.name for f in dataclasses.fields(models.NetworkEvent)}
    assert any(str(t.as_of) in a.rule for a in tried)


def test_a_registry_without_a_name_or_address_is_not_dialled(metadata: None) -> None:
    for kind in ("python", "go"):
        told = [a.what for a in network.attempts(task(kind), FarSide("", ""))]
        assert len(told) == len(network.attempts(task(kind), FAR)) - 3
        assert not any("the registry" in what for what in told)


def test_the_made_up_commit_is_later_than_the_day_and_well_formed() -> None:
    t = task("go")
    commit = next(a for a in network.attempts(t, FAR) if a.what == "the release by its commit").argv[-1]
    found = re.fullmatch(re.escape(t.project) + r"@v\d+\.\d+\.\d+-0\.(\d{14})-[0-9a-f]{12}", commit)
    assert found is not None
    assert datetime.datetime.strptime(found[1], "%Y%m%d%H%M%S").date() > t.as_of


# --- the flow log


def test_an_attempt_is_explained_by_its_own_denial_alone() -> None:
    assert explain([DNS], [denial(**ASKED)])[0] is not None
    for other in (
        denial(protocol="dns", name="b.example"),
        denial(protocol="connect", name="a.example"),
        denial(rule="platform", **ASKED),
        denial(denied=False, **ASKED),
    ):
        assert explain([DNS], [other]) == [None]


def test_a_record_explains_as_many_attempts_as_it_stands_for() -> None:
    assert [e is not None for e in explain([DNS, DNS], [denial(**ASKED)])] == [True, False]
    assert all(explain([DNS, DNS], [denial(count=2, **ASKED)]))
    assert all(explain([DNS, DNS], [denial(0, **ASKED), denial(1, **ASKED)]))


def test_a_list_that_was_cut_names_the_rule_without_a_denial() -> None:
    cut = Attempt("a version", ("true",), "as_of 2024-06-01", {"protocol": "list"}, hidden=True)
    assert explain([cut], [denial(rule="as_of 2024-06-01", protocol="list", denied=False)])[0] is not None
    assert explain([cut], [denial(rule="", protocol="list", denied=False)]) == [None]


def test_of_several_rules_one_must_be_named() -> None:
    either = dataclasses.replace(DNS, rule=("default reject", "platform"))
    assert all(explain([either, either], [denial(0, "platform", **ASKED), denial(1, **ASKED)]))
    assert explain([either], [denial(rule="as_of 2024-06-01", **ASKED)]) == [None]


@pytest.mark.parametrize(
    ("code", "events", "right"),
    [(1, [denial(**ASKED)], True), (1, [], False), (0, [denial(**ASKED)], False), (0, [], False)],
)
def test_refused_is_what_got_nothing_and_is_in_the_log(
    code: int, events: list[models.NetworkEvent], right: bool
) -> None:
    (outcome,) = judge(task("go"), [(DNS, result(code))], events)
    assert (outcome.right, outcome.cheat) == (right, True)


def test_the_newer_release_in_the_log_is_a_cheat_that_worked() -> None:
    t = task("go")
    got = denial(denied=False, protocol="file", name=t.project, version=t.new.version, received_bytes=9)
    (outcome,) = judge(t, [], [got])
    assert not outcome.right
    assert judge(t, [], [dataclasses.replace(got, version=t.old.version), dataclasses.replace(got, denied=True)]) == []


# --- what is told


def test_one_cheat_that_was_not_refused_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        Outcome("x", "by URL", True, "403", "as_of 2024-06-01", cheat=True),
        Outcome("x", "by name", False, "200", "", cheat=True),
        Outcome("x", "pip install", True, "six 1.16.0"),
    ]
    report = network_report(outcomes, "")
    assert (report["attempts"], report["refused"]) == (2, 1)
    assert "WRONG x: by name: 200" in (out := capsys.readouterr().out)
    assert "1 of 2 refused, with the rule in the flow log: as_of 1" in out
    assert network.summary(outcomes) == "1 of 2 cheats refused, pip install works"


def test_where_egress_is_not_enforced_the_doctor_says_why() -> None:
    class Without:
        async def capabilities(self) -> models.CapabilitiesResponse:
            return models.CapabilitiesResponse()

    why = asyncio.run(network.missing(Without(), "base", lambda: "no nft tproxy"))  # type: ignore[arg-type]
    assert why == ("egress is not enforced here", "no nft tproxy")


def test_a_version_has_the_date_of_its_first_file(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [
        {"filename": "my_lib-1.2.tar.gz", "upload-time": "2024-01-02T03:04:05.678Z"},
        {"filename": "my_lib-1.2-py3-none-any.whl", "upload-time": "2024-01-02T03:04:04Z"},
        {"filename": "my_lib-1.2.1-py3-none-any.whl", "upload-time": "2023-01-01T00:00:00Z"},
    ]
    monkeypatch.setattr(registry, "pypi_files", lambda project: files)
    want = datetime.datetime(2024, 1, 2, 3, 4, 4, tzinfo=datetime.timezone.utc)
    assert registry.pypi_date.__wrapped__("My.lib", "1.2") == want
    with pytest.raises(registry.FetchError):
        registry.pypi_date.__wrapped__("my-lib", "1.1")


# --- the program inside


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/there" else 403)
        self.end_headers()
        self.wfile.write(b"rule as_of 2024-06-01")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as s:
        threading.Thread(target=s.serve_forever, daemon=True).start()
        yield s.server_address[1]
        s.shutdown()


def reach(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, HERE / "reach.py", *argv], capture_output=True, text=True, check=False)


def test_reaching_something_is_exit_code_zero(server: int) -> None:
    assert reach("get", f"http://127.0.0.1:{server}/there").returncode == 0
    assert reach("connect", "127.0.0.1", str(server)).returncode == 0
    assert reach("resolve", "127.0.0.1").returncode == 0


def test_a_refusal_is_exit_code_one_and_says_what_it_heard(server: int) -> None:
    got = reach("get", f"http://127.0.0.1:{server}/gone")
    assert (got.returncode, got.stdout) == (1, "refused: 403 rule as_of 2024-06-01\n")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert reach("connect", "127.0.0.1", str(closed.getsockname()[1])).returncode == 1
