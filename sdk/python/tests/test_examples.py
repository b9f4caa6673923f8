"""Each program of examples/ is run as its user runs it, and says what it should."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"

SAYS = {
    "first_sandbox": """\
        hello from Linux
        exit code 3, completed: no such luck
        after its time limit: timeout, and it had written 'so far\\n'
        errno 2: /no/such/file
        ended: stopped
        """,
    "agent_loop": """\
        $ mkdir -p /work && cd /work
        (no output)

        $ export NAME=sandsea
        (no output)

        $ echo I am $NAME in $PWD
        I am sandsea in /work

        $ if true; then
        (this is no shell script; nothing of it was run)

        $ sleep 60
        (no output)
        (timed out; the session goes on)

        """,
    "live_process": """\
        1 + 2 = 3
        40 + 2 = 42
        bye, exit code 0
        from byte 6: second
        third
        """,
    "files": """\
        3 bytes
        ['part 7', 'MissingFile']
        created /w/tree/result
        built
        """,
    "batch": """\
        [0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, 144, 169, 196, 225]
        16 sandboxes
        0 left
        """,
    "rollouts": "[1.0, 0.0, 0.0, 0.0]\n",
    "listing1": "0 root\n\n",
}
# What needs a node that enforces network policies.
NETWORKED = {"listing1"}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_should(name: str, request: pytest.FixtureRequest) -> None:
    if name in NETWORKED:
        request.getfixturevalue("network")
    program = EXAMPLES / f"{name}.py"
    run = subprocess.run(
        [sys.executable, "-W", "error", program, "busybox"], capture_output=True, text=True, timeout=120, check=False
    )
    want = "".join(line.removeprefix(" " * 8) for line in SAYS[name].splitlines(keepends=True))
    assert (run.returncode, run.stdout, run.stderr) == (0, want, "")


def test_every_example_is_run_and_short() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(SAYS)
    for p in EXAMPLES.glob("*.py"):
        assert len([line for line in p.read_text().splitlines() if line.strip()]) <= 40, p
