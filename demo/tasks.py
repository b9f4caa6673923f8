"""Repair tasks: what they are made of, and the layers that hold them.

A task is two consecutive releases of a project. The workspace layer holds the older one; the hidden layer the newer
one's tests and runner configuration; the true patch is the difference of the listed source files. `tasks/*.json` also
commits the tests that must turn from failing to passing (f2p) and those that must stay passing (p2p).
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import hashlib
import io
import json
import pathlib
import re
import tarfile
import zipfile
from collections.abc import Iterable
from typing import Any

from . import registry

HERE = pathlib.Path(__file__).resolve().parent
Tree = dict[str, bytes]


@dataclasses.dataclass(frozen=True)
class Release:
    """One release by its hash, with the moment at which its registry says that it was published."""

    version: str
    sha256: str
    released: datetime.datetime
    filename: str = ""

    @staticmethod
    def load(d: dict[str, Any]) -> Release:
        when = datetime.datetime.fromisoformat(d["released"].replace("Z", "+00:00"))
        return Release(d["version"], d["sha256"], when, d.get("filename", ""))


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of a text in a file."""

    file: str
    find: str
    replace: str


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    #: python or go
    kind: str
    project: str
    old: Release
    new: Release
    #: source files that a patch may change; everything else in a diff is refused
    sources: tuple[str, ...]
    #: files and directories that the grader restores from the newer release
    tests: tuple[str, ...]
    #: tests to run, relative to the project
    run: tuple[str, ...]
    #: a patch that edits the right function and is wrong
    wrong: tuple[Edit, ...]
    f2p: tuple[str, ...]
    p2p: tuple[str, ...]

    @property
    def workdir(self) -> str:
        return "/work/" + self.name

    @property
    def as_of(self) -> datetime.date:
        """The day of the world in which an agent works on the task: half-way between the releases."""
        return (self.old.released + (self.new.released - self.old.released) / 2).date()

    def repository(self) -> str:
        """Host and path of the project's repository, as an agent reads them in the older release."""
        if self.kind == "go":
            return re.sub(r"/v\d+$", "", self.project)
        head = self.tree(self.old)["PKG-INFO"].decode().split("\n\n")[0]
        places = re.findall(r"(?m)^(.*)https?://([^/\s]+/[^/\s]+/[^/\s]+?)/?$", head)
        if not places:
            raise ValueError(f"{self.name}: the older release names no repository")
        return str(min(places, key=lambda p: "Source" not in p[0])[1])

    @staticmethod
    def load(path: pathlib.Path) -> Task:
        d = json.loads(path.read_text())
        return Task(
            name=d["name"],
            kind=d["kind"],
            project=d["project"],
            old=Release.load(d["old"]),
            new=Release.load(d["new"]),
            sources=tuple(d["sources"]),
            tests=tuple(d["tests"]),
            run=tuple(d["run"]),
            wrong=tuple(Edit(**e) for e in d["wrong"]),
            f2p=tuple(d["f2p"]),
            p2p=tuple(d["p2p"]),
        )

    def tree(self, release: Release) -> Tree:
        """The files of a release, fetched by index and hash."""
        if self.kind == "go":
            path = registry.go_zip(self.project, release.version, release.sha256)
            prefix = f"{self.project}@{release.version}/"
            with zipfile.ZipFile(path) as z:
                return {n.removeprefix(prefix): z.read(n) for n in z.namelist() if not n.endswith("/")}
        path = registry.pypi_file(self.project, release.filename, release.sha256)
        out: Tree = {}
        with tarfile.open(path) as t:
            for member in t:
                source = t.extractfile(member) if member.isfile() else None
                if source is not None:
                    out[member.name.split("/", 1)[1]] = source.read()
        return out

    # --- patches

    def true_patch(self) -> str:
        """The difference of the releases in the listed source files."""
        old, new = self.tree(self.old), self.tree(self.new)
        return diff({s: old.get(s) for s in self.sources}, {s: new.get(s) for s in self.sources})

    def edited(self, edits: Iterable[Edit]) -> str:
        """The patch that edits of the older release make."""
        old = self.tree(self.old)
        new = dict(old)
        for e in edits:
            text = new[e.file].decode()
            if text.count(e.find) != 1:
                raise ValueError(f"{self.name}: {e.file} holds {text.count(e.find)} times {e.find!r}")
            new[e.file] = text.replace(e.find, e.replace).encode()
        files = {e.file for e in edits}
        return diff({f: old[f] for f in files}, {f: new[f] for f in files})


def load_all() -> list[Task]:
    """The committed tasks."""
    return [Task.load(HERE / "tasks" / f"{name}.json") for name in names()]


def names() -> list[str]:
    """Those of the committed tasks."""
    return sorted(p.stem for p in (HERE / "tasks").glob("*.json"))


def diff(old: dict[str, bytes | None], new: dict[str, bytes | None]) -> str:
    """A unified diff with a/ and b/ names; None is a file that is not there."""
    out: list[str] = []
    for name in sorted(set(old) | set(new)):
        a, b = old.get(name), new.get(name)
        if a == b:
            continue
        lines = difflib.unified_diff(
            _lines(a), _lines(b), "/dev/null" if a is None else "a/" + name, "/dev/null" if b is None else "b/" + name
        )
        for line in lines:
            out.append(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n")
    return "".join(out)


def _lines(content: bytes | None) -> list[str]:
    return [] if content is None else content.decode().splitlines(keepends=True)


# --- layers


def layer(files: Tree, *, prefix: str = "", executable: Iterable[str] = ()) -> bytes:
    """A root file system tar with these files; the same files give the same bytes."""
    run = set(executable)
    buf = io.BytesIO()
    with tarfile.open(fileobj=buf, mode="w", format=tarfile.PAX_FORMAT) as tar:
        made: set[str] = set()
        for name in sorted(files):
            path = (prefix.strip("/") + "/" + name).strip("/")
            for parent in reversed(pathlib.PurePosixPath(path).parents):
                if str(parent) not in (".", *made):
                    made.add(str(parent))
                    info = tarfile.TarInfo(str(parent))
                    info.type, info.mode = tarfile.DIRTYPE, 0o755
                    tar.addfile(info)
            info = tarfile.TarInfo(path)
            info.size = len(files[name])
            info.mode = 0o755 if name in run else 0o644
            tar.addfile(info, io.BytesIO(files[name]))
    return buf.getvalue()


def name_for(role: str, tar: bytes) -> str:
    """An image name that changes with the content."""
    return f"demo-{role}-{hashlib.sha256(tar).hexdigest()[:12]}"


def workspace(task: Task) -> bytes:
    """The older release, tests and all."""
    return layer(task.tree(task.old), prefix=task.workdir)


def hidden(task: Task) -> bytes:
    """The newer release's tests and runner configuration, for the grader alone."""
    new = task.tree(task.new)
    chosen = {n: c for n, c in new.items() if any(n == t or n.startswith(t.rstrip("/") + "/") for t in task.tests)}
    if task.kind == "go":
        chosen |= {n: c for n, c in new.items() if n.endswith("_test.go") or n.startswith("testdata/")}
    return layer(chosen, prefix="/hidden/" + task.name)


def python_toolkit() -> bytes:
    """The test runner and what the projects' tests need, from wheels by hash, unpacked and nothing more."""
    files: Tree = {}
    for wheel in json.loads((HERE / "toolkit.json").read_text())["wheels"]:
        path = registry.pypi_file(wheel["project"], wheel["filename"], wheel["sha256"])
        with zipfile.ZipFile(path) as z:
            for n in z.namelist():
                if not n.endswith("/"):
                    files[n] = z.read(n)
    return layer(files, prefix="/opt/python")


def go_toolkit() -> bytes:
    """The Go toolchain, and the modules that the projects need as a file proxy."""
    spec = json.loads((HERE / "toolkit.json").read_text())
    files: Tree = {}
    run: set[str] = set()
    chain = spec["go"]
    with zipfile.ZipFile(registry.go_zip(chain["module"], chain["version"], chain["sha256"])) as z:
        prefix = f"{chain['module']}@{chain['version']}/"
        for n in z.namelist():
            name = n.removeprefix(prefix)
            # The sources of the tools themselves and all tests are of no use in a task.
            if n.endswith("/") or name.startswith(("test/", "api/", "doc/", "src/cmd/")) or name.endswith("_test.go"):
                continue
            files["go/" + name] = z.read(n)
            if name.startswith(("bin/", "pkg/tool/")):
                run.add("go/" + name)
    for m in spec["go_modules"]:
        path = registry.go_zip(m["module"], m["version"], m["sha256"])
        base = f"goproxy/{m['module']}/@v/{m['version']}"
        files[base + ".zip"] = path.read_bytes()
        files[base + ".info"] = json.dumps({"Version": m["version"]}).encode()
        with zipfile.ZipFile(path) as z:
            inside = f"{m['module']}@{m['version']}/go.mod"
            files[base + ".mod"] = z.read(inside) if inside in z.namelist() else f"module {m['module']}\n".encode()
    return layer(files, prefix="/opt", executable=run)


#: environment of every command that builds or tests Go code in a sandbox
GO_ENV = {
    "PATH": "/opt/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "GOPROXY": "file:///opt/goproxy",
    "GOSUMDB": "off",
    "GOFLAGS": "-mod=mod",
    "GOTOOLCHAIN": "local",
    "GOCACHE": "/opt/gocache",
    "GOMODCACHE": "/opt/gomod",
    "CGO_ENABLED": "0",
}
