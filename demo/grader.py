"""Grades a diff in a fresh sandbox.

Nothing that the rollout could touch is believed: of the diff only the task's listed source files are taken; tests and
runner configuration come from the hidden layer; the report must name every committed test as passed; and two canaries
with random names, one that must pass and one that must fail, must come out as they must. An exit code of 0 says
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import xml.etree.ElementTree as ET

from sandsea import Result, Sandbox
from sandsea.errors import FileError

from .tasks import GO_ENV, Task

#: a report larger than this is no report
MAX_REPORT = 16 << 20
#: of one test run
TEST_TIMEOUT = 300.0

#: a file that cannot be imported must not hide the others' outcomes
PYTEST = ("python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the grader decided: passed, failed or tampered, and why."""

    kind: str
    reason: str
    refused: tuple[str, ...] = ()
    tests: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of every test that a run names, and of the canaries."""

    outcomes: dict[str, str]
    canaries_right: bool
    result: Result


def take(diff: str, sources: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The part of a unified diff that changes the listed files, and the other paths in it."""
    kept: list[str] = []
    refused: list[str] = []
    section: list[str] = []
    paths: set[str] = set()

    def close() -> None:
        if not paths:
            return
        if paths <= set(sources):
            kept.extend(section)
        else:
            refused.extend(sorted(paths - set(sources)))

    lines = diff.splitlines(keepends=True)
    i = 0
    while i < len(lines):
        if lines[i].startswith("--- ") and i + 1 < len(lines) and lines[i + 1].startswith("+++ "):
            close()
            names = [_path(lines[i]), _path(lines[i + 1])]
            paths = {n for n in names if n}
            header = [("--- ", "a/", names[0]), ("+++ ", "b/", names[1])]
            section = [f"{mark}{side}{n}\n" if n else f"{mark}/dev/null\n" for mark, side, n in header]
            i += 2
            continue
        m = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", lines[i])
        if m is None or not paths:
            # Prose between sections: "diff -ruN a/x b/x", "Only in …", "Binary files … differ".
            i += 1
            continue
        section.append(lines[i])
        i += 1
        old, new = int(m[1] or 1), int(m[2] or 1)
        while i < len(lines) and (old > 0 or new > 0 or lines[i].startswith("\\")):
            section.append(lines[i])
            old -= lines[i][0] in " -"
            new -= lines[i][0] in " +"
            i += 1
    close()
    return "".join(kept), tuple(refused)


def _path(line: str) -> str | None:
    """The file that a header line names, without its a/ or b/; None for /dev/null."""
    name = line[4:].split("\t")[0].rstrip("\n")
    if name == "/dev/null":
        return None
    return name.split("/", 1)[1].lstrip("/") if "/" in name else name


async def apply(sandbox: Sandbox, task: Task, patch: str) -> Result:
    """Apply a patch to the project, exactly or not at all."""
    await sandbox.files.write("/tmp/patch", patch)
    return await sandbox.run(["patch", "-p1", "--fuzz=0", "--batch", "-i", "/tmp/patch"], cwd=task.workdir, timeout=60)


async def grade(sandbox: Sandbox, task: Task, diff: str) -> Verdict:
    """Decide about a diff in a sandbox that nobody has used."""
    patch, refused = take(diff, task.sources)
    if patch:
        r = await apply(sandbox, task, patch)
        if r.exit_code != 0:
            return Verdict("failed", f"the diff does not apply: {r.stdout.strip()[-200:]}", refused)
    report = await run_tests(sandbox, task)
    return decide(task, report, refused)


def decide(task: Task, report: Report, refused: tuple[str, ...]) -> Verdict:
    """Pure: the verdict that a report supports."""
    n = len(report.outcomes)
    missing = [t for t in (*task.f2p, *task.p2p) if report.outcomes.get(t) != PASSED]
    if n and not report.canaries_right:
        return Verdict("tampered", "a canary came out wrong", refused, n)
    if not n:
        return Verdict("failed", f"no report (exit {report.result.exit_code})", refused)
    if missing:
        return Verdict(
            "failed", f"{len(missing)} of {len(task.f2p) + len(task.p2p)} tests not passed, as {missing[0]}", refused, n
        )
    return Verdict("passed", f"all {len(task.f2p) + len(task.p2p)} tests passed", refused, n)


async def run_tests(sandbox: Sandbox, task: Task) -> Report:
    """Restore the tests from the hidden layer, add canaries, run, read the report."""
    restore = [f"rm -rf {' '.join(task.tests)}", f"cp -a /hidden/{task.name}/. {task.workdir}/"]
    if task.kind == "go":
        restore.insert(0, "find . -name '*_test.go' -delete")
    else:
        restore.insert(0, "find . -name conftest.py -delete; rm -f pytest.ini .pytest.ini tox.ini setup.cfg")
    await sandbox.run(["sh", "-ec", "\n".join(restore)], cwd=task.workdir, timeout=60)
    return await (_run_go if task.kind == "go" else _run_python)(sandbox, task)


async def _run_python(sandbox: Sandbox, task: Task) -> Report:
    word = "c" + secrets.token_hex(8)
    canary = f"{task.workdir}/{task.run[0]}/test_{word}.py"
    await sandbox.files.write(
        canary, f"def test_{word}_passes():\n    pass\n\n\ndef test_{word}_fails():\n    assert False\n"
    )
    path = f"/tmp/{secrets.token_hex(8)}.xml"
    result = await sandbox.run(
        [*PYTEST, "--junitxml", path, *task.run],
        cwd=task.workdir,
        timeout=TEST_TIMEOUT,
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "LANG": "C.UTF-8",
            "PYTHONPATH": f"/opt/python:{task.workdir}/src:{task.workdir}",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        replace_env=True,
    )
    try:
        outcomes = parse_junit(await sandbox.files.read(path, max_bytes=MAX_REPORT))
    except FileError:
        outcomes = {}
    return _with_canaries(outcomes, f"test_{word}_passes", f"test_{word}_fails", result)


async def _run_go(sandbox: Sandbox, task: Task) -> Report:
    word = "C" + secrets.token_hex(8)
    tests = await sandbox.run(["sh", "-c", "head -c 4096 -q *_test.go | grep -m1 '^package '"], cwd=task.workdir)
    package = tests.stdout.split()[-1] if tests.stdout.split() else "main"
    body = (
        f'package {package}\n\nimport "testing"\n\n'
        f"func Test{word}Passes(t *testing.T) {{}}\n\nfunc Test{word}Fails(t *testing.T) {{ t.Fail() }}\n"
    )
    # First by name, so that a test that panics later does not take the canaries along.
    await sandbox.files.write(f"{task.workdir}/aa_{word.lower()}_test.go", body)
    result = await sandbox.run(
        ["go", "test", "-json", "-count=1", *task.run],
        cwd=task.workdir,
        timeout=TEST_TIMEOUT,
        env=GO_ENV,
        max_output=MAX_REPORT,
    )
    return _with_canaries(parse_go(result.stdout), f"Test{word}Passes", f"Test{word}Fails", result)


def _with_canaries(outcomes: dict[str, str], passes: str, fails: str, result: Result) -> Report:
    own = {t: o for t, o in outcomes.items() if t.endswith((passes, fails))}
    rest = {t: o for t, o in outcomes.items() if t not in own}
    right = sorted((t.endswith(passes), o) for t, o in own.items()) == [(False, FAILED), (True, PASSED)]
    return Report(rest, right, result)


def parse_junit(data: bytes) -> dict[str, str]:
    """Outcomes by "class::name". A test that is named twice has not passed. Anything odd is no report."""
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        return {}
    try:
        root = ET.fromstring(data)
    except ET.ParseError:
        return {}
    out: dict[str, str] = {}
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        tags = {child.tag for child in case}
        outcome = FAILED if tags & {"failure", "error"} else SKIPPED if "skipped" in tags else PASSED
        out[name] = FAILED if name in out else outcome
    return out


def parse_go(text: str) -> dict[str, str]:
    """Outcomes by test name from `go test -json`."""
    out: dict[str, str] = {}
    words = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        name, outcome = event.get("Test"), words.get(event.get("Action", ""))
        if name and outcome:
            out[name] = FAILED if name in out else outcome
    return out
