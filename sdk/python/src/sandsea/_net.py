"""How connections are made, for both fronts."""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
import urllib.request
from typing import Any

import httpx

#: No limit on reading: a command may be silent for hours. Dead peers are found by TCP keep-alive.
STREAM_TIMEOUT = httpx.Timeout(None, connect=5.0)


def transport_options(url: str) -> dict[str, Any] | None:
    """Arguments of an httpx transport for direct connections to url; None when a proxy of the environment is between.

    A server on this machine is always spoken to directly.
    """
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if not _here(host) and not urllib.request.proxy_bypass(host):
        proxies = urllib.request.getproxies()
        if parts.scheme in proxies or "all" in proxies:
            return None
    return {
        # A context for TLS takes 20 ms to make.
        "verify": parts.scheme == "https",
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
        "socket_options": list(_keep_alive()),
    }


def _here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _keep_alive() -> list[tuple[int, int, int]]:
    """A peer that is gone is noticed in a minute."""
    out = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            out.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return out
