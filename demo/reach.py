"""What an agent tries by network, run inside the sandbox. Exits with 0 only if something answered as it wished.

reach.py get URL            fetch it
reach.py connect HOST PORT  open a connection
reach.py resolve NAME       ask the resolver
reach.py query HOST NAME    ask another resolver
"""

from __future__ import annotations

import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable

TIMEOUT = 20.0


def get(url: str) -> str:
    try:
        # Proxies of the environment are not what is tried.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=TIMEOUT) as r:
            return f"{len(r.read())} bytes"
    except urllib.error.HTTPError as e:
        raise OSError(f"{e.code} {e.read(500).decode(errors='replace').strip()}") from e


def connect(host: str, port: str) -> str:
    with socket.create_connection((host, int(port)), TIMEOUT):
        return "connected"


def resolve(name: str) -> str:
    return str(socket.getaddrinfo(name, 443, proto=socket.IPPROTO_TCP)[0][4][0])


def query(host: str, name: str) -> str:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    question = b"\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\x00\x00\x01\x00\x01"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(TIMEOUT)
        s.connect((host, 53))
        s.send(question)
        return f"{len(s.recv(512))} bytes"


def main() -> int:
    ways: dict[str, Callable[..., str]] = {"get": get, "connect": connect, "resolve": resolve, "query": query}
    try:
        print(ways[sys.argv[1]](*sys.argv[2:]))
    except OSError as e:
        print(f"refused: {e}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
