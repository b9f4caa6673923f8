"""What the client makes of answers, without a server."""

from __future__ import annotations

import base64
import json
import os
import pickle
import struct

import pytest

import sandsea
from sandsea import _core as core
from sandsea import _models as m
from sandsea import errors


def _event(**event: object) -> dict[str, object]:
    return {"event": event}


def _data(stream: str, offset: int, data: bytes) -> dict[str, object]:
    return _event(data={"stream": stream, "offset": str(offset), "data": base64.b64encode(data).decode()})


def test_frames_are_cut_at_any_byte() -> None:
    body = core.envelope({"a": 1}) + core.envelope({"b": 2}) + struct.pack(">BI", 2, 2) + b"{}"
    for size in (1, 3, 7, len(body)):
        frames = core.Frames()
        got = [doc for i in range(0, len(body), size) for doc in frames.feed(body[i : i + size])]
        assert got == [{"a": 1}, {"b": 2}]
        frames.finish()


def test_a_stream_that_breaks_off_is_unavailable() -> None:
    frames = core.Frames()
    frames.feed(core.envelope({"a": 1}))
    with pytest.raises(errors.Unavailable):
        frames.finish()


def test_a_huge_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(errors.InfraError):
        core.Frames().feed(struct.pack(">BI", 0, 1 << 31))


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"{...}", b"[1]"])
def test_a_message_that_cannot_be_read_is_lost_data_and_no_fault_of_the_request(data: bytes) -> None:
    with pytest.raises(errors.DataLoss, match="cannot be read"):
        core.Frames().feed(struct.pack(">BI", 0, len(data)) + data)


def test_an_error_frame_raises_its_error() -> None:
    error = {"error": {"code": "not_found", "message": "sandbox s1: none here"}}
    data = json.dumps(error).encode()
    frames = core.Frames()
    assert frames.feed(core.envelope({"a": 1}) + struct.pack(">BI", 2, len(data)) + data) == [{"a": 1}]
    with pytest.raises(sandsea.NotFound, match="none here"):
        frames.finish()


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ({"kind": "lost"}, errors.Lost),
        ({"kind": "unknown"}, errors.OutcomeUnknown),
        ({"kind": "exhausted", "retryAfterMs": "1500"}, errors.Exhausted),
        ({"kind": "failed_precondition", "cause": "idle"}, errors.SandboxEnded),
        ({"kind": "failed_precondition"}, errors.PreconditionFailed),
        ({"kind": "invalid", "field": "limits.memory_bytes"}, errors.InvalidRequest),
    ],
)
def test_kinds_become_exceptions_by_fault(detail: dict[str, str], kind: type[errors.SandseaError]) -> None:
    e = errors.from_connect(
        {"code": "unknown", "message": "m", "details": [{"type": "sandsea.v1.ErrorDetail", "debug": detail}]}
    )
    assert type(e) is kind
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is kind
    assert str(again) == "m"
    assert again.detail == e.detail


def test_retry_after_is_in_seconds() -> None:
    detail = [{"type": "sandsea.v1.ErrorDetail", "debug": {"kind": "exhausted", "retryAfterMs": "1500"}}]
    e = errors.from_connect({"code": "resource_exhausted", "message": "m", "details": detail})
    assert e.retry_after == 1.5


@pytest.mark.parametrize(
    ("number", "builtin"),
    [(2, FileNotFoundError), (13, PermissionError), (20, NotADirectoryError), (21, IsADirectoryError)],
)
def test_file_errors_are_the_builtins_too(number: int, builtin: type[OSError]) -> None:
    detail = [{"type": "sandsea.v1.ErrorDetail", "debug": {"kind": "not_found", "errno": number}}]
    with pytest.raises(builtin) as info:
        raise errors.from_connect({"code": "not_found", "message": "m", "details": detail}, "/w/a")
    assert info.value.errno == number
    assert info.value.filename == "/w/a"
    assert info.value.strerror == os.strerror(number)
    assert isinstance(info.value, sandsea.SandseaError)


def test_an_answer_that_is_no_json_is_still_an_error() -> None:
    with pytest.raises(errors.Unavailable):
        core.answer(502, b"<html>bad gateway</html>")
    with pytest.raises(errors.Unauthenticated):
        core.answer(401, b"")
    for body in (b"<html>please log in</html>", b"", b"[]", b"null"):
        with pytest.raises(errors.PreconditionFailed, match="no Sandsea server"):
            core.answer(200, body)
    assert core.answer(200, b"{}") == {}


def test_follow_collects_output_and_knows_where_to_resume() -> None:
    f = core.Follow("s1", m.StartRequest(id="s1"))
    assert f.request()[0].endswith("/Start")
    assert not f.can_resume
    f.take(_event(started={"number": "7"}))
    first = f.take(_data("STREAM_STDOUT", 0, "grü".encode()[:3]))
    second = f.take(_data("STREAM_STDOUT", 3, "grü\n".encode()[3:]))
    assert first is not None
    assert second is not None
    assert first.text + second.text == "grü\n"
    path, body = f.request()
    assert path.endswith("/Attach")
    assert body == {"id": "s1", "number": 7, "stdout_offset": 5}
    gap = f.take(_event(gap={"stream": "STREAM_STDOUT", "offset": "5", "bytes": "100"}))
    assert gap is not None
    assert gap.gap == 100
    assert f.request()[1]["stdout_offset"] == 105
    f.take(_event(exited={"number": "7", "result": {"exit_code": 3}}))
    assert f.process is not None
    assert f.value() == ("grü\n".encode(), b"", True)


def test_kept_output_is_head_and_tail() -> None:
    kept = core.Kept(10)
    for i in range(1000):
        kept.add(b"%03d" % i)
    assert kept.value() == b"00000" + b"98999"
    assert kept.cut
    small = core.Kept(10)
    small.add(b"0123456789")
    assert small.value() == b"0123456789"
    assert not small.cut


def test_models_leave_defaults_out_and_keep_optional_zeros() -> None:
    assert m.RunRequest(id="x").to_json() == {"id": "x"}
    assert m.RunRequest(id="x", stdin=b"").to_json() == {"id": "x", "stdin": ""}
    assert m.MoveFileRequest(id="x", from_="a", to="b").to_json() == {"id": "x", "from": "a", "to": "b"}
    sb = m.Sandbox.from_json({"id": "x", "createdAt": "2026-01-02T03:04:05.123456789Z", "new_field": 1, "epoch": "3"})
    assert sb.created_at is not None
    assert (sb.created_at.microsecond, sb.epoch) == (123456, 3)


def test_the_name_of_a_file_is_the_last_part_of_its_path() -> None:
    assert [m.FileInfo(path=p).name for p in ("/a/b.txt", "c", "/d/", "/")] == ["b.txt", "c", "d", ""]


def test_a_result_says_what_happened() -> None:
    from sandsea._result import make

    process = m.Process(number=1, result=m.Result(exit_code=1, wall_us=8_200_000))
    r = make("s7q3k2m5aw", process, b"one\ntwo\n", b"", cut=False, errors="replace", argv=("pytest", "-q"))
    assert repr(r) == "<Result exit=1 8.2s>"
    with pytest.raises(sandsea.CommandFailed, match="`pytest -q` exited 1 in s7q3k2m5: two") as info:
        r.check()
    assert pickle.loads(pickle.dumps(info.value)).result == r
    late = m.Process(number=1, result=m.Result(exit_code=124, timed_out=True))
    with pytest.raises(TimeoutError) as timeout:
        make("s1", late, b"so far", b"", cut=False, errors="replace", argv=("x",)).check()
    assert isinstance(timeout.value, sandsea.CommandTimeout)
    assert timeout.value.partial.stdout == "so far"
    broken = m.Process(number=1, result=m.Result(infra_error="keeper gone"))
    with pytest.raises(sandsea.InfraError):
        make("s1", broken, b"", b"", cut=False, errors="replace", argv=())


def test_a_token_file_that_others_can_read_is_refused(tmp_path: os.PathLike[str]) -> None:
    file = os.path.join(tmp_path, "t.token")
    with open(file, "w") as f:
        f.write("sst_x\n")
    os.chmod(file, 0o644)
    with pytest.raises(errors.PreconditionFailed, match="chmod 600"):
        core.Config.find("http://h:1", None, file)
    os.chmod(file, 0o600)
    config = core.Config.find("http://h:1/", None, file)
    assert (config.url, config.token) == ("http://h:1", "sst_x")
    assert "sst_x" not in repr(config)


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(errors.InvalidRequest, match="http://HOST:PORT"):
        core.Config.find("localhost:7070", "t", None)


@pytest.mark.parametrize("token", ["canary\nX-Other: 1", "# mine\ncanary", "canary\u2026", "canary\x00"])
def test_a_token_that_is_none_is_not_shown(token: str) -> None:
    with pytest.raises(errors.Unauthenticated, match="SANDSEA_TOKEN_FILE") as e:
        core.Config.find("http://h:1", token, None)
    assert "canary" not in str(e.value)


def test_a_token_may_end_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDSEA_TOKEN", "sst_x\r\n")
    assert core.Config.find("http://h:1", None, None).token == "sst_x"


def test_handles_pickle_without_the_token() -> None:
    c = sandsea.Client("http://127.0.0.1:1", token="secret")
    sb = c.sandbox("s7q3k2m5aw4xn6d2hr5tcabqe8v")
    data = pickle.dumps(sb)
    assert b"secret" not in data
    again = pickle.loads(data)
    assert again.id == sb.id
    assert again._client.url == "http://127.0.0.1:1"


def test_a_server_that_is_away_says_how_to_start_it() -> None:
    import sandsea.sync

    with (
        pytest.raises(sandsea.Unavailable, match="Start it: sudo sandsea up"),
        sandsea.sync.Client("http://127.0.0.1:1", token="t"),
    ):
        pass


def test_the_paper_names_are_there() -> None:
    import libdsec

    args = libdsec.DSecContainerRunArgs(
        container_image="img", memory_limit_mb=4096, cpu_cores_limit=4, ttl_running_stop=300,
        network_rules={"npm": False}, init_user="root",
    )  # fmt: skip
    spec = args.spec().to_json()
    assert spec["limits"] == {"memory_bytes": 4096 << 20, "cpu_millis": 4000}
    assert spec["idle_ms"] == 300_000


def test_time_limits_are_never_turned_into_none() -> None:
    assert [core.milliseconds(t) for t in (None, 0, 0.0001, 1.5, -0.0001, -2)] == [0, 0, 1, 1500, -1, -2000]
