"""The adaptors against a real server, with a Debian image that has what the frameworks' own tests call."""

from __future__ import annotations

import pytest

from sandsea import sync


@pytest.fixture(scope="session")
def debian(server: tuple[str, str]) -> str:
    """The name of an image of Debian with python3, adduser and procps."""
    with sync.Client(server[0], token_file=server[1]) as c:
        return c.import_debian("bookworm", ["python3", "adduser", "procps"], "debian").name


@pytest.fixture
def image(debian: str, here: tuple[str, str]) -> str:
    """The same, on the server that this process's environment names."""
    return debian
