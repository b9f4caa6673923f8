"""Local trees on their way in and out, as tar files."""

from __future__ import annotations

import contextlib
import os
import pathlib
import posixpath
import shutil
import tarfile
import tempfile
from typing import IO, Any

from . import errors


class _Tar(tarfile.TarFile):
    """Leaves out what no other machine can use, and names it: devices, sockets and pipes."""

    left_out: list[str]

    def gettarinfo(self, name: Any = None, arcname: str | None = None, fileobj: IO[bytes] | None = None) -> Any:
        # It is None for a socket, of which no filter hears.
        info: tarfile.TarInfo | None = super().gettarinfo(name, arcname, fileobj)
        if info is None or not (info.isfile() or info.isdir() or info.issym() or info.islnk()):
            self.left_out.append(arcname or str(name))
            return None
        return info


def pack(local: str | os.PathLike[str]) -> tuple[IO[bytes], list[str]]:
    """A local file or directory as an unnamed tar file, with names relative to it; and the names of what was left out:
    devices, sockets and pipes."""
    root = pathlib.Path(local)
    out = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with _Tar.open(fileobj=out, mode="w") as tar:
        tar.left_out = []
        if root.is_dir():
            for entry in sorted(root.iterdir()):
                tar.add(entry, arcname=entry.name)
        else:
            # The file that a link names, under the link's name.
            tar.add(root.resolve(strict=True), arcname=root.name)
    out.seek(0)
    return out, tar.left_out


def unpack(source: IO[bytes], local: str | os.PathLike[str]) -> None:
    """Unpack what a sandbox sent below a local directory.

    The archive is not trusted. Nothing is written through a symbolic link, links are made after everything else, names
    that would leave the directory are refused, and no set-user-id bits or owners are taken over.
    """
    root = pathlib.Path(local)
    root.mkdir(parents=True, exist_ok=True)
    links: list[tuple[pathlib.Path, str]] = []
    dirs: list[tuple[pathlib.Path, tarfile.TarInfo]] = []
    with tarfile.open(fileobj=source, mode="r:") as tar:
        for info in tar:
            place = _place(root, info.name)
            if place is None:
                continue
            if info.isdir():
                _clear(place, keep_dir=True)
                place.mkdir(exist_ok=True)
                dirs.append((place, info))
            elif info.issym():
                _clear(place)
                links.append((place, info.linkname))
            elif info.islnk():
                other = _place(root, info.linkname)
                if other is None or other.is_symlink() or not other.is_file():
                    raise errors.DataLoss(f"archive entry {info.name!r}: its hard link leads nowhere")
                _clear(place)
                os.link(other, place)
            elif info.isfile():
                data = tar.extractfile(info)
                assert data is not None
                _clear(place)
                with open(place, "xb") as out:
                    shutil.copyfileobj(data, out)
                    os.chmod(out.fileno() if os.chmod in os.supports_fd else place, info.mode & 0o777)
                os.utime(place, (info.mtime, info.mtime))
    for place, target in links:
        _parents(root, place)
        _clear(place)
        os.symlink(target, place)
    # Last, and deepest first: a directory may forbid writing, and its time changes with what is put into it.
    for place, info in reversed(dirs):
        if place.is_dir() and not place.is_symlink():
            os.chmod(place, info.mode & 0o777)
            os.utime(place, (info.mtime, info.mtime))


def _place(root: pathlib.Path, name: str) -> pathlib.Path | None:
    """Where an entry goes, with real directories above it; None for the root itself."""
    clean = posixpath.normpath(name)
    if clean == ".":
        return None
    if posixpath.isabs(clean) or clean.split("/")[0] == ".." or "\0" in clean or (os.sep != "/" and os.sep in clean):
        raise errors.DataLoss(f"archive entry {name!r} leaves the directory. The rest was not unpacked")
    place = root / clean
    _parents(root, place)
    return place


def _parents(root: pathlib.Path, place: pathlib.Path) -> None:
    at = root
    for part in place.relative_to(root).parts[:-1]:
        at = at / part
        if at.is_symlink() or not at.is_dir():
            _clear(at)
            at.mkdir()


def _clear(place: pathlib.Path, keep_dir: bool = False) -> None:
    """Remove what stands in the way of an entry; a directory only when it is empty."""
    if place.is_dir() and not place.is_symlink():
        if not keep_dir:
            place.rmdir()
        return
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
