"""What the SDK makes of broken links, full quotas, other event loops and forks, against a server that is told how to
misbehave."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import pathlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
from fake import Drop, Fake, Reply, Stream, error, exited, gap, output, serving, started
from waiting import LIMIT, until

import sandsea
import sandsea.sync
from sandsea import Client
from sandsea import _core as core

ID = "s7q3k2m5aw4xn6d2hr5tcabqe8v"
SANDBOX = {"sandbox": {"id": ID, "state": "SANDBOX_STATE_RUNNING"}}


@pytest.fixture
def fake() -> Iterator[Fake]:
    with serving() as f:
        f.line_up("Signal", Reply({}))
        f.line_up("WhoAmI", Reply({}))
        yield f


@pytest.fixture(params=["async", "sync"])
def box(request: pytest.FixtureRequest, fake: Fake) -> sandsea.Sandbox | sandsea.sync.Sandbox:
    kind = Client if request.param == "async" else sandsea.sync.Client
    return kind(fake.url, token="t").sandbox(ID)


def done(value: object) -> object:
    """The outcome of a call of either front."""

    async def wait() -> object:
        return await value  # type: ignore[misc]

    return asyncio.run(wait()) if hasattr(value, "__await__") else value


def run(box: sandsea.Sandbox | sandsea.sync.Sandbox, **options: object) -> sandsea.Result:
    result = done(box.run(["x"], **options))  # type: ignore[arg-type]
    assert isinstance(result, sandsea.Result)
    return result


Box = sandsea.Sandbox | sandsea.sync.Sandbox
Kind = type[Client] | type[sandsea.sync.Client]


# --- links


def test_a_broken_stream_is_taken_up_where_it_was_left(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Stream(started(4), output(0, b"one "), end="broken"))
    fake.line_up(
        "Attach",
        Stream(started(4), output(4, b"two "), end="broken"),
        Stream(started(4), output(8, b"three"), output(0, b"e", "STDERR"), exited(4, 3)),
    )
    r = run(box, key="k")
    assert (r.exit_code, r.stdout, r.stderr, r.truncated) == (3, "one two three", "e", False)
    assert [a.get("stdout_offset") for a in fake.calls("Attach")] == [4, 8]
    assert len(fake.calls("Start")) == 1


def test_an_end_is_never_invented(fake: Fake, box: Box) -> None:
    """A command without a key is killed when the link breaks: that SIGKILL says nothing about the command."""
    fake.line_up("Start", Stream(started(4), output(0, b"one"), end="broken"))
    fake.line_up("Attach", Stream(started(4), exited(4, 137, signal=9, signalName="SIGKILL")))
    with pytest.raises(sandsea.OutcomeUnknown, match="link to the server broke"):
        run(box)


def test_a_command_that_outran_the_broken_link_has_its_result(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Stream(started(4), end="broken"))
    fake.line_up("Attach", Stream(started(4), exited(4, 1)))
    assert run(box).exit_code == 1


def test_a_start_that_may_have_happened_is_unknown(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Drop())
    with pytest.raises(sandsea.OutcomeUnknown):
        run(box)
    assert len(fake.calls("Start")) == 1


def test_a_start_with_a_key_is_sent_again(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Drop(), Stream(started(4), exited(4)))
    assert run(box, key="k").exit_code == 0
    assert len(fake.calls("Start")) == 2


def test_a_stream_that_ends_early_is_no_end(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Stream())
    with pytest.raises(sandsea.OutcomeUnknown):
        run(box)


def test_a_silent_server_is_waited_for_longer_than_the_command_may_take(
    fake: Fake, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "GRACE_SECONDS", 1.8)  # that it has begun is told within it
    fake.line_up("Start", Stream(started(4), end="silent"))
    with pytest.raises(sandsea.RequestTimeout):
        run(box, timeout=0.2)
    assert [s["signal"] for s in fake.calls("Signal")] == [9]


def test_reads_are_repeated_and_changes_are_not(fake: Fake, box: Box) -> None:
    fake.line_up("Stat", Drop(), Reply({"info": {"path": "/a", "size": "3"}}))
    assert done(box.files.stat("/a")).size == 3  # type: ignore[attr-defined]
    fake.line_up("Move", Drop())
    with pytest.raises(sandsea.OutcomeUnknown):
        done(box.files.move("/a", "/b"))
    assert len(fake.calls("Move")) == 1


class Unreadable(io.BytesIO):
    """A file whose disk fails."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("stdin", "failure"),
    [(Unreadable, OSError), (lambda: io.StringIO("text"), TypeError), (lambda: b"x", sandsea.OutcomeUnknown)],
)
def test_a_command_does_not_wait_for_input_that_never_comes(
    fake: Fake, box: Box, stdin: Callable[[], object], failure: type[Exception]
) -> None:
    fake.line_up("Start", Stream(started(4), end="killed"))
    fake.line_up("SendInput", error("unknown", "unknown", 500))
    with pytest.raises(failure):
        run(box, stdin=stdin())
    assert [s["signal"] for s in fake.calls("Signal")] == [9]


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_a_proxy_gave_up_waiting_for_is_not_sent_again(fake: Fake, box: Box, status: int) -> None:
    """The server may have done it, or be at it still: twice would be two commands, two removals, two signals."""
    gone = Reply({"no": "answer of ours"}, status)
    fake.line_up("Start", gone)
    fake.line_up("RunInShell", gone)
    fake.line_up("Remove", gone)
    fake.line_up("OpenShell", Reply({"shell": {"name": "a"}}))
    shell = done(box.shell())
    fake.line_up("Write", gone)
    calls: list[Callable[[], object]] = [
        lambda: run(box),
        lambda: done(shell.run("x")),  # type: ignore[attr-defined]
        lambda: done(box.files.remove("/a")),
        lambda: done(box.files.write("/a", io.BytesIO(b"x"))),
    ]
    for call in calls:
        with pytest.raises(sandsea.OutcomeUnknown, match="look before a retry"):
            call()
    assert [len(fake.calls(c)) for c in ("Start", "RunInShell", "Remove", "Write")] == [1, 1, 1, 1]
    fake.line_up("Stat", gone, Reply({"info": {"path": "/a", "size": "3"}}))
    assert done(box.files.stat("/a")).size == 3  # type: ignore[attr-defined]


def test_a_file_is_read_again_from_its_begin(fake: Fake, box: Box) -> None:
    fake.line_up("Read", Stream({"data": "YQ=="}, end="broken"), Stream({"data": "YWI="}))
    assert done(box.files.read("/a")) == b"ab"


def test_what_is_at_hand_is_written_again(fake: Fake, box: Box, tmp_path: pathlib.Path) -> None:
    fake.line_up("Write", Drop(), Stream({"info": {"path": "/a", "size": "1"}}))
    assert done(box.files.write("/a", b"x")).size == 1  # type: ignore[attr-defined]
    fake.line_up("UploadTar", Drop(), Stream({"files": "1"}))
    done(box.files.upload(tmp_path, "/w"))
    assert (len(fake.calls("Write")), len(fake.calls("UploadTar"))) == (2, 2)


def test_a_stream_that_is_used_up_is_not(fake: Fake, box: Box) -> None:
    fake.line_up("Write", Drop())
    with pytest.raises(sandsea.OutcomeUnknown):
        done(box.files.write("/a", io.BytesIO(b"x")))
    assert len(fake.calls("Write")) == 1


async def test_a_watch_says_that_it_missed_something(fake: Fake) -> None:
    ready = {"change": "FILE_CHANGE_READY"}
    created = {"change": "FILE_CHANGE_CREATED", "path": "/w/a", "type": "FILE_TYPE_REGULAR"}
    moved = {"change": "FILE_CHANGE_MOVED", "path": "/w/b", "from": "/w/a"}
    fake.line_up("Watch", Stream(ready, created, end="broken"), Stream(ready, moved, end="silent"))
    async with Client(fake.url, token="t").sandbox(ID).files.watch("/w") as watch:
        seen = [await watch.next(LIMIT) for _ in range(3)]
        assert [(e.change, e.path, e.source, e.type) for e in seen] == [
            ("created", "/w/a", "", "regular"),
            ("gap", "/w", "", ""),
            ("moved", "/w/b", "/w/a", ""),
        ]
        with pytest.raises(sandsea.RequestTimeout):
            await watch.next(0.05)


def test_a_watch_can_be_closed_while_it_is_silent(fake: Fake) -> None:
    fake.line_up("Watch", Stream({"change": "FILE_CHANGE_READY"}, end="silent"))
    sb = sandsea.sync.Client(fake.url, token="t").sandbox(ID)
    with sb.files.watch("/w") as watch, pytest.raises(sandsea.RequestTimeout):
        watch.next(0.05)


def test_a_watch_can_be_closed_while_its_link_is_broken(fake: Fake) -> None:
    fake.line_up("Watch", Stream({"change": "FILE_CHANGE_READY"}, end="broken"), Drop())
    sb = sandsea.sync.Client(fake.url, token="t").sandbox(ID)
    with sb.files.watch("/w") as watch, pytest.raises(sandsea.RequestTimeout):
        watch.next(0.05)


@pytest.mark.parametrize("kind", [Client, sandsea.sync.Client])
def test_without_a_token_the_server_is_asked_all_the_same(
    fake: Fake, kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name in ("SANDSEA_TOKEN", "SANDSEA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(core, "DEFAULT_TOKEN_FILE", str(tmp_path / "none"))
    fake.line_up("Get", error("unauthenticated", "unauthenticated", 401))
    with pytest.raises(sandsea.Unauthenticated):
        done(kind(fake.url).connect(ID))


def test_an_older_server_is_named_as_such(fake: Fake, box: Box) -> None:
    with pytest.raises(sandsea.PreconditionFailed, match="older than this package"):
        done(box.files.symlink("/a", "b"))


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    fake.line_up("Get", Reply(SANDBOX))
    with sandsea.sync.Client(fake.url, token="t").sandbox(ID) as sb:
        fake.line_up("Stop", Reply(SANDBOX))
        assert sb.is_alive()


# --- quotas


FULL = error("resource_exhausted", "exhausted", 429, retryAfterMs="50", retryable=True)


async def test_a_full_quota_is_waited_for(fake: Fake) -> None:
    fake.line_up("Create", FULL, FULL, Reply(SANDBOX))
    sb = await Client(fake.url, token="t").run_container(timeout=10)
    sb.disown()
    creates = fake.calls("Create")
    assert len(creates) == 3
    assert len({c["key"] for c in creates}) == 1


async def test_a_full_quota_is_not_waited_for_beyond_the_deadline(fake: Fake) -> None:
    fake.line_up("Create", error("resource_exhausted", "exhausted", 429, retryAfterMs="3600000"))
    with pytest.raises(sandsea.Exhausted) as e:
        await Client(fake.url, token="t").run_container(timeout=5)
    assert e.value.retry_after == 3600
    assert len(fake.calls("Create")) == 1


async def test_a_limit_without_a_time_to_wait_is_told_at_once(fake: Fake) -> None:
    fake.line_up("Create", error("resource_exhausted", "exhausted", 429))
    with pytest.raises(sandsea.Exhausted):
        await Client(fake.url, token="t").run_container(timeout=5)
    assert len(fake.calls("Create")) == 1


def test_retry_after_of_a_proxy_counts() -> None:
    with pytest.raises(sandsea.Exhausted) as e:
        core.answer(429, b"slow down", retry_after="7")
    assert e.value.retry_after == 7


@pytest.mark.parametrize("kind", [Client, sandsea.sync.Client])
def test_a_full_quota_is_waited_for_with_the_time_that_is_left(fake: Fake, kind: Kind) -> None:
    fake.line_up("Create", FULL)
    with pytest.raises(sandsea.Exhausted, match="as lined up"):
        done(kind(fake.url, token="t").run_container(timeout=2))
    limits = [c["ready_timeout_ms"] for c in fake.calls("Create")]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] > limits[-1]


@pytest.mark.parametrize("kind", [Client, sandsea.sync.Client])
def test_a_create_without_an_answer_is_undone_and_the_last_answer_told(
    fake: Fake, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CREATE_GRACE_SECONDS", 0.1)
    fake.line_up("Create", FULL, Stream(end="silent"), Reply(SANDBOX))
    fake.line_up("Stop", Reply(SANDBOX))
    c = kind(fake.url, token="t")

    async def create() -> None:
        with pytest.raises(sandsea.Exhausted, match="as lined up"):
            await c.run_container(timeout=2)  # type: ignore[misc]
        await c.close()  # type: ignore[func-returns-value]

    if isinstance(c, Client):
        asyncio.run(create())
    else:
        with pytest.raises(sandsea.Exhausted, match="as lined up"):
            c.run_container(timeout=2)
        c.close()
    assert len({c["key"] for c in fake.calls("Create")}) == 1
    assert [c["id"] for c in fake.calls("Stop")] == [ID]


def test_a_create_that_is_never_answered_gives_advice_that_can_be_followed(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CREATE_GRACE_SECONDS", 0.1)
    fake.line_up("Create", Stream(end="silent"), error("internal", "internal", 500))
    with sandsea.sync.Client(fake.url, token="t") as c, pytest.raises(sandsea.RequestTimeout) as e:
        c.run_container(timeout=0.2)
    assert str(e.value).endswith("Try again")
    assert len(fake.calls("Create")) == 2


async def test_a_create_with_a_key_that_is_never_answered_is_left_alone(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "CREATE_GRACE_SECONDS", 0.1)
    fake.line_up("Create", Stream(end="silent"), Reply(SANDBOX))
    async with Client(fake.url, token="t") as c:
        with pytest.raises(sandsea.RequestTimeout):
            await c.run_container(sandsea.ContainerRunArgs(key="k"), timeout=0.1)
    await until(lambda: bool(fake.calls("Create")), "the create has come")
    assert len(fake.calls("Create")) == 1


async def test_the_items_of_a_batch_that_met_the_quota_are_asked_for_again(fake: Fake) -> None:
    full = {"index": 1, "error": {"kind": "exhausted", "retryAfterMs": "50"}, "message": "full"}
    one = {"index": 0, "sandbox": {"id": "s1", "state": "SANDBOX_STATE_RUNNING"}}
    two = {"index": 1, "sandbox": {"id": "s2", "state": "SANDBOX_STATE_RUNNING"}}
    fake.line_up("CreateBatch", Stream(one, full), Stream(one, end="broken"), Stream(one, two))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # no handle of the first answers is dropped
        boxes = await Client(fake.url, token="t").create_many(sandsea.ContainerRunArgs(), 2)
    assert [b.id for b in boxes if isinstance(b, sandsea.Sandbox)] == ["s1", "s2"]
    assert len({c["key"] for c in fake.calls("CreateBatch")}) == 1
    for b in boxes:
        assert isinstance(b, sandsea.Sandbox)
        b.disown()


async def test_a_batch_keeps_to_its_time(fake: Fake) -> None:
    one = {"index": 0, "sandbox": {"id": "s1"}}
    fake.line_up("CreateBatch", Stream(one, end="silent"))
    first, second = await Client(fake.url, token="t").create_many(sandsea.ContainerRunArgs(), 2, timeout=0)
    assert isinstance(first, sandsea.Sandbox)
    first.disown()
    assert isinstance(second, sandsea.RequestTimeout)


async def test_a_batch_that_fails_as_a_whole_is_undone(fake: Fake) -> None:
    one = {"index": 0, "sandbox": {"id": "s1"}}
    fake.line_up("CreateBatch", Stream(one, end="silent"), Stream(one, {"index": 1, "sandbox": {"id": "s2"}}))
    fake.line_up("StopMany", Stream({"id": "s1"}, {"id": "s2"}))
    task = asyncio.ensure_future(Client(fake.url, token="t").create_many(sandsea.ContainerRunArgs(), 2))
    await until(lambda: bool(fake.calls("CreateBatch")), "the batch is asked for")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fake.calls("StopMany") == [{"ids": ["s1", "s2"]}]


# --- event loops, forks, dropped handles


def test_each_event_loop_closes_its_connections(fake: Fake) -> None:
    fake.line_up("Get", Reply(SANDBOX))
    sb = Client(fake.url, token="t").sandbox(ID)
    gc.collect()  # what other tests left
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            assert asyncio.run(sb.is_alive())
        gc.collect()
    assert not [str(w.message) for w in seen]
    assert len(sb._client._pools._pools) <= 1


def test_streams_that_are_open_at_the_end_of_a_loop_end_quietly(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    fake.line_up("Start", Stream(started(4), end="silent"))
    fake.line_up("Watch", Stream({"change": "FILE_CHANGE_READY"}, end="silent"))
    held: list[object] = []

    async def main() -> None:
        sb = Client(fake.url, token="t").sandbox(ID)
        p = await sb.start(["x"], key="k")
        watch = sb.files.watch("/w")
        await watch.begin()
        terminal = await sb.pty()
        with pytest.raises(sandsea.RequestTimeout):
            await terminal.read(0.05)
        held.extend([p, watch, terminal])

    asyncio.run(main())
    assert not caplog.records


def test_a_loop_that_was_closed_carelessly_is_forgotten(fake: Fake) -> None:
    fake.line_up("Get", Reply(SANDBOX))
    sb = Client(fake.url, token="t").sandbox(ID)
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(sb.is_alive())
    loop.close()
    assert asyncio.run(sb.is_alive())
    assert loop not in sb._client._pools._pools


def test_a_stream_of_a_closed_loop_says_how_to_go_on(fake: Fake) -> None:
    fake.line_up("Start", Stream(started(4), output(0, b"one"), end="silent"))
    p = Client(fake.url, token="t").sandbox(ID).start(["x"])
    asyncio.run(p.begin())

    async def read() -> sandsea.Output:
        return await anext(aiter(p))

    with pytest.raises(sandsea.SandseaError, match=re.escape("closed since. Take it up again: sandbox.attach(4)")):
        asyncio.run(read())


def test_a_client_in_a_forked_child_says_how_to_go_on(fake: Fake, box: Box) -> None:
    fake.line_up("Get", Reply(SANDBOX))
    assert done(box.is_alive())
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            done(box.is_alive())
        except sandsea.SandseaError as e:
            os.write(writer, str(e).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert "before a fork. Make a new one in the child" in pipe.read()
    os.waitpid(child, 0)


@pytest.mark.parametrize("kind", [Client, sandsea.sync.Client])
def test_a_dropped_sandbox_warns(fake: Fake, kind: type[Client] | type[sandsea.sync.Client]) -> None:
    fake.line_up("Create", Reply(SANDBOX))
    with pytest.warns(RuntimeWarning, match="s7q3k2m5 was dropped and runs on"):
        done(kind(fake.url, token="t").run_container())
    fake.line_up("Get", Reply({"sandbox": {"id": ID, "state": "SANDBOX_STATE_ENDED"}}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        sb = done(kind(fake.url, token="t").run_container())
        assert isinstance(sb, (sandsea.Sandbox, sandsea.sync.Sandbox))
        assert not done(sb.is_alive())
        del sb
        gc.collect()


async def test_a_cancelled_create_is_undone(fake: Fake) -> None:
    fake.line_up("Create", Stream(end="silent"), Reply(SANDBOX))
    fake.line_up("Stop", Reply(SANDBOX))
    task = asyncio.ensure_future(Client(fake.url, token="t").run_container())
    await until(lambda: bool(fake.calls("Create")), "the sandbox is asked for")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len({c["key"] for c in fake.calls("Create")}) == 1
    assert [c["id"] for c in fake.calls("Stop")] == [ID]


async def test_the_first_failure_is_not_hidden_by_a_failing_stop(fake: Fake) -> None:
    fake.line_up("Create", Reply(SANDBOX))
    fake.line_up("Stop", error("internal", "internal", 500))
    with pytest.warns(RuntimeWarning, match="s7q3k2m5 was not stopped"), pytest.raises(ZeroDivisionError):
        async with Client(fake.url, token="t").run_container():
            raise ZeroDivisionError
    with pytest.raises(sandsea.InfraError):
        async with Client(fake.url, token="t").run_container():
            pass


def test_a_stop_is_sent_although_its_loop_ends(fake: Fake) -> None:
    """asyncio.run cancels all tasks that are left, also the one that waits for the answer to a stop."""
    fake.line_up("Stop", Stream(end="silent"), Reply(SANDBOX))

    async def main() -> asyncio.Future[None]:
        stop = asyncio.ensure_future(Client(fake.url, token="t").sandbox(ID).stop())
        await until(lambda: bool(fake.calls("Stop")), "the stop is sent")
        return stop

    stop = asyncio.run(main())
    assert stop.cancelled()
    assert len(fake.calls("Stop")) == 2


async def test_a_cancelled_stop_is_over_when_the_caller_goes_on(fake: Fake) -> None:
    gate = threading.Event()
    fake.line_up("Stop", Reply({"sandbox": {"id": ID, "state": "SANDBOX_STATE_ENDED"}}, gate=gate))
    sb = Client(fake.url, token="t").sandbox(ID)
    stop = asyncio.ensure_future(sb.stop())
    await until(lambda: bool(fake.calls("Stop")), "the stop is sent")
    stop.cancel()
    assert not (await asyncio.wait({stop}, timeout=0.1))[0]
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert len(fake.calls("Stop")) == 1


async def test_a_client_closes_after_what_it_stops(fake: Fake) -> None:
    gate = threading.Event()
    fake.line_up("Stop", Reply(SANDBOX, gate=gate))
    c = Client(fake.url, token="t")
    stop = asyncio.ensure_future(c.sandbox(ID).stop())
    await until(lambda: bool(fake.calls("Stop")), "the stop is sent")
    close = asyncio.ensure_future(c.close())
    assert not (await asyncio.wait({close}, timeout=0.1))[0]
    gate.set()
    await close
    await stop
    assert len(fake.calls("Stop")) == 1


async def test_a_client_closes_after_what_it_stops_without_await(fake: Fake) -> None:
    gate = threading.Event()
    fake.line_up("Stop", Reply(SANDBOX, gate=gate))
    c = sandsea.sync.Client(fake.url, token="t")
    stop = asyncio.ensure_future(asyncio.to_thread(c.sandbox(ID).stop))
    await until(lambda: bool(fake.calls("Stop")), "the stop is sent")
    close = asyncio.ensure_future(asyncio.to_thread(c.close))
    assert not (await asyncio.wait({close}, timeout=0.1))[0]
    gate.set()
    await close
    await stop
    assert len(fake.calls("Stop")) == 1


async def test_a_stop_without_an_answer_does_not_keep_a_client_open(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandsea._async.client._SETTLE_SECONDS", 0.1)
    fake.line_up("Stop", Stream(end="silent"), Reply(SANDBOX))
    c = Client(fake.url, token="t")
    stop = asyncio.ensure_future(c.sandbox(ID).stop())
    await until(lambda: bool(fake.calls("Stop")), "the stop is sent")
    await c.close()
    await stop  # it went on over a new connection
    assert len(fake.calls("Stop")) == 2
    await c.close()


@pytest.mark.parametrize("begun", [True, False])
async def test_who_loses_the_connection_stops_what_was_made_before_the_client_is_closed(
    fake: Fake, begun: bool
) -> None:
    fake.line_up("Create", Reply(SANDBOX))
    fake.line_up("Start", Stream(*([started(4)] if begun else []), end="silent"))
    fake.line_up("Stop", Reply(SANDBOX))
    commands: list[sandsea.Process] = []

    async def use(c: Client) -> None:
        async with c.run_container() as sb, sb.start(["x"]) as p:
            commands.append(p)
            await p.wait()

    async with Client(fake.url, token="t") as c:
        user = asyncio.ensure_future(use(c))
        await until(lambda: bool(fake.calls("Start")) and (not begun or bool(commands)), "the command runs")
    assert len(fake.calls("Stop")) == 1
    with pytest.raises(sandsea.OutcomeUnknown):
        await user


# --- terminals


TERMINAL = Stream(
    started(7), output(0, b"$ grep"), output(6, b"\xc3"), output(7, b"\xbc x\r\n"), gap(12, 88), output(100, b"$ "),
    end="silent",
)  # fmt: skip


async def test_a_terminal_is_read_piece_by_piece(fake: Fake) -> None:
    fake.line_up("Start", TERMINAL)
    async with Client(fake.url, token="t").sandbox(ID).pty(cols=120, rows=40) as p:
        assert fake.calls("Start")[0]["terminal"] == {"columns": 120, "rows": 40}
        assert await p.read_until("$ ", LIMIT) == "$ "
        assert p.offset == 2
        assert await p.read_until(re.compile(r"gr(e+)p\S"), LIMIT) == "grepü"
        assert p.offset == 8
        with pytest.raises(sandsea.RequestTimeout, match="unread so far"):
            await p.read_until("never", 0.1)
        rest = ""
        while not rest.endswith("$ "):
            rest += await p.read(LIMIT)
        assert rest == " x\r\n$ "
        assert p.offset == 102
        with pytest.raises(sandsea.RequestTimeout):
            await p.read(0.05)
    assert [(s["number"], s["signal"], s["tree"]) for s in fake.calls("Signal")] == [(7, 9, True)]


def test_a_terminal_without_await(fake: Fake) -> None:
    fake.line_up("Start", TERMINAL)
    with sandsea.sync.Client(fake.url, token="t").sandbox(ID).pty() as p:
        assert p.read_until("grep", LIMIT) == "$ grep"
        with pytest.raises(sandsea.RequestTimeout):
            p.read_until("never", 0.1)
        p.detach()
    assert fake.calls("Signal") == []


async def test_a_terminal_that_ends_says_so(fake: Fake) -> None:
    fake.line_up("Start", Stream(started(7), output(0, b"bye \xc3"), exited(7, 5)))
    async with Client(fake.url, token="t").sandbox(ID).pty("x") as p:
        with pytest.raises(sandsea.errors.StreamEnded, match="bye"):
            await p.read_until("$ ")
        assert [text async for text in p] == ["bye ", "�"]
        assert (await p.wait()).exit_code == 5
    assert fake.calls("Signal") == []


async def test_a_terminal_is_left_and_taken_up_again(fake: Fake) -> None:
    fake.line_up("Start", TERMINAL)
    fake.line_up("Attach", Stream(started(7), output(2, b"grep"), exited(7)))
    sb = Client(fake.url, token="t").sandbox(ID)
    async with sb.pty() as p:
        await p.read_until("$ ", LIMIT)
        await p.detach()
    async with sb.attach_pty(p.number, p.offset) as again:
        assert await again.read(LIMIT) == "grep"
    assert fake.calls("Attach")[0] == {"id": ID, "number": 7, "stdout_offset": 2}
    assert fake.calls("Signal") == []


async def test_input_after_an_attach_goes_where_the_last_byte_went(fake: Fake) -> None:
    fake.line_up("SendInput", Reply({"nextOffset": "10"}), Reply({"nextOffset": "12"}))
    await Client(fake.url, token="t").sandbox(ID).attach(7).send("hi")
    assert [c.get("offset", 0) for c in fake.calls("SendInput")] == [0, 10]


# --- processes


async def test_a_process_can_be_written_to_before_it_is_read(fake: Fake) -> None:
    fake.line_up("Start", Stream(started(4), output(0, b"x"), exited(4)))
    fake.line_up("SendInput", Reply({"nextOffset": "1"}))
    p = Client(fake.url, token="t").sandbox(ID).start(["cat"], stdin=True)
    await p.send("x")
    assert (await p.wait()).stdout == "x"


def test_a_command_waits_for_its_reader_unless_told_otherwise(fake: Fake, box: Box) -> None:
    fake.line_up("Start", Stream(started(4), exited(4)))
    fake.line_up("Attach", Stream(started(4), exited(4)))
    for options in ({}, {"lossless": False}, {"detached": True}):
        done(box.start(["x"], **options).wait())  # type: ignore[arg-type]
    done(box.attach(4).wait())
    done(box.attach(4, lossless=False).wait())
    run(box)
    assert [c.get("lossless", False) for c in fake.calls("Start")] == [True, False, False, False]
    assert [c.get("lossless", False) for c in fake.calls("Attach")] == [True, False]


async def test_a_detached_process_is_followed_when_it_is_read(fake: Fake) -> None:
    fake.line_up("Start", Stream(started(4)))
    fake.line_up("Attach", Stream(started(4), output(0, b"x"), exited(4, 2)))
    p = await Client(fake.url, token="t").sandbox(ID).start(["x"], detached=True)
    assert p.number == 4
    assert fake.calls("Attach") == []
    assert (await p.wait()).exit_code == 2


async def test_poll_asks_without_reading(fake: Fake) -> None:
    running = {"number": "4", "state": "PROCESS_STATE_RUNNING"}
    ended = {"number": "4", "state": "PROCESS_STATE_EXITED", "result": {"exitCode": 3}}
    fake.line_up("Start", Stream(started(4)))
    fake.line_up("List", Reply({"processes": [running]}), Reply({"processes": [ended]}))
    p = await Client(fake.url, token="t").sandbox(ID).start(["x"], detached=True)
    assert (await p.poll(), await p.poll()) == (None, 3)
