"""The client without its input and output: what to send, and what an answer means. Both fronts stand on it."""

from __future__ import annotations

import base64
import codecs
import dataclasses
import datetime
import io
import json
import os
import pathlib
import random
import stat
import struct
import urllib.parse
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, Literal, TypeVar

from . import _models as m
from . import _network as network
from . import errors

DEFAULT_URL = "http://127.0.0.1:7070"
DEFAULT_TOKEN_FILE = "/var/lib/sandsea/admin.token"
CHUNK = 256 << 10
#: inline output kept of one stream by `run`
MAX_OUTPUT = 8 << 20
#: how long a broken link is taken up again
RECONNECT_SECONDS = 60.0
#: how long after a command's own limit its end may take to arrive
GRACE_SECONDS = 30.0
#: how long after the time limit of a create its answer may take to arrive
CREATE_GRACE_SECONDS = 5.0
#: what a call waits that ends when something ends which has no limit
FOREVER_SECONDS = 30 * 86400.0
#: connection attempts to a server that is not there
CONNECT_ATTEMPTS = 6
#: files of one batch, and their bytes together
BATCH_FILES = 1000
BATCH_BYTES = 48 << 20

#: What happens to output beyond the limit: keep the first and last bytes, the last, the first, or the first and have
#: `Result.check()` raise OutputLimitExceeded. The command runs on in every case.
Overflow = Literal["head_tail", "tail", "head", "fail"]

Json = dict[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Call:
    """One unary request."""

    path: str
    #: what is sent, or what is sent when so many seconds are left
    body: Json | Callable[[float], Json]
    #: seconds for the answer
    timeout: float = 30.0
    #: seconds beyond timeout for the last answer to arrive; nothing is sent again in them
    grace: float = 0.0
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


def network_path(name: str) -> str:
    return "/sandsea.v1.NetworkService/" + name


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
        token = token.strip()
        if any(not "!" <= c <= "~" for c in token):
            # Said here and without it: below, the error for a header that cannot be sent shows the token.
            raise errors.Unauthenticated("the token is none: it has letters that no token has. Set SANDSEA_TOKEN_FILE")
        return Config(url, token)

    def headers(self, streaming: bool) -> dict[str, str]:
        headers = {
            "connect-protocol-version": "1",
            "content-type": "application/connect+json" if streaming else "application/json",
        }
        if self.token:  # else the server says what is missing; an empty one cannot be sent at all
            headers["authorization"] = "Bearer " + self.token
        return headers


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
    return float(min(2.0, 0.1 * 2.0 ** min(attempt, 5)) * (0.5 + random.random() / 2))


def pause(e: errors.SandseaError, attempt: int, trying: float, left: float, known: bool) -> float | None:
    """Seconds to wait before a call is sent again that failed with e; None when it must not be or cannot help.

    attempt counts from 0, trying is how long this has gone on, left what remains of the caller's time. A server that is
    known to have been there is waited for, any other is tried a few times.
    """
    if isinstance(e, errors.Exhausted):
        wait = e.retry_after  # waited for up to the caller's deadline
    elif isinstance(e, errors.Unavailable) and e.retryable:
        if trying > RECONNECT_SECONDS or (e.detail.get("refused") and not known and attempt + 1 >= CONNECT_ATTEMPTS):
            return None
        wait = e.retry_after or backoff(attempt)
    else:
        return None
    return wait if wait is not None and wait < left else None


# --- Connect: answers and streams ------------------------------------------------------------------------------------


def answer(
    status: int, body: bytes, filename: str | None = None, retry_after: str | None = None, idempotent: bool = True
) -> Json:
    """The document of a unary answer, or its exception. retry_after is the header of that name."""
    try:
        doc = json.loads(body)
    except ValueError:
        doc = None
    if status == 200:
        if not isinstance(doc, dict):
            raise errors.PreconditionFailed("who answers is no Sandsea server. Check SANDSEA_URL")
        return doc
    if not isinstance(doc, dict) or "code" not in doc:
        kinds = {401: "unauthenticated", 403: "permission_denied", 404: "unimplemented", 429: "resource_exhausted"}
        if status in (502, 503, 504):
            raise _gateway(status, idempotent)
        doc = {"code": kinds.get(status, "internal"), "message": f"the server answered {status}"}
    e = errors.from_connect(doc, filename)
    if isinstance(e, errors.Unavailable) and not e.detail:
        e.detail["retryable"] = True
    if retry_after and retry_after.isdigit() and e.retry_after is None:
        e.detail["retry_after_ms"] = int(retry_after) * 1000
    raise e


def _gateway(status: int, idempotent: bool) -> errors.SandseaError:
    """The exception for the answer of a proxy that got none. The server may have begun, and may be at it still."""
    if not idempotent:
        return errors.OutcomeUnknown(
            f"a proxy before the server answered {status}. It may have happened: look before a retry"
        )
    return broken_off(f"a proxy before the server answered {status}. Try again")


def unreachable(url: str, why: BaseException, sent: bool, idempotent: bool) -> errors.SandseaError:
    """The exception for a broken connection. A request that may have arrived and must not arrive twice is unknown."""
    reason = str(why) or type(why).__name__
    if not sent:
        return errors.Unavailable(
            f"cannot reach {url}: {reason}. Start it: sudo sandsea up", {"retryable": True, "refused": True}
        )
    if not idempotent:
        return errors.OutcomeUnknown(
            f"the connection to {url} broke: {reason}. It may have happened: look before a retry"
        )
    return broken_off(f"the connection to {url} broke: {reason}. Try again")


def envelope(message: Json) -> bytes:
    """One message of a stream."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return struct.pack(">BI", 0, len(data)) + data


class Frames:
    """Cuts a response body into messages."""

    def __init__(self, filename: str | None = None) -> None:
        self._buf = bytearray()
        self._filename = filename
        self._error: errors.SandseaError | None = None
        #: the end frame was read: nothing follows
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
            try:
                doc = json.loads(bytes(self._buf[5 : 5 + size]))
            except ValueError:
                doc = None
            if not isinstance(doc, dict):
                raise errors.DataLoss(
                    "the answer of the server cannot be read. Check that nothing on the way changes what it sends"
                )
            del self._buf[: 5 + size]
            if flags & 2:
                self.ended = True
                if doc.get("error"):
                    self._error = errors.from_connect(doc["error"], self._filename)
                break
            out.append(doc)
        return out

    def finish(self) -> None:
        """Say that the body is over: raises the server's error, or one for an end that is missing."""
        if self._error is not None:
            raise self._error
        if not self.ended:
            raise broken_off("the stream broke off. Try again")


def unanswered(e: BaseException) -> bool:
    """What was asked for may have happened, since nobody said that it did not."""
    if isinstance(e, errors.Unavailable):
        return not e.detail.get("refused")
    return isinstance(e, errors.SandseaError) and bool(e.detail.get("unanswered"))


def broken_off(message: str) -> errors.Unavailable:
    """The exception for an answer that ended too early: the request arrived, what became of it is not known."""
    return errors.Unavailable(message, {"retryable": True, "broken": True})


# --- Sandboxes -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ContainerRunArgs:
    """What a container sandbox shall be. Only what differs from the defaults needs to be said."""

    #: name or digest of an image; or compose one of base, workspace and toolkits
    container_image: str = ""
    base: str = ""
    workspace: str = ""
    toolkits: Sequence[str] = ()
    #: memory and swap in MiB; 0 of this and the next three: the server's default
    memory_limit_mb: int = 0
    cpu_cores_limit: float = 0
    #: the writable layer in MiB
    disk_limit_mb: int = 0
    pids_limit: int = 0
    #: seconds without use after which the sandbox ends; 0: never
    ttl_running_stop: float = 0
    #: seconds after which it ends in any case; 0: the server's default of a day
    ttl: float = 0
    #: what may leave it, as {"pypi": True, "example.org:443": True}; all else is rejected. See NetworkRules
    network_rules: network.NetworkRules = dataclasses.field(default_factory=dict)
    #: user of commands and file calls: a name, "uid" or "uid:gid"; empty: the image's
    init_user: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = ""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: set-user-id programs gain nothing inside
    no_new_privs: bool = False
    #: "idle": nothing of the image starts; "image": its entrypoint and command; or an argv that starts instead
    entrypoint: str | Sequence[str] = "idle"
    #: recorded output kept, of all commands together, in MiB; 0: the server's default
    output_limit_mb: int = 0
    #: features that the node must enforce
    require: Sequence[str] = ()
    job: str = ""
    rollout: str = ""
    attempt: int = 0
    #: idempotency key; empty makes one, so that a retry never makes a second sandbox
    key: str = ""
    #: package services show the world of that moment: "2024-06-01", a date or a datetime
    as_of: network.Moment | None = None
    #: packages and repositories that do not exist, as "pypi:flask", "npm:left-pad@1.3.0", "git:git.example/team"
    deny: Sequence[str] = ()
    #: stages of the task, with what holds in each; the first, or `phase`, is in force at the start
    phases: Mapping[str, network.PhaseRules] | None = None
    phase: str = ""

    def spec(self) -> m.SandboxSpec:
        """The same as the API has it."""
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
                output_bytes=int(self.output_limit_mb) << 20,
            ),
            idle_ms=round(self.ttl_running_stop * 1000),
            ttl_ms=round(self.ttl * 1000),
            network=network.policy(
                self.network_rules, as_of=self.as_of, deny=self.deny, phases=self.phases, phase=self.phase
            ),
            user=self.init_user,
            env=dict(self.env),
            workdir=self.workdir,
            labels=dict(self.labels),
            entrypoint=_entrypoint(self.entrypoint),
            no_new_privs=self.no_new_privs,
            require=list(self.require),
            job=self.job,
            rollout=self.rollout,
            attempt=self.attempt,
        )


def _entrypoint(value: str | Sequence[str]) -> m.Entrypoint | None:
    if not isinstance(value, str):
        return m.Entrypoint(mode="ENTRYPOINT_MODE_ARGV", argv=list(value))
    if value not in ("idle", "image"):
        raise errors.InvalidRequest(f'entrypoint {value!r}. Say "idle", "image" or a list of strings')
    return m.Entrypoint(mode="ENTRYPOINT_MODE_IMAGE") if value == "image" else None


def create(args: ContainerRunArgs, key: str, timeout: float) -> Op[m.Sandbox]:
    spec = args.spec()

    def body(left: float) -> Json:
        return m.CreateSandboxRequest(spec=spec, key=key, ready_timeout_ms=max(1, round(left * 1000))).to_json()

    # The key makes a second sending harmless.
    doc = yield Call(sandbox_path("Create"), body, timeout, CREATE_GRACE_SECONDS, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def create_batch(args: ContainerRunArgs, n: int, key: str, timeout: float) -> Json:
    return m.CreateBatchRequest(
        spec=args.spec(), count=n, key=key, ready_timeout_ms=max(1, round(timeout * 1000))
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


def capabilities(backend: str, runtime_class: str) -> Op[m.CapabilitiesResponse]:
    body = m.CapabilitiesRequest(backend="BACKEND_" + backend.upper(), class_=runtime_class).to_json()
    doc = yield Call(sandbox_path("Capabilities"), body, idempotent=True)
    return m.CapabilitiesResponse.from_json(doc)


def images() -> Op[list[m.Image]]:
    doc = yield Call(image_path("List"), {}, idempotent=True)
    return m.ListImagesResponse.from_json(doc).images


# --- Network ---------------------------------------------------------------------------------------------------------


def set_network(id: str, policy: m.NetworkPolicy) -> Op[m.Sandbox]:
    body = {"id": id, "policy": policy.to_json()}
    doc = yield Call(network_path("SetPolicy"), body, 60.0, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def set_phase(id: str, phase: str) -> Op[m.Sandbox]:
    doc = yield Call(network_path("SetPhase"), {"id": id, "phase": phase}, 60.0, idempotent=True)
    return m.Sandbox.from_json(doc["sandbox"])


def check_network(request: m.CheckNetworkRequest) -> Op[m.CheckNetworkResponse]:
    doc = yield Call(network_path("Check"), request.to_json(), idempotent=True)
    return m.CheckNetworkResponse.from_json(doc)


def endpoint(id: str, port: int, ttl: float) -> Op[m.EndpointResponse]:
    body = m.EndpointRequest(id=id, port=port, ttl_ms=milliseconds(ttl)).to_json()
    doc = yield Call(network_path("Endpoint"), body, idempotent=True)
    return m.EndpointResponse.from_json(doc)


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
    overflow: Overflow,
) -> m.Command:
    return m.Command(
        argv=list(argv),
        env=dict(env or {}),
        env_mode="ENV_MODE_REPLACE" if replace_env else "",
        user=user,
        cwd=cwd,
        merge_stderr=merge_stderr,
        timeout_ms=milliseconds(timeout),
        overflow=overflow_name(overflow),
    )


def words(argv: str | Sequence[str]) -> tuple[str, ...]:
    """A command as a list of strings: a plain string is a command line of bash."""
    return ("bash", "-c", argv) if isinstance(argv, str) else tuple(argv)


def milliseconds(timeout: float | None) -> int:
    """A time limit as the API has it; None and 0 are no limit, and one below 0 is for the API to refuse."""
    if not timeout:
        return 0
    return max(1, round(timeout * 1000)) if timeout > 0 else min(-1, round(timeout * 1000))


def overflow_name(overflow: Overflow) -> str:
    return "" if overflow == "head_tail" else "OVERFLOW_" + overflow.upper()


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
    """The bytes of a stream that are kept within a limit, by the rule of an Overflow."""

    def __init__(self, limit: int, overflow: Overflow = "head_tail") -> None:
        self._limit = limit
        self._most_head = {"head_tail": max(1, limit // 2), "tail": 0}.get(overflow, limit)
        self._most_tail = max(0, limit - self._most_head) if overflow != "head_tail" else self._most_head
        self._head = bytearray()
        self._tail = bytearray()
        #: bytes are missing from what is kept
        self.cut = False
        #: all bytes there were
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        room = self._most_head - len(self._head)
        self._head += data[:room]
        self._tail += data[max(0, room) :]
        if len(self._tail) > 2 * self._most_tail:
            self._drop()

    def _drop(self) -> None:
        if len(self._tail) > self._most_tail:
            self.cut = True
            del self._tail[: len(self._tail) - self._most_tail]

    def value(self) -> bytes:
        self._drop()
        return bytes(self._head + self._tail)


class Follow:
    """The story of one command as its events come in, and where to take it up again after a broken link."""

    def __init__(
        self,
        id: str,
        request: m.StartRequest | None,
        number: int = 0,
        limit: int = MAX_OUTPUT,
        *,
        overflow: Overflow = "head_tail",
        offsets: tuple[int, int] = (0, 0),
        lossless: bool = False,
        decode: str = "replace",
    ) -> None:
        self.id = id
        self.number = number
        self.process: m.Process | None = None
        self.offsets = dict(zip(("stdout", "stderr"), offsets, strict=True))
        self.kept = {s: Kept(limit, overflow) for s in self.offsets}
        #: the link broke after the command had begun
        self.broke = False
        self._limit = limit
        self._overflow = overflow
        self._lossless = lossless
        self._request = request
        # Strict is for whole results: a reader of pieces goes on.
        decode = "replace" if decode == "strict" else decode
        self._decoders = {s: codecs.getincrementaldecoder("utf-8")(decode) for s in self.offsets}
        for stream, offset in self.offsets.items():
            self.kept[stream].cut = offset > 0

    def request(self) -> tuple[str, Json]:
        """What to send now: the start, or an attach where the record was left."""
        if self.number == 0 and self._request is not None:
            return process_path("Start"), self._request.to_json()
        return process_path("Attach"), m.AttachRequest(
            id=self.id,
            number=self.number,
            stdout_offset=self.offsets["stdout"],
            stderr_offset=self.offsets["stderr"],
            lossless=self._lossless,
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

    def rest(self) -> Iterator[Output]:
        """What the decoders still hold at the end: half characters."""
        for stream, decoder in self._decoders.items():
            if text := decoder.decode(b"", True):
                yield Output(stream, self.offsets[stream], b"", text)

    @property
    def attached(self) -> bool:
        """The record of a command that was started elsewhere."""
        return self._request is None

    @property
    def leashed(self) -> bool:
        """The command is killed when its caller goes away."""
        return self._request is not None and not self._request.detached and not self._request.key

    @property
    def can_resume(self) -> bool:
        """A broken link can be taken up: the command's number is known, or its key."""
        return self.number > 0 or bool(self._request and self._request.key)

    def check(self) -> None:
        """Raise when the end is the platform's doing: a command that was killed because the link broke says nothing."""
        r = self.process.result if self.process else None
        if r and self.broke and self.leashed and r.signal == 9 and not (r.timed_out or r.oom):
            raise errors.OutcomeUnknown(
                f"process {self.number} of {self.id[:8]}: the link to the server broke and the command was killed with "
                "it. Run it again; with a key it outlives its caller"
            )

    def value(self) -> tuple[bytes, bytes, bool]:
        """Standard output, standard error, and whether something is missing."""
        out, err = self.kept["stdout"].value(), self.kept["stderr"].value()
        return out, err, self.kept["stdout"].cut or self.kept["stderr"].cut

    @property
    def exceeded(self) -> bool:
        """overflow is "fail" and a stream grew beyond the limit."""
        return self._overflow == "fail" and any(k.total > self._limit for k in self.kept.values())


def alive_after(id: str, result: m.Result | None) -> Op[None]:
    """Raise what ended the sandbox when that killed the command, too: such an end says nothing about the command."""
    if result and result.signal == 9 and not (result.timed_out or result.oom):
        try:
            yield Call(file_path("Stat"), {"id": id, "path": "/"}, 10.0, idempotent=True)
        except (errors.SandboxEnded, errors.Lost):
            raise
        except errors.SandseaError:
            # Whatever keeps it from answering is not the end of it.
            return


def send_input(id: str, number: int, offset: int, data: bytes) -> Op[int]:
    body = m.SendInputRequest(id=id, number=number, offset=offset, data=data).to_json()
    doc = yield Call(process_path("SendInput"), body, 24 * 3600.0, idempotent=True)
    return m.SendInputResponse.from_json(doc).next_offset


def close_input(id: str, number: int) -> Op[None]:
    yield Call(process_path("CloseInput"), {"id": id, "number": number}, idempotent=True)


def signal(id: str, number: int, sig: int, tree: bool, timeout: float = 30.0) -> Op[None]:
    body = {"id": id, "number": number, "signal": int(sig), "tree": tree}
    # To kill twice is to kill.
    yield Call(process_path("Signal"), body, timeout, idempotent=int(sig) == 9)


def resize(id: str, number: int, cols: int, rows: int) -> Op[None]:
    body = m.ResizeTTYRequest(id=id, number=number, size=m.TerminalSize(columns=cols, rows=rows)).to_json()
    yield Call(process_path("ResizeTTY"), body, idempotent=True)


def open_shell(request: m.OpenShellRequest) -> Op[m.Shell]:
    # The key makes a second sending harmless.
    doc = yield Call(process_path("OpenShell"), request.to_json(), idempotent=True)
    return m.OpenShellResponse.from_json(doc).shell or m.Shell()


def run_in_shell(request: m.RunInShellRequest, timeout: float | None) -> Op[m.RunInShellResponse]:
    limit = timeout + GRACE_SECONDS if timeout else FOREVER_SECONDS
    doc = yield Call(process_path("RunInShell"), request.to_json(), limit, idempotent=bool(request.key))
    return m.RunInShellResponse.from_json(doc)


def close_shell(id: str, shell: str) -> Op[None]:
    yield Call(process_path("CloseShell"), {"id": id, "shell": shell}, idempotent=True)


def processes(id: str) -> Op[list[m.Process]]:
    doc = yield Call(process_path("List"), {"id": id}, idempotent=True)
    return m.ListProcessesResponse.from_json(doc).processes


# --- Files -----------------------------------------------------------------------------------------------------------


def read_request(id: str, path: str, user: str, max_bytes: int, offset: int, length: int) -> Json:
    return m.ReadFileRequest(id=id, path=path, user=user, max_bytes=max_bytes, offset=offset, length=length).to_json()


def write_messages(
    id: str, path: str, user: str, mode: int, owner: str, data: bytes | str | IO[bytes]
) -> Iterator[bytes]:
    """The messages of a Write: the header, then the bytes."""
    header = m.WriteFileHeader(id=id, path=path, user=user, mode=mode, owner=owner)
    if isinstance(data, str):
        data = data.encode()
    if isinstance(data, bytes):
        header.size = len(data)
        source: IO[bytes] = io.BytesIO(data)
    else:
        source = data
    yield envelope({"header": header.to_json()})
    yield from _data_messages(source)


def upload_messages(id: str, path: str, user: str, owner: str, source: IO[bytes]) -> Iterator[bytes]:
    yield envelope({"header": m.UploadTarHeader(id=id, path=path, user=user, owner=owner).to_json()})
    yield from _data_messages(source)


def image_messages(source: IO[bytes]) -> Iterator[bytes]:
    """The messages of an image upload."""
    yield from _data_messages(source)


def _data_messages(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK):
        yield envelope({"data": base64.b64encode(chunk).decode()})


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


def change_file(
    id: str,
    path: str,
    user: str,
    mode: int | None,
    owner: str,
    modified_at: datetime.datetime | None,
    no_follow: bool,
) -> Op[m.FileInfo]:
    body = m.ChangeFileRequest(
        id=id, path=path, user=user, mode=mode, owner=owner, modified_at=modified_at, no_follow=no_follow
    ).to_json()
    doc = yield Call(file_path("Change"), body, idempotent=True, filename=path)
    return m.ChangeFileResponse.from_json(doc).info or m.FileInfo()


def make_link(id: str, path: str, target: str, user: str) -> Op[m.FileInfo]:
    body = m.MakeLinkRequest(id=id, path=path, target=target, user=user).to_json()
    doc = yield Call(file_path("MakeLink"), body, filename=path)
    return m.MakeLinkResponse.from_json(doc).info or m.FileInfo()


def read_batches(id: str, paths: Sequence[str], user: str, max_bytes: int) -> Op[list[bytes | errors.SandseaError]]:
    out: list[bytes | errors.SandseaError] = []
    for i in range(0, len(paths), BATCH_FILES):
        asked = list(paths[i : i + BATCH_FILES])
        body = m.ReadBatchRequest(id=id, paths=asked, user=user, max_bytes=max_bytes).to_json()
        doc = yield Call(file_path("ReadBatch"), body, 300.0, idempotent=True)
        files = m.ReadBatchResponse.from_json(doc).files
        out += [item_error(f.error, f.message, f.path) or f.data for f in files]
    return out


def write_batches(
    id: str, files: Sequence[tuple[str, bytes | str]], user: str, mode: int
) -> Op[list[m.FileInfo | errors.SandseaError]]:
    out: list[m.FileInfo | errors.SandseaError] = []
    batch: list[m.FileToWrite] = []
    size = 0
    for n, (path, data) in enumerate(files):
        data = data.encode() if isinstance(data, str) else data
        batch.append(m.FileToWrite(path=path, data=data, mode=mode))
        size += len(data)
        last = n + 1 == len(files)
        if last or len(batch) == BATCH_FILES or size + len(files[n + 1][1]) > BATCH_BYTES:
            body = m.WriteBatchRequest(id=id, files=batch, user=user).to_json()
            doc = yield Call(file_path("WriteBatch"), body, 300.0, idempotent=True)
            written = m.WriteBatchResponse.from_json(doc).files
            out += [item_error(f.error, f.message, f.path) or f.info or m.FileInfo() for f in written]
            batch, size = [], 0
    return out


def item_error(error: m.ErrorDetail | None, message: str, path: str | None = None) -> errors.SandseaError | None:
    """The exception of one item of a batch, if it has one."""
    if error is None:
        return None
    return errors.from_detail(message, error.to_json(), filename=path)


@dataclasses.dataclass(frozen=True)
class FileEvent:
    """Something changed below a watched path.

    `change` is created, modified, attributes, removed, moved (from `source` to `path`), or gap: changes were lost, list
    again. `type` is regular, directory, symlink or other.
    """

    change: str
    path: str
    source: str = ""
    type: str = ""

    @staticmethod
    def of(r: m.WatchFilesResponse) -> FileEvent:
        """One of the API's."""
        change = r.change.removeprefix("FILE_CHANGE_").lower()
        return FileEvent(change, r.path, r.from_, r.type.removeprefix("FILE_TYPE_").lower())


# --- Images ----------------------------------------------------------------------------------------------------------


def import_debian(suite: str, include: Iterable[str], name: str) -> Json:
    return m.ImportImageRequest(debian=m.DebianSource(suite=suite, include=list(include)), name=name).to_json()


def import_archive(upload: str, format: str, reference: str, name: str, config: m.ImageConfig | None) -> Json:
    source = m.ArchiveSource(upload=upload, format="ARCHIVE_FORMAT_" + format.upper(), reference=reference)
    return m.ImportImageRequest(archive=source, name=name, config=config).to_json()


def import_registry(source: m.RegistrySource, name: str, config: m.ImageConfig | None) -> Json:
    return m.ImportImageRequest(registry=source, name=name, config=config).to_json()


def compose(name: str, base: str, workspace: str, toolkits: Iterable[str]) -> Op[m.Image]:
    body = m.ComposeImageRequest(name=name, base=base, workspace=workspace, toolkits=list(toolkits)).to_json()
    doc = yield Call(image_path("Compose"), body, idempotent=True)
    return m.Image.from_json(doc["image"])


def delete_image(ref: str, force: bool) -> Op[int]:
    doc = yield Call(image_path("Delete"), {"ref": ref, "force": force}, 120.0)
    return m.DeleteImageResponse.from_json(doc).freed_bytes
