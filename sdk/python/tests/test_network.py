"""What network rules in Python say to the API; that they are enforced is tested with the server."""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import pytest
from fake import Drop, Fake, Reply, Stream, error, serving

import sandsea
import sandsea.sync
from sandsea import ContainerRunArgs, models
from sandsea import _network as network

ID = "s7q3k2m5aw4xn6d2hr5tcabqe8v"
UTC = datetime.timezone.utc


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("pypi", {"service": "pypi"}),
        ("git:git.example/team/repo", {"service": "git:git.example/team/repo"}),
        ("example.org", {"domain": "example.org"}),
        ("*.example.org", {"domain": "*.example.org"}),
        ("*", {"domain": "*"}),
        ("intranet.", {"domain": "intranet."}),
        ("example.org:443", {"domain": "example.org", "ports": [{"first": 443, "last": 443}]}),
        (
            "example.org:80,8000-8100",
            {"domain": "example.org", "ports": [{"first": 80, "last": 80}, {"first": 8000, "last": 8100}]},
        ),
        ("192.0.2.7", {"cidr": "192.0.2.7"}),
        ("192.0.2.0/24:5432", {"cidr": "192.0.2.0/24", "ports": [{"first": 5432, "last": 5432}]}),
        ("2001:db8::/32", {"cidr": "2001:db8::/32"}),
        ("[2001:db8::7]:443", {"cidr": "2001:db8::7", "ports": [{"first": 443, "last": 443}]}),
        (
            "udp://192.0.2.7:123",
            {"cidr": "192.0.2.7", "protocol": "NETWORK_PROTOCOL_UDP", "ports": [{"first": 123, "last": 123}]},
        ),
    ],
)
def test_short_forms(text: str, want: dict[str, object]) -> None:
    assert network.rule(text, True).to_json() == want
    assert network.rule(text, False).to_json() == {"reject": True, **want}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"pipy": True}, "Package services: crates, .*pypi"),
        ({"https://example.org/": True}, "Write example.org, or tcp:// or udp://"),
        ({"example.org:http": True}, "Write ports as"),
        ({"example.org:0": True}, "Write ports as"),
        ({"example.org:9-8": True}, "Write ports as"),
        ({"example.org:+80": True}, "Write ports as"),
        ({"[2001:db8::7": True}, r"Write \[ADDRESS\]:PORT"),
        ({"pypi": "yes"}, "neither True nor False"),
        ({"pypi": 1}, "neither True nor False"),
        ("pypi", "maps nothing. Give a dict"),
        (["pypi"], "maps nothing. Give a dict"),
    ],
)
def test_what_is_no_rule_says_what_would_be(rules: Mapping[str, bool], words: str) -> None:
    with pytest.raises(sandsea.InvalidRequest, match=words):
        ContainerRunArgs(network_rules=rules).spec()


def test_services_hold_in_every_phase_and_rules_keep_their_order() -> None:
    p = network.policy({"b.example": False, "npm": False, "*.example": True, "pypi": True}, as_of="2024-06-01")
    assert p.to_json() == {
        "services": {"npm": False, "pypi": True},
        "phases": [{"name": "default", "rules": [{"reject": True, "domain": "b.example"}, {"domain": "*.example"}]}],
        "as_of": "2024-06-01T00:00:00Z",
    }
    assert network.policy({}).to_json() == {}
    assert ContainerRunArgs(network_rules={"npm": False}).spec().to_json()["network"] == {"services": {"npm": False}}


def test_phases_and_whole_policies() -> None:
    closed = models.NetworkPhase(rules=[models.NetworkRule(service="pypi")], inbound_closed=True)
    args = ContainerRunArgs(
        network_rules={"golang": True},
        phases={"build": {"pypi": True, "example.org": True}, "grade": closed, "idle": {}},
        phase="build",
        deny=["pypi:flask"],
    )
    assert args.spec().to_json()["network"] == {
        "services": {"golang": True},
        "phases": [
            {"name": "build", "rules": [{"service": "pypi"}, {"domain": "example.org"}]},
            {"name": "grade", "rules": [{"service": "pypi"}], "inbound_closed": True},
            {"name": "idle"},
        ],
        "phase": "build",
        "deny": ["pypi:flask"],
    }
    whole = models.NetworkPolicy(services={"pypi": True}, inspect_tls=True)
    assert ContainerRunArgs(network_rules=whole).spec().network == whole
    for wrong in (
        ContainerRunArgs(network_rules=whole, as_of="2024-06-01"),
        ContainerRunArgs(network_rules={"example.org": True}, phases={"a": {}}),
        ContainerRunArgs(phases={"a": models.NetworkPhase(name="b")}),
        ContainerRunArgs(deny="pypi:flask"),
    ):
        with pytest.raises(sandsea.InvalidRequest):
            wrong.spec()


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("2024-06-01", datetime.datetime(2024, 6, 1, tzinfo=UTC)),
        (datetime.date(2024, 6, 1), datetime.datetime(2024, 6, 1, tzinfo=UTC)),
        ("2024-06-01T12:30:00Z", datetime.datetime(2024, 6, 1, 12, 30, tzinfo=UTC)),
        ("2024-06-01T12:30:00+02:00", datetime.datetime(2024, 6, 1, 10, 30, tzinfo=UTC)),
        (datetime.datetime(2024, 6, 1, 12, tzinfo=UTC), datetime.datetime(2024, 6, 1, 12, tzinfo=UTC)),
        (None, None),
    ],
)
def test_moments(given: network.Moment | None, want: datetime.datetime | None) -> None:
    assert network.moment(given) == want


@pytest.mark.parametrize("given", ["yesterday", "2024-13-01", "2024-06-01T12:00:00", datetime.datetime(2024, 6, 1)])
def test_what_is_no_moment_says_so(given: network.Moment) -> None:
    with pytest.raises(sandsea.InvalidRequest):
        network.moment(given)


def event(seq: int, **fields: object) -> dict[str, object]:
    return {"seq": str(seq), "kind": "NETWORK_EVENT_KIND_DNS", **fields}


async def test_calls_and_answers() -> None:
    with serving() as fake:
        sandbox = {"id": ID, "state": "SANDBOX_STATE_RUNNING", "network_phase": "grade"}
        fake.line_up("SetPolicy", Reply({"sandbox": sandbox}))
        fake.line_up("SetPhase", Reply({"sandbox": sandbox}))
        fake.line_up("Check", Reply({"allowed": False, "rule": "default reject", "phase": "grade"}))
        fake.line_up("Endpoint", Reply({"url": "http://x/endpoint/", "headers": {"Sandsea-Endpoint-Token": "sse_x"}}))
        async with sandsea_client(fake) as c:
            sb = c.sandbox(ID)
            await sb.set_network({"pypi": True}, as_of="2024-06-01")
            assert (sb.state, sb.info.network_phase) == ("running", "grade")
            await sb.set_phase("grade")
            answer = await sb.check_network("example.org", port=80)
            assert (answer.allowed, answer.rule) == (False, "default reject")
            e = await sb.endpoint(8000, ttl=60)
            assert (e.url, e.headers) == ("http://x/endpoint/", {"Sandsea-Endpoint-Token": "sse_x"})
        assert fake.calls("SetPolicy") == [
            {"id": ID, "policy": {"services": {"pypi": True}, "as_of": "2024-06-01T00:00:00Z"}}
        ]
        assert fake.calls("SetPhase") == [{"id": ID, "phase": "grade"}]
        assert fake.calls("Check")[0]["host"] == "example.org"
        assert fake.calls("Endpoint") == [{"id": ID, "port": 8000, "ttl_ms": 60000}]


def sandsea_client(fake: Fake) -> sandsea.Client:
    fake.line_up("WhoAmI", Reply({}))
    return sandsea.Client(fake.url, token="t")


async def test_the_network_log_goes_on_where_its_link_broke() -> None:
    with serving() as fake:
        fake.line_up(
            "Log",
            Stream({"events": [event(4), event(5, denied=True)], "next_seq": "6", "missing": "2"}, end="broken"),
            Drop(),
            Stream({"events": [event(9)], "next_seq": "12"}),
        )
        async with sandsea_client(fake) as c:
            log = c.sandbox(ID).network_log(from_seq=2, follow=True)
            assert [(e.seq, e.denied) async for e in log] == [(4, False), (5, True), (9, False)]
            assert (log.missing, log.next_seq) == (2, 12)
        assert [r["from_seq"] for r in fake.calls("Log")] == [2, 6, 6]
        assert all(r["follow"] and r["id"] == ID for r in fake.calls("Log"))


def test_the_network_log_without_await() -> None:
    with serving() as fake:
        fake.line_up("WhoAmI", Reply({}))
        fake.line_up("Log", Stream({"events": [event(0), event(1)], "next_seq": "2"}))
        with sandsea.sync.Client(fake.url, token="t") as c, c.sandbox(ID).network_log() as log:
            assert [e.seq for e in log] == [0, 1]
        fake.line_up("SetPhase", error("invalid_argument", "invalid", field="phase"))
        with sandsea.sync.Client(fake.url, token="t") as c, pytest.raises(sandsea.InvalidRequest):
            c.sandbox(ID).set_phase("none")
