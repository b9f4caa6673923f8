"""A server that answers as a test lined it up: what a real one does only when something breaks."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]


class Reply:
    """A unary answer; with a gate not before that is set."""

    def __init__(
        self,
        doc: Json,
        status: int = 200,
        headers: dict[str, str] | None = None,
        gate: threading.Event | None = None,
    ) -> None:
        self.body, self.status, self.headers, self.gate = json.dumps(doc).encode(), status, headers or {}, gate


class Stream:
    """Messages, then the end: "whole"; "broken", without an end; "silent", nothing more until the test is over; or
    "killed", likewise until a SIGKILL comes."""

    def __init__(self, *docs: Json, end: str = "whole") -> None:
        self.docs, self.end = docs, end


class Drop:
    """The request is read and the connection closed."""


Answer = Reply | Stream | Drop


def error(code: str, kind: str, status: int = 400, **detail: Any) -> Reply:
    """An error of the server."""
    details = [{"type": "sandsea.v1.ErrorDetail", "debug": {"kind": kind, **detail}}]
    return Reply({"code": code, "message": f"{kind} as lined up", "details": details}, status)


def started(number: int) -> Json:
    return {"event": {"started": {"number": str(number)}}}


def output(offset: int, data: bytes, stream: str = "STDOUT") -> Json:
    event = {"stream": "STREAM_" + stream, "offset": str(offset), "data": base64.b64encode(data).decode()}
    return {"event": {"data": event}}


def gap(offset: int, size: int) -> Json:
    return {"event": {"gap": {"stream": "STREAM_STDOUT", "offset": str(offset), "bytes": str(size)}}}


def exited(number: int, code: int = 0, **result: Any) -> Json:
    return {"event": {"exited": {"number": str(number), "result": {"exitCode": code, **result}}}}


class Fake:
    """Answers each call with the next one lined up for it; the last is repeated."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.over = threading.Event()
        self.killed = threading.Event()
        self._lock = threading.Lock()
        self._answers: dict[str, deque[Answer]] = defaultdict(deque)  # guarded by _lock
        self._calls: list[tuple[str, Json]] = []  # guarded by _lock

    def line_up(self, call: str, *answers: Answer) -> None:
        with self._lock:
            self._answers[call].extend(answers)

    def calls(self, call: str) -> list[Json]:
        """The requests that came for a call."""
        with self._lock:
            return [body for name, body in self._calls if name == call]

    def take(self, call: str, body: Json) -> Answer:
        with self._lock:
            self._calls.append((call, body))
            if call == "Signal" and body.get("signal") == 9:
                self.killed.set()
            answers = self._answers[call]
            if not answers:
                return Reply({"code": "unimplemented", "message": "nothing lined up"}, 404)
            return answers[0] if len(answers) == 1 else answers.popleft()


def _handler(fake: Fake) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            answer = fake.take(self.path.rsplit("/", 1)[-1], self._request())
            if isinstance(answer, Reply):
                if answer.gate is not None:
                    answer.gate.wait(30)
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)
                return
            self.close_connection = True
            if isinstance(answer, Drop):
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for doc in answer.docs:
                self._chunk(0, doc)
            if answer.end == "whole":
                self._chunk(2, {})
                self.wfile.write(b"0\r\n\r\n")
            elif answer.end == "silent":
                fake.over.wait(30)
            elif answer.end == "killed":
                if fake.killed.wait(30):
                    self._chunk(0, exited(4, 137, signal=9, signalName="SIGKILL"))
                    self._chunk(2, {})
                    self.wfile.write(b"0\r\n\r\n")

        def _request(self) -> Json:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if "connect+json" in self.headers.get("Content-Type", ""):
                body = body[5 : 5 + struct.unpack_from(">I", body, 1)[0]]
            return dict(json.loads(body))

        def _chunk(self, flags: int, doc: Json) -> None:
            data = json.dumps(doc).encode()
            frame = struct.pack(">BI", flags, len(data)) + data
            with contextlib.suppress(OSError):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(frame), frame))
                self.wfile.flush()

    return Handler


@contextlib.contextmanager
def serving() -> Iterator[Fake]:
    """A Fake that listens."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    fake = Fake(f"http://127.0.0.1:{server.server_address[1]}")
    server.RequestHandlerClass = _handler(fake)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield fake
    finally:
        fake.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
