"""The pytest plugin of sandsea: a fresh sandbox for each test, and its log with each failure.

    def test_it(sandsea_sandbox):
        sandsea_sandbox.run("id -u").check()

The image is the setting `sandsea_image`; override the fixture `sandsea_args` to say more. Where the server is comes
from SANDSEA_URL and its like; override `sandsea_client` to say it otherwise. This module imports nothing of sandsea
until a test asks for it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import sandsea.sync

#: commands that are shown, and characters of each one's output
_SHOWN = 20
_SHOWN_TEXT = 4000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("sandsea_image", "image of the sandboxes that the fixture sandsea_sandbox makes", default="")


@pytest.fixture(scope="session")
def sandsea_client() -> Iterator[sandsea.sync.Client]:
    """The connection to the server, for the whole run."""
    import sandsea.sync

    with sandsea.sync.Client() as client:
        yield client


@pytest.fixture
def sandsea_args(pytestconfig: pytest.Config) -> sandsea.ContainerRunArgs:
    """What sandsea_sandbox makes."""
    import sandsea

    image = pytestconfig.getini("sandsea_image")
    if not image:
        pytest.fail("which image? Set sandsea_image in pytest's settings, or override sandsea_args", pytrace=False)
    return sandsea.ContainerRunArgs(container_image=image, ttl=3600)


@pytest.fixture
def sandsea_sandbox(
    sandsea_client: sandsea.sync.Client, sandsea_args: sandsea.ContainerRunArgs
) -> Iterator[sandsea.sync.Sandbox]:
    """A fresh sandbox, stopped after the test."""
    with sandsea_client.run_container(sandsea_args) as sandbox:
        yield sandbox


# The old style of a wrapper, which pytest 7 knows too.
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    sandbox = getattr(item, "funcargs", {}).get("sandsea_sandbox")
    if report.when == "call" and report.failed and sandbox is not None:
        report.sections.append((f"sandsea log of {sandbox!r}", _log(sandbox)))


def _log(sandbox: Any) -> str:
    """What was run in it and what that wrote."""
    from sandsea import SandseaError

    try:
        processes = sandbox.processes()
    except SandseaError as e:
        return str(e)
    out = [f"({len(processes) - _SHOWN} earlier commands)"] if len(processes) > _SHOWN else []
    for p in processes[-_SHOWN:]:
        end = f"exit {p.result.exit_code}" if p.result else "running"
        out.append(f"── [{p.number}] {' '.join(p.command.argv) if p.command else ''} ({end})")
        if p.result is None:
            continue
        try:
            r = sandbox.attach(p.number, max_output=_SHOWN_TEXT).wait()
        except SandseaError as e:
            out.append(str(e))
        else:
            out += [text.rstrip("\n") for text in (r.stdout, r.stderr, r.start_message) if text]
    return "\n".join(out)
