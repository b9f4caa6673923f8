"""The parts of the client that need no server: trees, progress, kinds of output, exceptions."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import socket
import sys
import tarfile
import types

import pytest

import sandsea
from sandsea import _core as core
from sandsea import _models as m
from sandsea import _progress, _tree, errors
from sandsea._result import make


def result(code: int = 0, *, cut: bool = False, exceeded: bool = False, **record: object) -> sandsea.Result:
    process = m.Process(number=3, result=m.Result(exit_code=code, **record))  # type: ignore[arg-type]
    return make(
        "s7q3k2m5aw", process, b"out\n", b"", cut=cut, errors="replace", argv=("prog", "arg"), exceeded=exceeded
    )


# --- exceptions


def every_exception() -> list[errors.SandseaError]:
    plain = [
        getattr(errors, name) for name in errors.__all__ if not issubclass(getattr(errors, name), errors.CommandFailed)
    ]
    detail = {"kind": "x", "hint": "h", "cause": "idle", "errno": 2, "filename": "/w/a", "stage": "queue"}
    failed = [
        errors.CommandFailed("m", result(1)),
        errors.CommandTimeout("m", result(124, timed_out=True)),
        errors.OutputLimitExceeded("m", result()),
        *(cls("m", result(127, start_failure=m.StartFailure("not_found", "n", 2))) for cls in (
            errors.StartFailed, errors.ProgramMissing, errors.ProgramNotExecutable, errors.WorkdirMissing,
        )),
    ]  # fmt: skip
    return [cls("m", dict(detail)) for cls in plain] + failed


@pytest.mark.parametrize("e", every_exception(), ids=lambda e: type(e).__name__)
def test_every_exception_travels_and_reads_well(e: errors.SandseaError) -> None:
    again = pickle.loads(pickle.dumps(e))
    assert type(again) is type(e)
    assert str(again) == str(e) == "m"
    assert again.__dict__ == e.__dict__
    if isinstance(e, OSError):
        assert (again.errno, again.filename) == (e.errno, e.filename)


def test_the_list_of_exceptions_is_whole() -> None:
    defined = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, errors.SandseaError)}
    assert {n for n in defined if not n.startswith("_")} == set(errors.__all__)


@pytest.mark.parametrize(
    ("detail", "kind"),
    [
        ({"kind": "failed_precondition", "cause": "oom"}, errors.SandboxEnded),
        ({"kind": "failed_precondition", "cause": "infra_killed"}, errors.Lost),
        ({"kind": "lost", "cause": "infra_lost"}, errors.Lost),
        ({"kind": "unavailable", "cause": "infra_start"}, errors.Unavailable),
        ({"kind": "exhausted", "stage": "queue"}, errors.Exhausted),
    ],
)
def test_whose_fault_an_end_was(detail: dict[str, str], kind: type[errors.SandseaError]) -> None:
    e = errors.from_detail("m", detail)
    assert type(e) is kind
    assert isinstance(e, sandsea.InfraError) == (kind in (errors.Lost, errors.Unavailable))
    assert e.stage == detail.get("stage", "")
    if isinstance(e, (errors.Lost, errors.SandboxEnded)):
        assert e.cause == detail["cause"]


@pytest.mark.parametrize(
    ("why", "number", "builtin"),
    [
        ("not_found", 2, FileNotFoundError),
        ("cwd", 2, FileNotFoundError),
        ("not_executable", 13, PermissionError),
        ("argument_too_long", 7, OSError),
        ("user", 0, OSError),
    ],
)
def test_a_command_that_never_ran_is_the_builtin_too(why: str, number: int, builtin: type[OSError]) -> None:
    r = result(127, start_failure=m.StartFailure(kind=why, message="it is so", errno=number))
    with pytest.raises(builtin) as e:
        r.check()
    assert isinstance(e.value, sandsea.StartFailed)
    assert isinstance(e.value, sandsea.CommandFailed)
    assert str(e.value) == "`prog arg` never ran in s7q3k2m5: it is so"
    assert (e.value.errno, e.value.filename) == (number or None, "prog")
    assert e.value.strerror == (os.strerror(number) if number else str(e.value))


def test_too_much_output_is_an_exception_only_when_asked_for() -> None:
    assert result(0, cut=True).check().truncated
    for r in (result(0, exceeded=True), result(0, output_exceeded=True)):
        assert r.output_exceeded
        with pytest.raises(sandsea.OutputLimitExceeded) as e:
            r.check()
        assert e.value.partial.stdout == "out\n"


# --- output


@pytest.mark.parametrize("overflow", ["head_tail", "tail", "head", "fail"])
def test_what_is_kept_of_a_stream(overflow: core.Overflow) -> None:
    k = core.Kept(8, overflow)
    for piece in (b"0123", b"", b"4567"):
        k.add(piece)
    assert (k.value(), k.cut) == (b"01234567", False)
    k = core.Kept(8, overflow)
    data = b"".join(b"%03d" % i for i in range(1000))
    for i in range(0, len(data), 7):
        k.add(data[i : i + 7])
    want = {"head_tail": data[:4] + data[-4:], "tail": data[-8:]}.get(overflow, data[:8])
    assert (k.value(), k.cut, k.total) == (want, True, len(data))


# --- progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    line = _progress.Line(512, True)
    line._began -= 0.5
    line._shown = 0
    line.show(381, 2)
    line.show(382, 2)  # within a tenth of a second
    line.end()
    assert screen.getvalue().startswith("\r381/512, 2 failed, ")
    assert screen.getvalue().count("\n") == 1
    assert screen.getvalue().rsplit("\r", 1)[-1].startswith("382/512, 2 failed, ")
    assert screen.getvalue().endswith("/s\n")


def test_progress_is_one_line_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    line = _progress.Line(4, True)
    line.show(4, 0)
    line.end()
    out, err = capsys.readouterr()
    assert out.startswith("\r4/4, ")
    assert err == ""


@pytest.mark.parametrize(
    ("wanted", "tty", "term"), [(False, True, "xterm"), (True, False, "xterm"), (True, True, "dumb")]
)
def test_progress_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch, wanted: bool, tty: bool, term: str) -> None:
    screen = Screen() if tty else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", term)
    line = _progress.Line(4, wanted)
    line.show(4, 0)
    line.end()
    assert screen.getvalue() == ""


# --- trees


def tar(*entries: tuple[str, bytes, str | bytes]) -> io.BytesIO:
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w") as out:
        for name, kind, what in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, 0o4755
            if isinstance(what, bytes):
                info.size = len(what)
                out.addfile(info, io.BytesIO(what))
            else:
                info.linkname = what
                out.addfile(info)
    buf.seek(0)
    return buf


def test_a_tree_goes_out_and_comes_back(tmp_path: pathlib.Path) -> None:
    src = tmp_path / "src"
    (src / "empty").mkdir(parents=True)
    (src / "run").write_text("x")
    (src / "run").chmod(0o755)
    os.utime(src / "run", (1e9, 1e9))
    os.link(src / "run", src / "same")
    (src / "abs").symlink_to("/etc/passwd")
    (src / "dangling").symlink_to("nowhere")
    os.mkfifo(src / "empty/pipe")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(src / "socket"))
    (src / "empty").chmod(0o500)
    back = tmp_path / "back"
    for _ in range(2):  # over itself, too
        packed, left_out = _tree.pack(src)
        with packed:
            _tree.unpack(packed, back)
        assert left_out == ["empty/pipe", "socket"]
    assert sorted(p.name for p in back.iterdir()) == ["abs", "dangling", "empty", "run", "same"]
    assert ((back / "run").stat().st_mode & 0o7777, (back / "run").stat().st_mtime) == (0o755, 1e9)
    assert (back / "empty").stat().st_mode & 0o777 == 0o500
    assert (back / "same").samefile(back / "run")
    assert [os.readlink(back / n) for n in ("abs", "dangling")] == ["/etc/passwd", "nowhere"]


@pytest.mark.parametrize("name", ["/evil", "../evil", "a/../../evil"])
def test_an_archive_cannot_leave_the_directory(tmp_path: pathlib.Path, name: str) -> None:
    into = tmp_path / "into"
    with pytest.raises(errors.DataLoss, match="leaves the directory"):
        _tree.unpack(tar((name, tarfile.REGTYPE, b"x")), into)
    assert not (tmp_path / "evil").exists()


def test_nothing_is_written_through_a_link(tmp_path: pathlib.Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("mine")
    into = tmp_path / "into"
    # A link of this archive, a link of an earlier one, a file in the place of a link, a hard link to what a link names.
    _tree.unpack(tar(("d", tarfile.SYMTYPE, str(outside)), ("f", tarfile.SYMTYPE, str(outside / "f"))), into)
    _tree.unpack(tar(("f", tarfile.REGTYPE, b"theirs"), ("d/f", tarfile.REGTYPE, b"theirs")), into)
    assert (outside / "f").read_text() == "mine"
    assert [p.name for p in outside.iterdir()] == ["f"]
    assert (into / "d/f").read_text() == "theirs"
    _tree.unpack(tar(("g", tarfile.SYMTYPE, str(outside / "f"))), into)
    with pytest.raises(errors.DataLoss, match="leads nowhere"):
        _tree.unpack(tar(("h", tarfile.LNKTYPE, "g")), into)
    with pytest.raises(OSError, match="not empty"):
        _tree.unpack(tar(("e", tarfile.SYMTYPE, str(outside)), ("e/f", tarfile.REGTYPE, b"theirs")), into)
    assert (outside / "f").read_text() == "mine"


def test_set_user_id_bits_and_devices_stay_behind(tmp_path: pathlib.Path) -> None:
    _tree.unpack(tar(("f", tarfile.REGTYPE, b"x"), ("dev", tarfile.CHRTYPE, b"")), tmp_path)
    assert (tmp_path / "f").stat().st_mode & 0o7777 == 0o755
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


# --- arguments


def test_the_entrypoint_is_a_word_or_a_command() -> None:
    assert "entrypoint" not in sandsea.ContainerRunArgs().spec().to_json()
    image = sandsea.ContainerRunArgs(entrypoint="image").spec().to_json()
    assert image["entrypoint"] == {"mode": "ENTRYPOINT_MODE_IMAGE"}
    argv = sandsea.ContainerRunArgs(entrypoint=["serve", "-p", "80"]).spec().to_json()
    assert argv["entrypoint"] == {"mode": "ENTRYPOINT_MODE_ARGV", "argv": ["serve", "-p", "80"]}
    with pytest.raises(sandsea.InvalidRequest, match='"idle", "image" or a list'):
        sandsea.ContainerRunArgs(entrypoint="serve").spec()


def test_batches_stay_within_the_limits_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BATCH_FILES", 3)
    monkeypatch.setattr(core, "BATCH_BYTES", 10)
    op = core.write_batches("s1", [(f"/{i}", "x" * size) for i, size in enumerate([1, 1, 1, 1, 9, 20, 0])], "", 0)
    sent = []
    written: list[m.FileInfo | errors.SandseaError] = []

    def server(op: core.Op[list[m.FileInfo | errors.SandseaError]]) -> None:
        call = next(op)
        try:
            while True:
                files = call.body["files"]
                sent.append([f["path"] for f in files])
                call = op.send({"files": [{"path": f["path"], "info": {"path": f["path"]}} for f in files]})
        except StopIteration as done:
            written.extend(done.value)

    server(op)
    assert sent == [["/0", "/1", "/2"], ["/3", "/4"], ["/5"], ["/6"]]
    assert [f.path for f in written if isinstance(f, m.FileInfo)] == [f"/{i}" for i in range(7)]
