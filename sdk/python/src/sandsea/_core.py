"""The client without its input and output: what to send, and what an answer means. Both fronts stand on it."""

from __future__ import annotations

import base64
import codecs
import dataclasses
import io
import json
import os
import pathlib
import random
import stat
import struct
import tarfile
import tempfile
import urllib.parse
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

from . import _models as m
from . import errors

DEFAULT_URL = "http://127.0.0.1:7070"
DEFAULT_TOKEN_FILE = "/var/lib/sandsea/admin.token"
CHUNK = 256 << 10
#: inline output kept of one stream by `run`
MAX_OUTPUT = 8 << 20
#: how long a broken link is taken up again
RECONNECT_SECONDS = 60.0

Json = dict[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Call:
    """One unary request."""

    path: str
    body: Json
    #: seconds for the answer
    timeout: float = 30.0
    #: sending it twice does no harm
    idempotent: bool = False
    #: file that an error is about
    filename: str | None = None


#: An operation: yields calls, is sent their answers, returns its value.
Op = Generator[Call, Json, T]


def sandbox_path(name: str) -> str:
    return "/sandsea.v1.SandboxService/" + name


def process_path(name: str) -> str:
    return "/sandsea.v1.ProcessService/" + name


def file_path(name: str) -> str:
    return "/sandsea.v1.FileService/" + name


def image_path(name: str) -> str:
    return "/sandsea.v1.ImageService/" + name


@dataclasses.dataclass(frozen=True)
class Config:
    """Where the server is and who asks."""

    url: str
    token: str = dataclasses.field(repr=False)

    @staticmethod
    def find(url: str | None, token: str | None, token_file: str | None) -> Config:
        """Fill what is None from SANDSEA_URL, SANDSEA_TOKEN, SANDSEA_TOKEN_FILE, then from the local default."""
        url = (url or os.environ.get("SANDSEA_URL") or DEFAULT_URL).rstrip("/")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise errors.InvalidRequest(f"server address {url!r}. Write it as http://HOST:PORT")
        if token is None and token_file is None:
            token = os.environ.get("SANDSEA_TOKEN") or None
        if token is None:
            named = token_file or os.environ.get("SANDSEA_TOKEN_FILE")
            token = _read_token(named or DEFAULT_TOKEN_FILE, bool(named))
        return Config(url, token)

    def headers(self, streaming: bool) -> dict[str, str]:
        return {
            "authorization": "Bearer " + self.token,
            "connect-protocol-version": "1",
            "content-type": "application/connect+json" if streaming else "application/json",
        }


def _read_token(file: str, named: bool) -> str:
    try:
        mode = os.stat(file).st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise errors.PreconditionFailed(
                f"{file}: others can read it ({stat.S_IMODE(mode):#o}). Run: chmod 600 {file}"
            )
        return pathlib.Path(file).read_text().strip()
    except FileNotFoundError:
        if named:
            raise
        return ""
    except PermissionError as e:
        raise errors.Unauthenticated(
            f"no token: SANDSEA_TOKEN unset, {file} unreadable for uid {os.getuid()}. Set SANDSEA_TOKEN_FILE"
        ) from e


def new_key() -> str:
    """An idempotency key that nobody else has."""
    return "py-" + uuid.uuid4().hex


def backoff(attempt: int) -> float:
    """Seconds to wait before another attempt, 0.1 to 2 s, scattered."""
    return float(min(2.0, 0.1 * 2.0**attempt) * (0.5 + random.random() / 2))


# --- Connect: answers and streams ------------------------------------------------------------------------------------


def answer(status: int, body: bytes, filename: str | None = None) -> Json:
    """The document of a unary answer, or its exception."""
    try:
        doc = json.loads(body) if body else {}
    except ValueError:
        doc = {}
    if status == 200:
        return dict(doc)
    if not isinstance(doc, dict) or "code" not in doc:
        kinds = {401: "unauthenticated", 403: "permission_denied", 404: "unimplemented", 429: "resource_exhausted"}
        code = kinds.get(status, "unavailable" if status in (502, 503, 504) else "internal")
        doc = {"code": code, "message": f"the server answered {status}"}
    raise errors.from_connect(doc, filename)


def unreachable(url: str, why: BaseException) -> errors.Unavailable:
    """The exception for a server that does not answer."""
    reason = str(why) or type(why).__name__
    return errors.Unavailable(f"cannot reach {url}: {reason}. Start it: sudo sandsea up", {"retryable": True})


def envelope(message: Json) -> bytes:
    """One message of a stream."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">BI", 0, len(data)) + data


class Frames:
    """Cuts a response body into messages; the end frame raises its error or sets `ended`."""

    def __init__(self, filename: str | None = None) -> None:
        self._buf = bytearray()
        self._filename = filename
        self.ended = False

    def feed(self, data: bytes) -> list[Json]:
        self._buf += data
        out: list[Json] = []
        while len(self._buf) >= 5:
            flags, size = struct.unpack_from(">BI", self._buf)
            if size > 64 << 20:
                raise errors.InfraError(f"the server sent a message of {size} bytes")
            if len(self._buf) < 5 + size:
                break
            doc = json.loads(bytes(self._buf[5 : 5 + size]))
            del self._buf[: 5 + size]
            if flags & 2:
                self.ended = True
                if doc.get("error"):
                    raise errors.from_connect(doc["error"], self._filename)
                break
            out.append(doc)
        return out

    def finish(self) -> None:
        """Say that the body is over."""
        if not self.ended:
            raise errors.Unavailable("the stream broke off. Attach again", {"retryable": True})


# --- Sandboxes -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ContainerRunArgs:
    """What a container sandbox shall be. Only what differs from the defaults needs to be said."""

    #: name or digest of an image; or compose one of base, workspace and toolkits
    container_image: str = ""
    base: str = ""
    workspace: str = ""
    toolkits: Sequence[str] = ()
    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0
    disk_limit_mb: int = 0
    pids_limit: int = 0
    #: seconds without use after which the sandbox ends; 0: never
    ttl_running_stop: float = 0
    #: seconds after which it ends in any case; 0: the server's default of a day
    ttl: float = 0
    #: package services that may be reached, as {"pypi": True}; whatever is not named is rejected
    network_rules: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    init_user: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    no_new_privs: bool = False
    #: features that the node must enforce
    require: Sequence[str] = ()
    job: str = ""
    rollout: str = ""
    attempt: int = 0
    #: idempotency key; empty makes one, so that a retry never makes a second sandbox
    key: str = ""

    def spec(self) -> m.SandboxSpec:
        return m.SandboxSpec(
            backend="BACKEND_CONTAINER",
            environment=m.Environment(
                image=self.container_image, base=self.base, workspace=self.workspace, toolkits=list(self.toolkits)
            ),
            limits=m.Limits(
                memory_bytes=int(self.memory_limit_mb) << 20,
                cpu_millis=round(self.cpu_cores_limit * 1000),
                disk_bytes=int(self.disk_limit_mb) << 20,
                pids=self.pids_limit,
            ),
            idle_ms=round(self.ttl_running_stop * 1000),
            ttl_ms=round(self.ttl * 1000),
            network=m.NetworkPolicy(services=dict(self.network_rules)),
            user=self.init_user,
            env=dict(self.env),
            workdir=self.workdir,
            labels=dict(self.labels),
            no_new_privs=self.no_new_privs,
            require=list(self.require),
            job=self.job,
            rollout=self.rollout,
            attempt=self.attempt,
        )


def create(args: ContainerRunArgs, timeout: float) -> Op[m.Sandbox]:
    body = m.CreateSandboxRequest(
        spec=args.spec(), key=args.key or new_key(), ready_timeout_ms=round(timeout * 1000)
    ).to_json()
    # The key makes a second sending harmless.
    doc = yield Call(sandbox_path("Create"), body, timeout + 10, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def create_batch(args: ContainerRunArgs, n: int, timeout: float) -> Json:
    return m.CreateBatchRequest(
        spec=args.spec(), count=n, key=args.key or new_key(), ready_timeout_ms=round(timeout * 1000)
    ).to_json()


def get(id: str) -> Op[m.Sandbox]:
    doc = yield Call(sandbox_path("Get"), {"id": id}, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def stop(id: str, grace: float) -> Op[m.Sandbox]:
    body = {"id": id, "grace_ms": round(grace * 1000)}
    doc = yield Call(sandbox_path("Stop"), body, 30 + grace, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def extend_ttl(id: str, seconds: float) -> Op[m.Sandbox]:
    doc = yield Call(sandbox_path("ExtendTTL"), {"id": id, "ttl_ms": round(seconds * 1000)}, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def list_sandboxes(labels: Mapping[str, str] | None, all: bool) -> Op[list[m.Sandbox]]:
    out: list[m.Sandbox] = []
    token = ""
    while True:
        body = m.ListSandboxesRequest(labels=dict(labels or {}), all=all, page_token=token).to_json()
        doc = yield Call(sandbox_path("List"), body, idempotent=True)
        page = m.ListSandboxesResponse.from_json(doc)
        out += page.sandboxes
        token = page.next_page_token
        if not token:
            return out


def images() -> Op[list[m.Image]]:
    doc = yield Call(image_path("List"), {}, idempotent=True)
    return m.ListImagesResponse.from_json(doc).images


# --- Commands --------------------------------------------------------------------------------------------------------


def command(
    argv: Sequence[str],
    *,
    timeout: float | None,
    user: str,
    cwd: str,
    env: Mapping[str, str] | None,
    replace_env: bool,
    merge_stderr: bool,
) -> m.Command:
    if isinstance(argv, str):
        raise errors.InvalidRequest("argv is a list of strings; run_shell takes a command line")
    return m.Command(
        argv=list(argv),
        env=dict(env or {}),
        env_mode="ENV_MODE_REPLACE" if replace_env else "",
        user=user,
        cwd=cwd,
        merge_stderr=merge_stderr,
        timeout_ms=max(1, round(timeout * 1000)) if timeout else 0,
    )


@dataclasses.dataclass(frozen=True)
class Output:
    """A piece of output. `gap` counts bytes that were written here and are not kept; then data is empty."""

    stream: str
    offset: int
    data: bytes
    text: str
    gap: int = 0


_STREAMS = {"STREAM_STDOUT": "stdout", "STREAM_STDERR": "stderr"}


class Kept:
    """The first and last bytes of a stream, within a bound."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self._half = max(1, limit // 2)
        self.cut = False

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room < len(data) else b""
        if len(self._tail) > 2 * self._half:
            self.cut = True
            del self._tail[: len(self._tail) - self._half]

    def value(self) -> bytes:
        if len(self._tail) > self._half:
            self.cut = True
            return bytes(self._head + self._tail[-self._half :])
        return bytes(self._head + self._tail)


class Follow:
    """The story of one command as its events come in, and where to take it up again after a broken link."""

    def __init__(self, id: str, request: m.StartRequest | None, number: int = 0, limit: int = MAX_OUTPUT) -> None:
        self.id = id
        self.number = number
        self.process: m.Process | None = None
        self.offsets = {"stdout": 0, "stderr": 0}
        self.kept = {"stdout": Kept(limit), "stderr": Kept(limit)}
        self._request = request
        self._decoders = {s: codecs.getincrementaldecoder("utf-8")("replace") for s in self.offsets}

    def request(self) -> tuple[str, Json]:
        """What to send now: the start, or an attach where the record was left."""
        if self.number == 0 and self._request is not None:
            return process_path("Start"), self._request.to_json()
        return process_path("Attach"), m.AttachRequest(
            id=self.id,
            number=self.number,
            stdout_offset=self.offsets["stdout"],
            stderr_offset=self.offsets["stderr"],
        ).to_json()

    def take(self, doc: Json) -> Output | None:
        """Take one message; returns the output in it, if any."""
        event = m.ProcessEvent.from_json(doc.get("event") or {})
        if event.started:
            self.number = event.started.number
        elif event.exited:
            self.number = event.exited.number
            self.process = event.exited
        elif event.data:
            stream = _STREAMS.get(event.data.stream, "stdout")
            data = event.data.data
            self.offsets[stream] = event.data.offset + len(data)
            self.kept[stream].add(data)
            return Output(stream, event.data.offset, data, self._decoders[stream].decode(data))
        elif event.gap:
            stream = _STREAMS.get(event.gap.stream, "stdout")
            self.offsets[stream] = event.gap.offset + event.gap.bytes
            self.kept[stream].cut = True
            return Output(stream, event.gap.offset, b"", "", event.gap.bytes)
        return None

    @property
    def can_resume(self) -> bool:
        """A broken link can be taken up: the command's number is known, or its key."""
        return self.number > 0 or bool(self._request and self._request.key)

    def value(self) -> tuple[bytes, bytes, bool]:
        """Standard output, standard error, and whether something is missing."""
        out, err = self.kept["stdout"].value(), self.kept["stderr"].value()
        return out, err, self.kept["stdout"].cut or self.kept["stderr"].cut


def send_input(id: str, number: int, offset: int, data: bytes) -> Op[int]:
    body = m.SendInputRequest(id=id, number=number, offset=offset, data=data).to_json()
    doc = yield Call(process_path("SendInput"), body, 24 * 3600.0, idempotent=True)
    return m.SendInputResponse.from_json(doc).next_offset


def close_input(id: str, number: int) -> Op[None]:
    yield Call(process_path("CloseInput"), {"id": id, "number": number}, idempotent=True)


def signal(id: str, number: int, sig: int, tree: bool) -> Op[None]:
    yield Call(process_path("Signal"), {"id": id, "number": number, "signal": int(sig), "tree": tree})


def processes(id: str) -> Op[list[m.Process]]:
    doc = yield Call(process_path("List"), {"id": id}, idempotent=True)
    return m.ListProcessesResponse.from_json(doc).processes


# --- Files -----------------------------------------------------------------------------------------------------------


def read_request(id: str, path: str, user: str, max_bytes: int, offset: int, length: int) -> Json:
    return m.ReadFileRequest(id=id, path=path, user=user, max_bytes=max_bytes, offset=offset, length=length).to_json()


def write_messages(id: str, path: str, user: str, mode: int, data: bytes | str | IO[bytes]) -> Iterator[bytes]:
    """The messages of a Write: the header, then the bytes."""
    header = m.WriteFileHeader(id=id, path=path, user=user, mode=mode)
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes):
        header.size = len(data)
        source: IO[bytes] = io.BytesIO(data)
    else:
        source = data
    yield envelope({"header": header.to_json()})
    yield from _data_messages(source)


def upload_messages(id: str, path: str, user: str, source: IO[bytes]) -> Iterator[bytes]:
    yield envelope({"header": m.UploadTarHeader(id=id, path=path, user=user).to_json()})
    yield from _data_messages(source)


def image_messages(source: IO[bytes]) -> Iterator[bytes]:
    """The messages of an image upload."""
    yield from _data_messages(source)


def _data_messages(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        yield envelope({"data": base64.b64encode(chunk).decode()})


def pack(local: str | os.PathLike[str]) -> IO[bytes]:
    """A local file or directory as an unnamed tar file; the names are relative to it."""
    out = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=out, mode="w") as tar:
        root = pathlib.Path(local)
        if root.is_dir():
            for entry in sorted(root.iterdir()):
                tar.add(entry, arcname=entry.name)
        else:
            tar.add(root, arcname=root.name)
    out.seek(0)
    return out


def unpack(source: IO[bytes], local: str | os.PathLike[str]) -> None:
    """Unpack what a sandbox sent below a local directory, which nothing can leave."""
    with tarfile.open(fileobj=source, mode="r:") as tar:
        tar.extractall(local, filter="data")


def stat_file(id: str, path: str, user: str, no_follow: bool) -> Op[m.FileInfo]:
    body = m.StatFileRequest(id=id, path=path, user=user, no_follow=no_follow).to_json()
    doc = yield Call(file_path("Stat"), body, idempotent=True, filename=path)
    return m.FileInfo.from_json(doc["info"])


def make_dir(id: str, path: str, user: str, mode: int, parents: bool) -> Op[None]:
    body = m.MakeDirRequest(id=id, path=path, user=user, mode=mode, parents=parents).to_json()
    yield Call(file_path("MakeDir"), body, filename=path)


def move(id: str, source: str, target: str, user: str) -> Op[None]:
    body = m.MoveFileRequest(id=id, from_=source, to=target, user=user).to_json()
    yield Call(file_path("Move"), body, filename=source)


def remove(id: str, path: str, user: str, recursive: bool) -> Op[None]:
    body = m.RemoveFileRequest(id=id, path=path, user=user, recursive=recursive).to_json()
    yield Call(file_path("Remove"), body, 600.0, filename=path)


# --- Images ----------------------------------------------------------------------------------------------------------


def import_debian(suite: str, include: Iterable[str], name: str) -> Json:
    return m.ImportImageRequest(debian=m.DebianSource(suite=suite, include=list(include)), name=name).to_json()


def import_rootfs(upload: str, name: str, config: m.ImageConfig | None) -> Json:
    return m.ImportImageRequest(
        archive=m.ArchiveSource(upload=upload, format="ARCHIVE_FORMAT_ROOTFS"), name=name, config=config
    ).to_json()


def compose(name: str, base: str, workspace: str, toolkits: Iterable[str]) -> Op[m.Image]:
    body = m.ComposeImageRequest(name=name, base=base, workspace=workspace, toolkits=list(toolkits)).to_json()
    doc = yield Call(image_path("Compose"), body, idempotent=True)
    return m.Image.from_json(doc["image"])


def delete_image(ref: str, force: bool) -> Op[int]:
    doc = yield Call(image_path("Delete"), {"ref": ref, "force": force}, 120.0)
    return m.DeleteImageResponse.from_json(doc).freed_bytes
