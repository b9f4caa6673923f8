"""Fetches sources from package registries by index and hash. No build back end runs: archives are only unpacked.

The registries' addresses are those of the machine's own clients (pip, go), taken from their configuration at run time.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.parse
from typing import Any

import httpx


class FetchError(Exception):
    """A release could not be fetched, or is not the one that the task names."""


def cache_dir() -> pathlib.Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = pathlib.Path(base) / "sandsea" / "demo"
    path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache
def _http() -> httpx.Client:
    return httpx.Client(follow_redirects=True, timeout=120)


@functools.cache
def pypi_index() -> str:
    """pip's index: configured, else pip's own default."""
    if os.environ.get("PIP_INDEX_URL"):
        return os.environ["PIP_INDEX_URL"].rstrip("/")
    get = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    got = subprocess.run(get, capture_output=True, text=True, check=False)
    if got.returncode == 0 and got.stdout.strip():
        return got.stdout.strip().rstrip("/")
    code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return out.stdout.strip().rstrip("/")


@functools.cache
def go_proxy() -> str:
    """The first module proxy of the go command."""
    out = subprocess.run(["go", "env", "GOPROXY"], capture_output=True, text=True, check=True).stdout.strip()
    for entry in out.replace("|", ",").split(","):
        if entry.startswith("http"):
            return entry.rstrip("/")
    raise FetchError(f"GOPROXY={out} names no proxy. Set one: go env -w GOPROXY=…")


def _fetch(url: str, sha256: str) -> pathlib.Path:
    """A file by its hash, from the cache or the registry."""
    path = cache_dir() / sha256
    if path.exists():
        return path
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=cache_dir(), delete=False) as out:
        try:
            with _http().stream("GET", url) as r:
                r.raise_for_status()
                for chunk in r.iter_bytes(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
            if digest.hexdigest() != sha256:
                raise FetchError(f"{url.rsplit('/', 1)[-1]}: sha256 is {digest.hexdigest()}, the task names {sha256}")
            os.replace(out.name, path)
        except httpx.HTTPError as e:
            raise FetchError(f"{url.rsplit('/', 1)[-1]}: {e}") from e
        finally:
            if os.path.exists(out.name):
                os.unlink(out.name)
    return path


def pypi_file(project: str, filename: str, sha256: str) -> pathlib.Path:
    """A file of a project, found in the index."""
    cached = cache_dir() / sha256
    if cached.exists():
        return cached
    for f in pypi_files(project):
        if f["filename"] == filename:
            if f["hashes"].get("sha256") != sha256:
                raise FetchError(f"{filename}: the index names another hash than the task")
            return _fetch(urllib.parse.urljoin(pypi_index() + "/" + project + "/", f["url"]), sha256)
    raise FetchError(f"{filename}: not in the index of {project}")


@functools.cache
def pypi_files(project: str) -> list[dict[str, Any]]:
    """The index entries of a project."""
    r = _http().get(f"{pypi_index()}/{project}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    r.raise_for_status()
    return list(json.loads(r.content)["files"])


@functools.cache
def pypi_date(project: str, version: str) -> datetime.datetime:
    """When the first file of a version was uploaded."""
    stem = re.sub(r"[-_.]+", "-", f"{project}-{version}").lower()
    dates = [
        _date(f["upload-time"])
        for f in pypi_files(project)
        if re.sub(r"[-_.]+", "-", f["filename"]).lower().startswith((stem + "-py", stem + "-cp", stem + "-tar-gz"))
    ]
    if not dates:
        raise FetchError(f"{project} {version}: not in the index")
    return min(dates)


@functools.cache
def go_date(module: str, version: str) -> datetime.datetime:
    """When the commit of a module version was made."""
    r = _http().get(f"{go_proxy()}/{escape(module)}/@v/{version}.info")
    r.raise_for_status()
    return _date(json.loads(r.content)["Time"])


def _date(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(re.sub(r"\.\d+", "", text).replace("Z", "+00:00"))


def release_url(kind: str, project: str, version: str, filename: str) -> str:
    """Where the registry itself has a release."""
    if kind == "go":
        return f"{go_proxy()}/{escape(project)}/@v/{version}.zip"
    for f in pypi_files(project):
        if f["filename"] == filename:
            return urllib.parse.urljoin(f"{pypi_index()}/{project}/", str(f["url"]))
    raise FetchError(f"{filename}: not in the index of {project}")


def escape(module: str) -> str:
    """The proxy's spelling of a module path: capitals as ! and the small letter."""
    return "".join("!" + c.lower() if c.isupper() else c for c in module)


def go_zip(module: str, version: str, sha256: str) -> pathlib.Path:
    """The zip of a module version."""
    return _fetch(f"{go_proxy()}/{escape(module)}/@v/{version}.zip", sha256)


def go_zip_hash(module: str, version: str) -> str:
    """The hash of a module version's zip, for making tasks."""
    r = _http().get(f"{go_proxy()}/{escape(module)}/@v/{version}.zip")
    r.raise_for_status()
    return hashlib.sha256(r.content).hexdigest()
