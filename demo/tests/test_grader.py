"""The grader's pure parts: what it takes from a diff, how it reads reports, what it decides."""

from __future__ import annotations

import datetime

import pytest

from demo import grader
from demo.grader import Report, decide, parse_go, parse_junit, take
from demo.tasks import Edit, Release, Task, diff
from sandsea import Result

DAY = datetime.datetime(2024, 6, 1, tzinfo=datetime.timezone.utc)
TASK = Task(
    name="p", kind="python", project="p", old=Release("1", "", DAY), new=Release("2", "", DAY),
    sources=("a.py", "pkg/b.py"),
    tests=("tests",), run=("tests",), wrong=(Edit("a.py", "x", "y"),), f2p=("t::turns",), p2p=("t::stays",),
)  # fmt: skip


def result(code: int = 0) -> Result:
    return Result(exit_code=code, stdout="", stderr="", stdout_bytes=b"", stderr_bytes=b"", cause="completed")


def test_only_listed_files_are_taken_from_a_diff() -> None:
    text = diff(
        {"a.py": b"one\n", "conftest.py": None, "tests/test_a.py": b"x\n"},
        {"a.py": b"two\n", "conftest.py": b"hook\n", "tests/test_a.py": b"y\n"},
    )
    kept, refused = take(text, TASK.sources)
    assert refused == ("conftest.py", "tests/test_a.py")
    assert kept == diff({"a.py": b"one\n"}, {"a.py": b"two\n"})


@pytest.mark.parametrize("name", ["../a.py", "tests/../a.py", "/etc/passwd", "a.py/../conftest.py", "./a.py", "a.py "])
def test_other_spellings_of_a_path_are_refused(name: str) -> None:
    kept, refused = take(f"--- a/{name}\n+++ b/{name}\n@@ -1 +1 @@\n-x\n+y\n", TASK.sources)
    assert kept == ""
    assert len(refused) == 1


def test_a_rename_to_a_listed_file_from_another_is_refused() -> None:
    kept, refused = take("--- a/conftest.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n", TASK.sources)
    assert kept == ""
    assert refused == ("conftest.py",)


def test_a_header_inside_a_hunk_is_content() -> None:
    text = "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n--- a/evil\n+++ b/conftest.py\n x\n"
    kept, refused = take(text, TASK.sources)
    assert kept == text
    assert refused == ()


def test_lines_after_a_hunk_are_dropped() -> None:
    kept, _ = take("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n+more\nOnly in a: z\n", TASK.sources)
    assert "+more" not in kept


def test_names_with_a_time_are_read() -> None:
    text = "diff -ruN a/a.py b/a.py\n--- a/a.py\t2026-01-01 00:00:00 +0000\n+++ b/a.py\t2026\n@@ -1 +1 @@\n-x\n+y\n"
    kept, refused = take(text, TASK.sources)
    assert kept.startswith("--- a/a.py\n+++ b/a.py\n@@")
    assert refused == ()


def test_a_new_file_without_an_end_of_line_survives() -> None:
    text = diff({"pkg/b.py": None}, {"pkg/b.py": b"x = 1"})
    kept, _ = take(text, TASK.sources)
    assert kept == text
    assert "\\ No newline at end of file" in kept


def test_junit_outcomes() -> None:
    xml = (
        b'<testsuites><testsuite><testcase classname="t" name="a"/>'
        b'<testcase classname="t" name="b"><failure>x</failure></testcase>'
        b'<testcase classname="t" name="c"><skipped/></testcase>'
        b'<testcase classname="t" name="d"/><testcase classname="t" name="d"/></testsuite></testsuites>'
    )
    assert parse_junit(xml) == {"t::a": "passed", "t::b": "failed", "t::c": "skipped", "t::d": "failed"}


@pytest.mark.parametrize("data", [b"", b"<a>", b"\xff", b'<!DOCTYPE x [<!ENTITY a "b">]><x>&a;</x>'])
def test_an_odd_report_is_no_report(data: bytes) -> None:
    assert parse_junit(data) == {}


def test_go_outcomes() -> None:
    text = (
        '{"Action":"pass","Test":"TestA"}\n{"Action":"fail","Test":"TestB"}\nnoise\n{"Action":"pass","Package":"p"}\n'
        '{"Action":"skip","Test":"TestC"}\n{"Action":"pass","Test":"TestD"}\n{"Action":"pass","Test":"TestD"}\n{broken\n'
    )
    assert parse_go(text) == {"TestA": "passed", "TestB": "failed", "TestC": "skipped", "TestD": "failed"}


@pytest.mark.parametrize(
    ("outcomes", "canaries", "kind"),
    [
        ({"t::turns": "passed", "t::stays": "passed"}, True, "passed"),
        ({"t::turns": "passed", "t::stays": "passed"}, False, "tampered"),
        ({"t::turns": "failed", "t::stays": "passed"}, True, "failed"),
        ({"t::turns": "passed"}, True, "failed"),
        ({"t::turns": "passed", "t::stays": "skipped"}, True, "failed"),
        ({}, False, "failed"),
    ],
)
def test_every_committed_test_must_be_named_as_passed(outcomes: dict[str, str], canaries: bool, kind: str) -> None:
    assert decide(TASK, Report(outcomes, canaries, result()), ()).kind == kind


def test_exit_code_zero_alone_is_a_failure() -> None:
    assert decide(TASK, Report({}, True, result(0)), ()).kind == "failed"


def test_canaries_must_come_out_as_they_must() -> None:
    right = grader._with_canaries({"x::p": "passed", "x::f": "failed", "t": "passed"}, "p", "f", result())
    assert right.canaries_right
    assert right.outcomes == {"t": "passed"}
    for outcomes in ({"x::p": "passed", "x::f": "passed"}, {"x::p": "passed"}, {}):
        assert not grader._with_canaries(outcomes, "p", "f", result()).canaries_right
