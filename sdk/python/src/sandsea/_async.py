"""The asynchronous front."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

import httpx

from . import _aio as aio
from . import _core as core
from . import _models as m
from . import errors
from ._core import ContainerRunArgs, Json, Output
from ._result import Result, make

T = TypeVar("T")
# Methods called list hide the builtin from the annotations behind them.
_Strings = list[str]
_Images = list[m.Image]


class Client:
    """Speaks to one server. Use it as `async with Client() as c`, or call `open()` and `close()`.

    Works over several event loops, one after the other or at once: connections belong to the loop that made them.
    """

    def __init__(self, url: str | None = None, token: str | None = None, token_file: str | None = None) -> None:
        self._config = core.Config.find(url, token, token_file)
        self._pid = os.getpid()
        self._pools = aio.Pools(self._config.url)

    async def open(self) -> Client:
        """Check that the server answers and the token is good."""
        await self._drive(_whoami())
        return self

    async def close(self) -> None:
        """Close this loop's connections."""
        await self._pools.close()

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def url(self) -> str:
        return self._config.url

    # --- sandboxes

    async def run_container(self, args: ContainerRunArgs | None = None, timeout: float = 120.0) -> Sandbox:
        """Create a container sandbox; returns when commands and files work, within timeout seconds."""
        args = args or ContainerRunArgs()
        return Sandbox(self, await self._drive(core.create(args, timeout)))

    async def create_many(
        self, args: ContainerRunArgs, n: int, timeout: float = 120.0
    ) -> list[Sandbox | errors.SandseaError]:
        """Create n sandboxes from one description. A failed one is its exception, in its place."""
        out: list[Sandbox | errors.SandseaError] = [errors.Unavailable("no answer for this one")] * n
        body = core.create_batch(args, n, timeout)
        async for doc in self._stream(core.sandbox_path("CreateBatch"), body):
            r = m.CreateBatchResponse.from_json(doc)
            if r.sandbox is not None:
                out[r.index] = Sandbox(self, r.sandbox)
            else:
                detail = r.error.to_json() if r.error else {}
                out[r.index] = errors.from_connect(
                    {
                        "code": "",
                        "message": r.message,
                        "details": [{"type": "sandsea.v1.ErrorDetail", "debug": detail}],
                    }
                )
        return out

    def sandbox(self, id: str) -> Sandbox:
        """The handle of a sandbox that exists; asks nobody."""
        return Sandbox(self, m.Sandbox(id=id), owned=False)

    async def list(self, labels: Mapping[str, str] | None = None, *, all: bool = False) -> list[m.Sandbox]:
        """The sandboxes of the project, newest first; with all also those ended in the last 24 hours."""
        return await self._drive(core.list_sandboxes(labels, all))

    # --- images

    async def images(self) -> _Images:
        return await self._drive(core.images())

    async def import_debian(self, suite: str, include: Iterable[str] = (), name: str = "") -> m.Image:
        """Make an image from Debian packages."""
        return await self._import(core.import_debian(suite, include, name))

    async def import_rootfs(
        self, source: str | os.PathLike[str] | IO[bytes], name: str, config: m.ImageConfig | None = None
    ) -> m.Image:
        """Make an image from a tar of a root file system."""
        with contextlib.ExitStack() as stack:
            if isinstance(source, (str, os.PathLike)):
                source = stack.enter_context(open(source, "rb"))  # noqa: ASYNC230 - read in pieces between awaits
            doc = await self._send(core.image_path("Upload"), core.image_messages(source))
        return await self._import(core.import_rootfs(m.UploadImageResponse.from_json(doc).upload, name, config))

    async def compose(self, name: str, base: str, workspace: str = "", toolkits: Iterable[str] = ()) -> m.Image:
        """Name a stack of images."""
        return await self._drive(core.compose(name, base, workspace, toolkits))

    async def delete_image(self, ref: str, *, force: bool = False) -> int:
        """Remove an image; returns the bytes freed."""
        return await self._drive(core.delete_image(ref, force))

    async def _import(self, body: Json) -> m.Image:
        image: m.Image | None = None
        async for doc in self._stream(core.image_path("Import"), body):
            image = m.ImportImageResponse.from_json(doc).image or image
        if image is None:
            raise errors.Unavailable("the import ended without an image. Ask again")
        return image

    # --- input and output

    def _pool(self) -> httpx.AsyncClient:
        if os.getpid() != self._pid:
            raise errors.SandseaError("this client was made before a fork. Make a new one in the child")
        return self._pools.get()

    async def _drive(self, op: core.Op[T]) -> T:
        """Send what an operation yields until it returns."""
        try:
            call = next(op)
            while True:
                try:
                    reply = await self._post(call)
                except BaseException as e:
                    call = op.throw(e)
                else:
                    call = op.send(reply)
        except StopIteration as done:
            value: T = done.value
            return value

    async def _post(self, call: core.Call) -> Json:
        deadline = time.monotonic() + call.timeout
        for attempt in range(100):
            left = max(0.1, deadline - time.monotonic())
            try:
                r = await self._pool().post(
                    call.path,
                    json=call.body,
                    headers=self._config.headers(False),
                    timeout=httpx.Timeout(left, connect=min(5.0, left)),
                )
                return core.answer(r.status_code, r.content, call.filename)
            except httpx.TimeoutException as e:
                kind = errors.OutcomeUnknown if not call.idempotent else errors.RequestTimeout
                raise kind(f"{call.path.rsplit('/', 1)[-1]}: no answer in {call.timeout:.0f} s") from e
            except httpx.TransportError as e:
                failure: errors.SandseaError = core.unreachable(self._config.url, e)
                failure.__cause__ = e
            except errors.Unavailable as e:
                failure = e
            except errors.Exhausted as e:
                if e.retry_after is None:
                    raise
                failure = e
            if not call.idempotent or time.monotonic() + core.backoff(attempt) >= min(
                deadline, time.monotonic() + core.RECONNECT_SECONDS
            ):
                raise failure
            if attempt >= 5 and isinstance(failure.__cause__, httpx.ConnectError):
                raise failure
            await aio.sleep(getattr(failure, "retry_after", None) or core.backoff(attempt))
        raise failure

    async def _stream(self, path: str, body: Json, filename: str | None = None) -> AsyncIterator[Json]:
        frames = core.Frames(filename)
        try:
            async with self._pool().stream(
                "POST", path, content=core.envelope(body), headers=self._config.headers(True)
            ) as r:
                if r.status_code != 200:
                    core.answer(r.status_code, await r.aread(), filename)
                async for chunk in r.aiter_raw():
                    for doc in frames.feed(chunk):
                        yield doc
        except httpx.TransportError as e:
            raise core.unreachable(self._config.url, e) from e
        frames.finish()

    async def _send(self, path: str, messages: Iterator[bytes], filename: str | None = None) -> Json:
        frames = core.Frames(filename)
        try:
            r = await self._pool().post(path, content=aio.body(messages), headers=self._config.headers(True))
        except httpx.TransportError as e:
            raise core.unreachable(self._config.url, e) from e
        if r.status_code != 200:
            return core.answer(r.status_code, r.content, filename)
        docs = frames.feed(r.content)
        frames.finish()
        return docs[-1] if docs else {}

    def __getstate__(self) -> dict[str, Any]:
        # The token stays behind: a handle that travels finds its own.
        return {"url": self._config.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(url=state["url"])  # type: ignore[misc]


def _whoami() -> core.Op[Json]:
    doc = yield core.Call("/sandsea.v1.IAMService/WhoAmI", {}, idempotent=True)
    return doc


class Process:
    """A command that was started: an async iterator of its output. `result` is there when it has ended."""

    def __init__(self, sandbox: Sandbox, follow: core.Follow, argv: tuple[str, ...], errors_mode: str) -> None:
        self._sandbox = sandbox
        self._follow = follow
        self._argv = argv
        self._errors = errors_mode
        self._events = self._run()
        self._sent = 0
        self._started = aio.Event()

    @property
    def number(self) -> int:
        """Its number in the sandbox, 0 until it has started."""
        return self._follow.number

    @property
    def result(self) -> Result | None:
        p = self._follow.process
        if p is None:
            return None
        out, err, cut = self._follow.value()
        return make(self._sandbox.id, p, out, err, cut=cut, errors=self._errors, argv=self._argv)

    def __aiter__(self) -> AsyncIterator[Output]:
        return self._events

    async def wait(self) -> Result:
        """Read on to the end."""
        async for _ in self._events:
            pass
        result = self.result
        assert result is not None
        return result

    async def send(self, data: bytes | str) -> None:
        """Write to standard input."""
        await self._started.wait()
        data = data.encode() if isinstance(data, str) else data
        for i in range(0, len(data), 1 << 20):
            op = core.send_input(self._sandbox.id, self.number, self._sent, data[i : i + (1 << 20)])
            self._sent = await self._sandbox._client._drive(op)

    async def close_input(self) -> None:
        """Give standard input its end."""
        await self._started.wait()
        await self._sandbox._client._drive(core.close_input(self._sandbox.id, self.number))

    async def kill(self, signal: int = 9, *, tree: bool = True) -> None:
        """Send a signal to the command and all that it started."""
        await self._started.wait()
        await self._sandbox._client._drive(core.signal(self._sandbox.id, self.number, signal, tree))

    async def aclose(self) -> None:
        """Stop reading. A command that was started without a key and not detached is killed."""
        await self._events.aclose()  # type: ignore[attr-defined]

    async def _run(self) -> AsyncIterator[Output]:
        broken_at: float | None = None
        while True:
            path, body = self._follow.request()
            stream = self._sandbox._client._stream(path, body)
            try:
                async for doc in stream:
                    broken_at = None
                    output = self._follow.take(doc)
                    if self._follow.number:
                        self._started.set()
                    if output is not None:
                        yield output
                    if self._follow.process is not None:
                        return
            except errors.Unavailable:
                now = time.monotonic()
                broken_at = broken_at or now
                if not self._follow.can_resume or now - broken_at > core.RECONNECT_SECONDS:
                    raise
                await aio.sleep(0.2)
            else:
                if self._request_is_detached:
                    return
            finally:
                await stream.aclose()  # type: ignore[attr-defined]

    @property
    def _request_is_detached(self) -> bool:
        r = self._follow._request
        return bool(r and r.detached)


class Sandbox:
    """One running sandbox. `async with` stops it at the end."""

    def __init__(self, client: Client, info: m.Sandbox, owned: bool = True) -> None:
        self._client = client
        self.info = info
        self.files = Files(self)
        self._owned = owned
        self._done = False

    @property
    def id(self) -> str:
        return self.info.id

    def __repr__(self) -> str:
        env = self.info.spec.environment if self.info.spec else None
        image = (env.image or env.base) if env else ""
        state = self.info.state.removeprefix("SANDBOX_STATE_").lower()
        return " ".join(f"<Sandbox {self.id[:8]} {state} {image}".split()) + ">"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and not self._done:
            warnings.warn(
                f"sandbox {self.id[:8]} was dropped and goes on running. Use it in `async with`, or stop() it",
                ResourceWarning,
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"client": self._client, "info": self.info}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["client"], state["info"], owned=False)  # type: ignore[misc]

    async def refresh(self) -> m.Sandbox:
        """Ask its node for its state; neither wakes it nor counts as use."""
        self.info = await self._client._drive(core.get(self.id))
        return self.info

    async def is_alive(self) -> bool:
        """True while it runs; never raises for a sandbox that is gone."""
        try:
            return (await self.refresh()).state == "SANDBOX_STATE_RUNNING"
        except (errors.NotFound, errors.Lost, errors.SandboxEnded):
            return False

    async def stop(self, grace: float = 0.0) -> None:
        """End it; a second time does nothing."""
        self._done = True
        # A caller that is being cancelled still stops what it made.
        self.info = await aio.shielded(self._client._drive(core.stop(self.id, grace)))

    async def extend_ttl(self, seconds: float) -> None:
        """Move the hard end to so many seconds from now."""
        self.info = await self._client._drive(core.extend_ttl(self.id, seconds))

    async def processes(self) -> list[m.Process]:
        """What calls have started in it, ended ones too."""
        return await self._client._drive(core.processes(self.id))

    # --- commands

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        stdin: bytes | str | None = None,
        merge_stderr: bool = False,
        max_output: int = core.MAX_OUTPUT,
        errors: str = "replace",
        key: str = "",
    ) -> Result:
        """Run a command without a shell and wait for its end. Not exiting with 0 is no exception: see Result.check.

        A cancelled call kills the command and all that it started, unless it has a key.
        """
        p = self.start(
            argv, timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env, stdin=stdin is not None,
            merge_stderr=merge_stderr, max_output=max_output, errors=errors, key=key,
        )  # fmt: skip
        feed = None if stdin is None else functools.partial(_feed, p, stdin)
        try:
            async with aio.beside(feed):
                return await p.wait()
        finally:
            await p.aclose()

    async def run_shell(self, line: str, *, shell: str = "bash", **options: Any) -> Result:
        """Run a command line by `shell -c`; the options are those of run."""
        return await self.run([shell, "-c", line], **options)

    def start(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        user: str = "",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        replace_env: bool = False,
        stdin: bool = False,
        merge_stderr: bool = False,
        detached: bool = False,
        max_output: int = core.MAX_OUTPUT,
        errors: str = "replace",
        key: str = "",
    ) -> Process:
        """Start a command; iterate over the result for its output. It starts with the first step of the iteration."""
        cmd = core.command(
            argv, timeout=timeout, user=user, cwd=cwd, env=env, replace_env=replace_env, merge_stderr=merge_stderr
        )
        request = m.StartRequest(id=self.id, command=cmd, stdin=stdin, detached=detached, key=key)
        return Process(self, core.Follow(self.id, request, limit=max_output), tuple(argv), errors)

    def attach(self, number: int, *, max_output: int = core.MAX_OUTPUT, errors: str = "replace") -> Process:
        """The record of a command from its first byte, while it runs and after it ended."""
        return Process(self, core.Follow(self.id, None, number, max_output), (), errors)


async def _feed(p: Process, data: bytes | str) -> None:
    try:
        await p.send(data)
        await p.close_input()
    except errors.SandseaError:
        # The command ended or closed its input; its own result tells.
        return


class Files:
    """The files of a sandbox, with the rights of a user inside (empty: the sandbox's)."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def _c(self) -> Client:
        return self._sandbox._client

    async def read(self, path: str, *, user: str = "", max_bytes: int = 0, offset: int = 0, length: int = 0) -> bytes:
        """The bytes of a file; one larger than max_bytes is refused before any is sent."""
        body = core.read_request(self._sandbox.id, path, user, max_bytes, offset, length)
        out = bytearray()
        async for doc in self._c._stream(core.file_path("Read"), body, path):
            out += m.ReadFileResponse.from_json(doc).data
        return bytes(out)

    async def read_text(self, path: str, *, user: str = "", errors: str = "strict") -> str:
        return (await self.read(path, user=user)).decode(errors=errors)

    async def write(self, path: str, data: bytes | str | IO[bytes], *, user: str = "", mode: int = 0) -> m.FileInfo:
        """Replace a file as a whole; missing parents are made."""
        doc = await self._c._send(
            core.file_path("Write"), core.write_messages(self._sandbox.id, path, user, mode, data), path
        )
        return m.WriteFileResponse.from_json(doc).info or m.FileInfo()

    async def stat(self, path: str, *, user: str = "", no_follow: bool = False) -> m.FileInfo:
        return await self._c._drive(core.stat_file(self._sandbox.id, path, user, no_follow))

    async def exists(self, path: str, *, user: str = "") -> bool:
        try:
            await self.stat(path, user=user)
        except (errors.MissingFile, errors.NotADirectory):
            return False
        return True

    async def list(self, path: str, *, user: str = "") -> list[m.FileInfo]:
        """The entries of a directory."""
        out: list[m.FileInfo] = []
        body = m.ListFilesRequest(id=self._sandbox.id, path=path, user=user).to_json()
        async for doc in self._c._stream(core.file_path("List"), body, path):
            out += m.ListFilesResponse.from_json(doc).files
        return out

    async def make_dir(self, path: str, *, user: str = "", mode: int = 0, parents: bool = True) -> None:
        await self._c._drive(core.make_dir(self._sandbox.id, path, user, mode, parents))

    async def move(self, source: str, target: str, *, user: str = "") -> None:
        await self._c._drive(core.move(self._sandbox.id, source, target, user))

    async def remove(self, path: str, *, user: str = "", recursive: bool = False) -> None:
        await self._c._drive(core.remove(self._sandbox.id, path, user, recursive))

    async def upload(self, local: str | os.PathLike[str], path: str, *, user: str = "") -> None:
        """Copy a local file, or the content of a local directory, below the directory path."""
        with core.pack(local) as tar:
            await self.upload_tar(tar, path, user=user)

    async def upload_tar(self, tar: IO[bytes], path: str, *, user: str = "") -> None:
        """Unpack a tar stream below path."""
        messages = core.upload_messages(self._sandbox.id, path, user, tar)
        await self._c._send(core.file_path("UploadTar"), messages, path)

    async def download(self, path: str, local: str | os.PathLike[str], *, user: str = "") -> _Strings:
        """Copy a file, or the content of a directory, below the local directory; returns what was left out."""
        with tempfile.TemporaryFile() as tar:
            skipped = await self.download_tar(path, tar, user=user)
            tar.seek(0)
            core.unpack(tar, local)
        return skipped

    async def download_tar(self, path: str, out: IO[bytes], *, user: str = "") -> _Strings:
        """Write a file or tree as a tar stream; returns what was left out."""
        skipped: _Strings = []
        body = m.DownloadTarRequest(id=self._sandbox.id, path=path, user=user).to_json()
        async for doc in self._c._stream(core.file_path("DownloadTar"), body, path):
            r = m.DownloadTarResponse.from_json(doc)
            out.write(r.data)
            skipped += r.skipped
        return skipped
