"""Files of a sandbox."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from typing import IO, TYPE_CHECKING, overload

from .. import _aio as aio
from .. import _core as core
from .. import _models as m
from .. import _tree as tree
from .. import errors
from .._core import FileEvent

if TYPE_CHECKING:
    from .client import Client

# Methods called list hide the builtin from the annotations behind them.
_Strings = list[str]
_Read = list[bytes | errors.SandseaError]
_Written = list[m.FileInfo | errors.SandseaError]

#: how long a transfer that may be repeated is tried
_TRANSFER_SECONDS = 600.0


class Files:
    """The files of a sandbox, with the rights of a user inside (empty: the sandbox's).

    A path is absolute, or relative to the sandbox's working directory.
    """

    def __init__(self, client: Client, id: str) -> None:
        self._c = client
        self._id = id

    async def read(self, path: str, *, user: str = "", max_bytes: int = 0, offset: int = 0, length: int = 0) -> bytes:
        """The bytes of a file; one larger than max_bytes is refused before any is sent."""
        body = core.read_request(self._id, path, user, max_bytes, offset, length)

        async def once() -> bytes:
            out = bytearray()
            async with self._c._stream(core.file_path("Read"), body, filename=path) as docs:
                async for doc in docs:
                    out += m.ReadFileResponse.from_json(doc).data
            return bytes(out)

        return await self._c._retry(once, _TRANSFER_SECONDS)

    async def read_text(self, path: str, *, user: str = "", errors: str = "strict") -> str:
        """The text of a file in UTF-8; errors is what `bytes.decode` does with what is none."""
        return (await self.read(path, user=user)).decode(errors=errors)

    async def read_many(self, paths: Iterable[str], *, user: str = "", max_bytes: int = 0) -> _Read:
        """The bytes of small files (1 MiB each, unless max_bytes says otherwise), in order.

        A file that cannot be read is its exception, in its place. Paths are absolute.
        """
        return await self._c._drive(core.read_batches(self._id, list(paths), user, max_bytes))

    async def write(
        self, path: str, data: bytes | str | IO[bytes], *, user: str = "", mode: int = 0, owner: str = ""
    ) -> m.FileInfo:
        """Replace a file as a whole; missing parents are made. Readers see the old or the new one."""

        # What is at hand can be sent again: it is the same file then.
        at_hand = isinstance(data, (bytes, str))

        async def once() -> m.FileInfo:
            messages = core.write_messages(self._id, path, user, mode, owner, data)
            doc = await self._c._send(core.file_path("Write"), messages, filename=path, idempotent=at_hand)
            return m.WriteFileResponse.from_json(doc).info or m.FileInfo()

        return await self._c._retry(once, _TRANSFER_SECONDS if at_hand else 0)

    @overload
    async def write_many(self, files: Mapping[str, bytes | str], *, user: str = "", mode: int = 0) -> _Written: ...

    @overload
    async def write_many(
        self, files: Iterable[tuple[str, bytes | str]], *, user: str = "", mode: int = 0
    ) -> _Written: ...

    async def write_many(
        self, files: Mapping[str, bytes | str] | Iterable[tuple[str, bytes | str]], *, user: str = "", mode: int = 0
    ) -> _Written:
        """Write small files, in order; one that fails is its exception, in its place, and does not stop the others.

        Paths are absolute; missing parents are made.
        """
        pairs = [*files.items()] if isinstance(files, Mapping) else [*files]
        return await self._c._drive(core.write_batches(self._id, pairs, user, mode))

    async def stat(self, path: str, *, user: str = "", no_follow: bool = False) -> m.FileInfo:
        """What a file is. With no_follow a symbolic link itself, not what it leads to."""
        return await self._c._drive(core.stat_file(self._id, path, user, no_follow))

    async def exists(self, path: str, *, user: str = "") -> bool:
        """Whether there is something at path; a symbolic link that leads nowhere is nothing."""
        try:
            await self.stat(path, user=user)
        except (errors.MissingFile, errors.NotADirectory):
            return False
        return True

    async def list(self, path: str, *, user: str = "") -> list[m.FileInfo]:
        """The entries of a directory."""
        body = m.ListFilesRequest(id=self._id, path=path, user=user).to_json()

        async def once() -> list[m.FileInfo]:
            out: list[m.FileInfo] = []
            async with self._c._stream(core.file_path("List"), body, filename=path) as docs:
                async for doc in docs:
                    out += m.ListFilesResponse.from_json(doc).files
            return out

        return await self._c._retry(once, _TRANSFER_SECONDS)

    async def make_dir(self, path: str, *, user: str = "", mode: int = 0, parents: bool = True) -> None:
        """Make a directory; mode 0 is 0o755.

        With parents missing ones are made, and one that is there already is no error.
        """
        await self._c._drive(core.make_dir(self._id, path, user, mode, parents))

    async def move(self, source: str, target: str, *, user: str = "") -> None:
        """Rename a file or a directory to the path target, over a file that is there."""
        await self._c._drive(core.move(self._id, source, target, user))

    async def remove(self, path: str, *, user: str = "", recursive: bool = False) -> None:
        """Remove a file or an empty directory; recursive a whole tree, and one that is not there is no error then."""
        await self._c._drive(core.remove(self._id, path, user, recursive))

    async def change(
        self,
        path: str,
        *,
        mode: int | None = None,
        owner: str = "",
        modified_at: datetime.datetime | float | None = None,
        no_follow: bool = False,
        user: str = "",
    ) -> m.FileInfo:
        """Set permission bits, owner (name, uid or uid:gid) and time (a datetime, or seconds since 1970)."""
        if isinstance(modified_at, (int, float)):
            modified_at = datetime.datetime.fromtimestamp(modified_at, datetime.timezone.utc)
        return await self._c._drive(core.change_file(self._id, path, user, mode, owner, modified_at, no_follow))

    async def symlink(self, path: str, target: str, *, user: str = "") -> m.FileInfo:
        """Make path a symbolic link to target, which need not exist."""
        return await self._c._drive(core.make_link(self._id, path, target, user))

    def watch(self, path: str, *, recursive: bool = False, user: str = "") -> Watch:
        """What changes in a directory or file that exists, as FileEvents; in `async with` from its begin on."""
        request = m.WatchFilesRequest(id=self._id, path=path, user=user, recursive=recursive)
        return Watch(self._c, request)

    async def upload(self, local: str | os.PathLike[str], path: str, *, user: str = "", owner: str = "") -> _Strings:
        """Copy a local file, or the content of a local directory, below the directory path, with modes and links.

        Everything belongs to owner (name, uid or uid:gid), or else to the user. Returns what was left out: pipes,
        sockets and devices.
        """
        packed, left_out = await aio.to_thread(tree.pack, local)
        with packed as tar:

            async def once() -> None:
                tar.seek(0)
                await self._upload(tar, path, user, owner, idempotent=True)

            await self._c._retry(once, _TRANSFER_SECONDS)
        return left_out

    async def upload_tar(self, tar: IO[bytes], path: str, *, user: str = "", owner: str = "") -> None:
        """Unpack a tar stream below path."""
        await self._upload(tar, path, user, owner, idempotent=False)

    async def _upload(self, tar: IO[bytes], path: str, user: str, owner: str, idempotent: bool) -> None:
        messages = core.upload_messages(self._id, path, user, owner, tar)
        await self._c._send(core.file_path("UploadTar"), messages, filename=path, idempotent=idempotent)

    async def download(self, path: str, local: str | os.PathLike[str], *, user: str = "") -> _Strings:
        """Copy a file, or the content of a directory, below the local directory; returns what was left out.

        Nothing is written outside it, whatever the sandbox says.
        """
        with tempfile.TemporaryFile() as tar:

            async def once() -> _Strings:
                tar.seek(0)
                tar.truncate()
                return await self.download_tar(path, tar, user=user)

            skipped = await self._c._retry(once, _TRANSFER_SECONDS)
            tar.seek(0)
            await aio.to_thread(tree.unpack, tar, local)
        return skipped

    async def download_tar(self, path: str, out: IO[bytes], *, user: str = "") -> _Strings:
        """Write a file or tree as a tar stream; returns what was left out."""
        skipped: _Strings = []
        body = m.DownloadTarRequest(id=self._id, path=path, user=user).to_json()
        async with self._c._stream(core.file_path("DownloadTar"), body, filename=path) as docs:
            async for doc in docs:
                r = m.DownloadTarResponse.from_json(doc)
                out.write(r.data)
                skipped += r.skipped
        return skipped


class Watch:
    """An async iterator of what changes. After a broken link it goes on with a `gap`: list again then."""

    def __init__(self, client: Client, request: m.WatchFilesRequest) -> None:
        self._client = client
        self._request = request
        self._home = aio.Home()
        self._link = aio.Link()
        self._events = self._run()
        self._pull = aio.Puller(self._events, self._link)
        self._ready = False

    async def __aenter__(self) -> Watch:
        await self.begin()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def begin(self) -> None:
        """Return when the watch is in force."""
        if not self._ready:
            await self._next(None)

    def __aiter__(self) -> AsyncIterator[FileEvent]:
        return self

    async def __anext__(self) -> FileEvent:
        return await self.next()

    async def next(self, timeout: float | None = None) -> FileEvent:
        """The next change. Raises RequestTimeout, after which it may be asked again."""
        await self.begin()
        return await self._next(timeout)

    async def _next(self, timeout: float | None) -> FileEvent:
        self._home.check("this watch", "Make another")
        try:
            event = await self._pull.next(timeout)
        except TimeoutError as e:
            if isinstance(e, errors.SandseaError):
                raise
            raise errors.RequestTimeout(f"watch {self._request.path}: no change in {timeout} s") from None
        if event is None:
            raise StopAsyncIteration
        return event

    async def close(self) -> None:
        """Stop watching."""
        await self._pull.close()
        await self._events.aclose()

    async def _run(self) -> AsyncGenerator[FileEvent, None]:
        """The changes; the first says that the watch is in force."""
        broken: float | None = None
        attempt = 0
        while not self._link.over:
            stream = self._client._stream(
                core.file_path("Watch"), self._request.to_json(), filename=self._request.path, link=self._link
            )
            try:
                async for doc in stream:
                    event = FileEvent.of(m.WatchFilesResponse.from_json(doc))
                    if event.change == "ready" and self._ready:
                        event = FileEvent("gap", self._request.path)
                    self._ready = True
                    yield event
                    broken, attempt = None, 0
                raise core.broken_off(f"watch {self._request.path}: the stream ended. Try again")
            except errors.SandseaError as e:
                now = time.monotonic()
                broken = now if broken is None else broken
                wait = self._client._pause(e, attempt, now - broken, core.RECONNECT_SECONDS - (now - broken))
                if wait is None:
                    raise
                attempt += 1
                await aio.sleep(wait)
            finally:
                await stream.aclose()
