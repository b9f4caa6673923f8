"""The way to one server."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import IO, Any, TypeVar

import httpx

from .. import _aio as aio
from .. import _core as core
from .. import _models as m
from .. import errors
from .._core import ContainerRunArgs, Json
from .._progress import Line
from .sandbox import Sandbox

T = TypeVar("T")
# Methods called list hide the builtin from the annotations behind them.
_Images = list[m.Image]
_Made = list[Sandbox | errors.SandseaError]

#: how long the sandbox is looked for that a create may have made which was cancelled or never answered
_UNDO_SECONDS = 5.0
#: how long stops and undos that are under way keep the connections open
_SETTLE_SECONDS = 30.0


class Client:
    """Speaks to one server. Use it as `async with Client() as c`, or call `open()` and `close()`.

    Works over several event loops, one after the other or at once: connections belong to the loop that made them.
    """

    def __init__(self, url: str | None = None, token: str | None = None, token_file: str | None = None) -> None:
        self._config = core.Config.find(url, token, token_file)
        self._pid = os.getpid()
        self._pools = aio.Pools(self._config.url)
        self._cleanups = aio.Cleanups()
        self._known = False  # the server has answered before
        self._capabilities: dict[tuple[str, str], m.CapabilitiesResponse] = {}

    async def open(self) -> Client:
        """Check that the server answers and the token is good."""
        await self._drive(_whoami())
        return self

    async def close(self) -> None:
        """Close this loop's connections, once what is being stopped is stopped (30 s at most)."""
        if os.getpid() == self._pid:
            deadline = time.monotonic() + _SETTLE_SECONDS
            try:
                await self._cleanups.settle(_SETTLE_SECONDS)
                await self._pools.close()
                # Calls that this ended may now stop what they made, over new connections.
                await self._cleanups.settle(deadline - time.monotonic())
            finally:
                await self._pools.close()

    async def __aenter__(self) -> Client:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    @property
    def url(self) -> str:
        return self._config.url

    # --- sandboxes

    def run_container(self, args: ContainerRunArgs | None = None, timeout: float = 120.0) -> aio.Opening[Sandbox]:
        """Create a container sandbox; it is there when commands and files work, within timeout seconds.

        Await it, or use it in `async with`, which stops the sandbox at the end. A full quota is waited for. A call that
        is cancelled or never answered leaves nothing behind, unless args has a key: that finds the sandbox again.
        """
        return aio.opening(self._run_container(args or ContainerRunArgs(), timeout))

    async def _run_container(self, args: ContainerRunArgs, timeout: float) -> Sandbox:
        key = args.key or core.new_key()
        try:
            return Sandbox(self, await self._drive(core.create(args, key, timeout)))
        except Exception as e:
            if not args.key and core.unanswered(e):
                self._cleanups.start(lambda: self._undo(args, key))
            raise
        except BaseException:
            # Cancelled: it may be there all the same.
            if not args.key:
                await self._cleanups.run(lambda: self._undo(args, key))
            raise

    async def _undo(self, args: ContainerRunArgs, key: str) -> bool:
        """Stop the sandbox of a key that nobody was told of; False if that could not be done."""
        try:
            made = await self._drive(core.create(args, key, _UNDO_SECONDS))
            await self._drive(core.stop(made.id, 0))
        except errors.SandseaError:
            return False
        return True

    async def create_many(
        self, args: ContainerRunArgs, n: int, timeout: float = 120.0, *, progress: bool = False
    ) -> _Made:
        """Create n sandboxes from one description. A failed one is its exception, in its place.

        progress shows one line in a terminal or a notebook, and nothing elsewhere. A full quota is waited for. When the
        call as a whole fails or is cancelled, those that were made are stopped, unless args has a key.
        """
        key = args.key or core.new_key()
        made: dict[int, Sandbox | errors.SandseaError] = {}
        line = Line(n, progress)
        try:
            await self._create_many(args, n, key, timeout, made, line)
        except BaseException:
            for sb in made.values():
                if isinstance(sb, Sandbox):
                    sb.disown()
            if not args.key:
                await self._cleanups.run(lambda: self._undo_many(args, n, key))
            raise
        finally:
            line.end()
        return [made.get(i) or errors.RequestTimeout(f"not ready in {timeout:.0f} s") for i in range(n)]

    async def _create_many(
        self,
        args: ContainerRunArgs,
        n: int,
        key: str,
        timeout: float,
        made: dict[int, Sandbox | errors.SandseaError],
        line: Line,
    ) -> None:
        began = time.monotonic()
        attempt = 0
        while True:
            # Sent again after a broken link or a full quota: those that are there are found by their keys.
            left = timeout - (time.monotonic() - began)
            stop: errors.SandseaError | None = None
            try:
                body = core.create_batch(args, n, key, left)
                async with self._stream(core.sandbox_path("CreateBatch"), body, limit=left + 10) as docs:
                    async for doc in docs:
                        self._take(m.CreateBatchResponse.from_json(doc), made)
                        line.show(len(made), sum(not isinstance(x, Sandbox) for x in made.values()))
                        if time.monotonic() - began > timeout:
                            break  # the server waits for each, not for all of them
            except errors.SandseaError as e:
                stop = e
            full = [x for x in made.values() if isinstance(x, errors.Exhausted) and x.retry_after]
            again = stop or (full[0] if full else None)
            trying = time.monotonic() - began
            wait = self._pause(again, attempt, trying, timeout - trying) if again else None
            if wait is None:
                if stop:
                    raise stop
                return
            await aio.sleep(wait)
            attempt += 1

    def _take(self, r: m.CreateBatchResponse, made: dict[int, Sandbox | errors.SandseaError]) -> None:
        known = made.get(r.index)
        if r.sandbox is None:
            e = core.item_error(r.error or m.ErrorDetail(), r.message)
            made[r.index] = e or errors.InfraError(r.message)
        elif not (isinstance(known, Sandbox) and known.id == r.sandbox.id):
            made[r.index] = Sandbox(self, r.sandbox)

    async def _undo_many(self, args: ContainerRunArgs, n: int, key: str) -> bool:
        ids = []
        try:
            body = core.create_batch(args, n, key, _UNDO_SECONDS)
            async with self._stream(core.sandbox_path("CreateBatch"), body, limit=_UNDO_SECONDS + 10) as docs:
                async for doc in docs:
                    r = m.CreateBatchResponse.from_json(doc)
                    if r.sandbox is not None:
                        ids.append(r.sandbox.id)
            return not await self._stop_many(ids, 0)
        except errors.SandseaError:
            return False

    async def stop_many(self, sandboxes: Iterable[Sandbox | errors.SandseaError], grace: float = 0.0) -> None:
        """Stop several, as create_many returned them. All are tried; then the first failure is raised."""
        boxes = [sb for sb in sandboxes if isinstance(sb, Sandbox)]
        for sb in boxes:
            sb.disown()
        ids = [sb.id for sb in boxes]
        failed = await self._cleanups.run(lambda: self._stop_many(ids, grace))
        if failed:
            raise failed[0]

    async def _stop_many(self, ids: list[str], grace: float) -> list[errors.SandseaError]:
        failed: list[errors.SandseaError] = []
        for i in range(0, len(ids), 500):
            body = m.StopManyRequest(ids=ids[i : i + 500], grace_ms=round(grace * 1000)).to_json()
            async with self._stream(core.sandbox_path("StopMany"), body) as docs:
                async for doc in docs:
                    r = m.StopManyResponse.from_json(doc)
                    e = core.item_error(r.error, r.message)
                    if e is not None:
                        failed.append(e)
        return failed

    def sandbox(self, id: str) -> Sandbox:
        """The handle of a sandbox that exists; asks nobody."""
        return Sandbox(self, m.Sandbox(id=id), owned=False)

    async def connect(self, id: str) -> Sandbox:
        """The handle of a sandbox that exists, with what is in force in it; it is not stopped when the handle goes."""
        return Sandbox(self, await self._drive(core.get(id)), owned=False)

    async def list(self, labels: Mapping[str, str] | None = None, *, all: bool = False) -> list[m.Sandbox]:
        """The sandboxes of the project, newest first; with all also those ended in the last 24 hours."""
        return await self._drive(core.list_sandboxes(labels, all))

    async def capabilities(self, backend: str = "container", runtime_class: str = "") -> m.CapabilitiesResponse:
        """What sandboxes of this kind can do; asked once and remembered by this client."""
        kind = (backend, runtime_class)
        if kind not in self._capabilities:
            self._capabilities[kind] = await self._drive(core.capabilities(*kind))
        return self._capabilities[kind]

    # --- images

    async def images(self) -> _Images:
        """Every image of the server."""
        return await self._drive(core.images())

    async def import_debian(self, suite: str, include: Iterable[str] = (), name: str = "") -> m.Image:
        """Make an image from Debian packages."""
        return await self._import(core.import_debian(suite, include, name))

    async def import_rootfs(
        self, source: str | os.PathLike[str] | IO[bytes], name: str, config: m.ImageConfig | None = None
    ) -> m.Image:
        """Make an image from a tar of a root file system."""
        return await self._import(core.import_archive(await self._upload(source), "rootfs", "", name, config))

    async def import_archive(
        self,
        source: str | os.PathLike[str] | IO[bytes],
        name: str = "",
        *,
        format: str = "docker",
        reference: str = "",
        config: m.ImageConfig | None = None,
    ) -> m.Image:
        """Make an image from what `docker save` wrote, or (format "oci") from a tar of an OCI layout.

        reference chooses among several images in it.
        """
        return await self._import(core.import_archive(await self._upload(source), format, reference, name, config))

    async def import_registry(
        self,
        reference: str,
        name: str = "",
        *,
        username: str = "",
        password: str = "",
        token: str = "",
        insecure: bool = False,
        platform: str = "",
        config: m.ImageConfig | None = None,
    ) -> m.Image:
        """Make an image from one of a registry, named as Docker reads it. A password is used once and never stored."""
        known = username or password or token
        auth = m.RegistryAuth(username=username, password=password, token=token) if known else None
        source = m.RegistrySource(reference=reference, auth=auth, insecure=insecure, platform=platform)
        return await self._import(core.import_registry(source, name, config))

    async def compose(self, name: str, base: str, workspace: str = "", toolkits: Iterable[str] = ()) -> m.Image:
        """Name a stack of images."""
        return await self._drive(core.compose(name, base, workspace, toolkits))

    async def delete_image(self, ref: str, *, force: bool = False) -> int:
        """Remove an image; returns the bytes freed."""
        return await self._drive(core.delete_image(ref, force))

    async def _upload(self, source: str | os.PathLike[str] | IO[bytes]) -> str:
        with contextlib.ExitStack() as stack:
            if isinstance(source, (str, os.PathLike)):
                source = stack.enter_context(open(source, "rb"))  # noqa: ASYNC230 - read in pieces between awaits
            doc = await self._send(core.image_path("Upload"), core.image_messages(source))
        return m.UploadImageResponse.from_json(doc).upload

    async def _import(self, body: Json) -> m.Image:
        image: m.Image | None = None
        async with self._stream(core.image_path("Import"), body) as docs:
            async for doc in docs:
                image = m.ImportImageResponse.from_json(doc).image or image
        if image is None:
            raise errors.Unavailable("the import ended without an image. Ask again")
        return image

    # --- input and output

    def _pool(self) -> httpx.AsyncClient:
        if os.getpid() != self._pid:
            raise errors.SandseaError(
                "this client was made before a fork. Make a new one in the child, or send the handle over by pickle"
            )
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

    async def _retry(self, once: Callable[[], Awaitable[T]], timeout: float) -> T:
        """Call again while that may help, within timeout seconds."""
        began = time.monotonic()
        attempt = 0
        full: errors.Exhausted | None = None
        while True:
            try:
                return await once()
            except errors.SandseaError as e:
                trying = time.monotonic() - began
                wait = self._pause(e, attempt, trying, timeout - trying)
                if wait is None and full is not None and isinstance(e, errors.RequestTimeout):
                    # That there was no room says more than that the time for another attempt was short.
                    full.detail["unanswered"] = core.unanswered(e)
                    raise full from e
                if wait is None:
                    raise
                full = e if isinstance(e, errors.Exhausted) else full
            await aio.sleep(wait)
            attempt += 1

    def _pause(self, e: errors.SandseaError, attempt: int, trying: float, left: float) -> float | None:
        return core.pause(e, attempt, trying, left, self._known)

    async def _post(self, call: core.Call) -> Json:
        deadline = time.monotonic() + call.timeout
        return await self._retry(lambda: self._once(call, deadline), call.timeout)

    async def _once(self, call: core.Call, deadline: float) -> Json:
        left = max(0.1, deadline - time.monotonic())
        try:
            r = await self._pool().post(
                call.path,
                json=call.body(left) if callable(call.body) else call.body,
                headers=self._config.headers(False),
                timeout=httpx.Timeout(left + call.grace, connect=min(5.0, left)),
            )
        except httpx.TransportError as e:
            raise self._broken(e, call.path, call.idempotent, call.timeout + call.grace) from e
        self._known = True
        return core.answer(r.status_code, r.content, call.filename, r.headers.get("retry-after"), call.idempotent)

    def _stream(
        self,
        path: str,
        body: Json,
        *,
        filename: str | None = None,
        limit: float | None = None,
        link: aio.Link | None = None,
    ) -> Messages:
        """The messages of an answer, for `async with`. limit is how many seconds it may be silent."""
        return Messages(self, path, body, filename, limit, link)

    async def _send(
        self, path: str, messages: Iterator[bytes], *, filename: str | None = None, idempotent: bool = False
    ) -> Json:
        """Send messages and return the last of the answer."""
        frames = core.Frames(filename)
        try:
            r = await self._pool().post(path, content=aio.body(messages), headers=self._config.headers(True))
        except httpx.TransportError as e:
            raise self._broken(e, path, idempotent, 0) from e
        if r.status_code != 200:
            return core.answer(r.status_code, r.content, filename, r.headers.get("retry-after"), idempotent)
        docs = frames.feed(r.content)
        frames.finish()
        return docs[-1] if docs else {}

    def _broken(self, e: httpx.TransportError, path: str, idempotent: bool, limit: float) -> errors.SandseaError:
        """The exception for a failure below HTTP."""
        sent = not isinstance(e, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        if sent and isinstance(e, httpx.TimeoutException):
            kind = errors.RequestTimeout if idempotent else errors.OutcomeUnknown
            cure = "Try again" if idempotent else "Look whether it happened before a retry"
            return kind(f"{path.rsplit('/', 1)[-1]}: no answer in {limit:.0f} s. {cure}", {"unanswered": True})
        return core.unreachable(self._config.url, e, sent, idempotent)

    def __getstate__(self) -> dict[str, Any]:
        # The token stays behind: a handle that travels finds its own.
        return {"url": self._config.url}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(url=state["url"])  # type: ignore[misc]


class Messages:
    """An async iterator of the messages of an answer. The request is sent when the first is asked for.

    Not an async generator: a loop that shuts down closes all of those at once, also those that wait for each other.
    """

    def __init__(
        self, client: Client, path: str, body: Json, filename: str | None, limit: float | None, link: aio.Link | None
    ) -> None:
        self._client = client
        self._path = path
        self._body = body
        self._filename = filename
        self._limit = limit
        self._link = link
        self._frames = core.Frames(filename)
        self._ready: deque[Json] = deque()
        self._pool: httpx.AsyncClient | None = None
        self._response: httpx.Response | None = None
        self._chunks: AsyncIterator[bytes] | None = None
        self._over = False

    async def __aenter__(self) -> Messages:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __aiter__(self) -> AsyncIterator[Json]:
        return self

    async def __anext__(self) -> Json:
        while not self._ready:
            if self._over:
                raise StopAsyncIteration
            try:
                await self._more()
            except httpx.TransportError as e:
                await self.aclose()
                raise self._client._broken(e, self._path, True, self._limit or 0) from e
            except BaseException:
                await self.aclose()
                raise
        return self._ready.popleft()

    async def _more(self) -> None:
        """Read on; raises at an end that is none, when all before it was handed out."""
        chunks = self._chunks or await self._open()
        chunk = b"" if self._frames.ended else await anext(chunks, b"")
        if chunk:
            self._ready.extend(self._frames.feed(chunk))
        else:
            self._over = True
            await self.aclose()
            self._frames.finish()

    async def _open(self) -> AsyncIterator[bytes]:
        c = self._client
        pool = self._pool = c._pool()
        request = pool.build_request(
            "POST",
            self._path,
            content=core.envelope(self._body),
            headers=c._config.headers(True),
            timeout=httpx.Timeout(None, connect=5.0, read=None if self._limit is None else max(self._limit, 0.1)),
        )
        r = self._response = await pool.send(request, stream=True)
        c._known = True
        if self._link is not None:
            self._link.hold(r)
        if r.status_code != 200:
            core.answer(r.status_code, await r.aread(), self._filename, r.headers.get("retry-after"))
        self._chunks = r.aiter_raw()
        return self._chunks

    @property
    def hung_up(self) -> bool:
        """It was this side that closed the connection, with all of the client's."""
        return self._pool is not None and self._pool.is_closed

    async def aclose(self) -> None:
        """Give up the rest."""
        self._over = True
        r, self._response = self._response, None
        if r is not None:
            await r.aclose()


def _whoami() -> core.Op[Json]:
    doc = yield core.Call("/sandsea.v1.IAMService/WhoAmI", {}, idempotent=True)
    return doc
