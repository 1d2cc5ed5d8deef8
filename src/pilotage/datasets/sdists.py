"""Source archives (sdists) of packages, from the index that pip or uv is configured for.

Invariant: what is returned has the SHA-256 that the index gives, holds files alone, below one directory,
within bounds; nothing of an archive is ever run, built or written to a path that it chose.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import httpx
import orjson

from pilotage.errors import ConfigError, PackageError
from pilotage.files import write_atomically

MAX_ARCHIVE_BYTES = 64 << 20
MAX_UNPACKED_BYTES = 256 << 20
MAX_FILES = 5_000

_JSON = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sdist:
    """An unpacked source archive."""

    name: str
    version: str
    sha256: str
    """Of the archive, in hexadecimal."""
    files: Mapping[str, bytes]
    """Path below the archive's one directory -> content, sorted by path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Link:
    url: str
    filename: str
    sha256: str
    """Empty where the index gives none."""
    uploaded: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSdist:
    """A source archive that the index offers."""

    version: str
    uploaded: datetime | None
    """None where the index does not say."""


def configured_index() -> str:
    """Return the URL of the index that pip or uv would ask.

    The first of PIP_INDEX_URL, UV_DEFAULT_INDEX, UV_INDEX_URL, pip's settings, and what uv itself says.

    Raises:
        ConfigError: none of them tells.
    """
    for name in ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        if url := os.environ.get(name, ""):
            return url
    pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    if url := _output(pip):
        return url
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    said = _output([uv, "pip", "compile", "--emit-index-url", "--quiet", "-"]) if uv else ""
    found = re.search(r"^--index-url\s+(\S+)", said, re.MULTILINE)
    if found is None:
        raise ConfigError("no package index is configured: set PIP_INDEX_URL, or install uv")
    return found.group(1)


def _output(argv: list[str]) -> str:
    done = subprocess.run(argv, input="", capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def fetch_sdist(name: str, version: str, *, index_url: str, cache: Path) -> Sdist:
    """Return the sdist of one version, from `cache` or else from the index.

    Args:
        index_url: of a simple index, over HTTP(S), or a `file:` directory with NAME/index.html in it.
        cache: directory, made where it is missing; an archive in it is believed by its SHA-256 alone.

    Raises:
        PackageError: the index has no such package, version or sdist, cannot be reached, or serves
            other bytes than it says, or the archive is not one of plain files within bounds.
    """
    label = f"{name}=={version}"
    record = cache / f"{_normalized(name)}-{version}.json"
    archive = record.with_suffix(".tar.gz")
    if record.is_file() and archive.is_file():
        sha256: str = orjson.loads(record.read_bytes())["sha256"]
        content = archive.read_bytes()
        if hashlib.sha256(content).hexdigest() == sha256:
            return Sdist(name=name, version=version, sha256=sha256, files=unpacked(label, content))
    link = _find(label, name, version, index_url)
    content = _get(label, link.url)[0]
    if hashlib.sha256(content).hexdigest() != link.sha256:
        raise PackageError(f"{label}: {link.filename} has not the SHA-256 that the index gives")
    files = unpacked(label, content)
    cache.mkdir(parents=True, exist_ok=True)
    write_atomically(archive, content)
    write_atomically(record, orjson.dumps({"sha256": link.sha256, "filename": link.filename}))
    return Sdist(name=name, version=version, sha256=link.sha256, files=files)


def list_sdists(name: str, *, index_url: str) -> list[ListedSdist]:
    """Return the source archives (.tar.gz) of a package, as the index orders them.

    Raises:
        PackageError: the index has no such package, or cannot be reached.
    """
    content, kind, page_url = _get(name, f"{index_url.rstrip('/')}/{_normalized(name)}/")
    links = _json_links(content, page_url) if kind.startswith(_JSON) else _html_links(content, page_url)
    found: list[ListedSdist] = []
    for link in links:
        stem, _, version = link.filename.removesuffix(".tar.gz").rpartition("-")
        if link.filename.endswith(".tar.gz") and _normalized(stem) == _normalized(name):
            found.append(ListedSdist(version=version, uploaded=link.uploaded))
    return found


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _find(label: str, name: str, version: str, index_url: str) -> _Link:
    page_url = f"{index_url.rstrip('/')}/{_normalized(name)}/"
    content, kind, page_url = _get(label, page_url)
    links = _json_links(content, page_url) if kind.startswith(_JSON) else _html_links(content, page_url)
    ending = f"-{version}.tar.gz"
    for link in links:
        stem = link.filename.removesuffix(ending)
        if link.filename.endswith(ending) and _normalized(stem) == _normalized(name):
            if not link.sha256:
                raise PackageError(f"{label}: the index gives no SHA-256 for {link.filename}")
            return link
    if any(f"-{version}-" in link.filename or f"-{version}." in link.filename for link in links):
        raise PackageError(f"{label}: the version has no source archive (.tar.gz)")
    raise PackageError(f"{label}: the index has no such version")


def _get(label: str, url: str) -> tuple[bytes, str, str]:
    """Return (content, content type, URL after redirects)."""
    if urlsplit(url).scheme == "file":
        return _read(label, url)
    try:
        headers = {"Accept": f"{_JSON}, text/html;q=0.5, */*;q=0.1"}
        with httpx.stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as response:
            if response.status_code == 404:
                raise PackageError(f"{label}: the index has no such package")
            response.raise_for_status()
            content = bytearray()
            for piece in response.iter_bytes():
                content += piece
                if len(content) > MAX_ARCHIVE_BYTES:
                    raise PackageError(f"{label}: more than {MAX_ARCHIVE_BYTES >> 20} MiB to download")
            return bytes(content), response.headers.get("content-type", ""), str(response.url)
    except httpx.HTTPStatusError as error:
        raise PackageError(f"{label}: the index answers {error.response.status_code}") from None
    except httpx.HTTPError as error:
        raise PackageError(f"{label}: the index cannot be reached ({type(error).__name__})") from None


def _read(label: str, url: str) -> tuple[bytes, str, str]:
    path = Path(unquote(urlsplit(url).path))
    if path.is_dir():
        path = path / "index.html"
    if not path.is_file():
        raise PackageError(f"{label}: the index has no such package")
    if path.stat().st_size > MAX_ARCHIVE_BYTES:
        raise PackageError(f"{label}: more than {MAX_ARCHIVE_BYTES >> 20} MiB to read")
    return path.read_bytes(), "", url


def _json_links(content: bytes, page_url: str) -> list[_Link]:
    return [
        _Link(
            url=urljoin(page_url, file["url"]),
            filename=file["filename"],
            sha256=file.get("hashes", {}).get("sha256", ""),
            uploaded=datetime.fromisoformat(file["upload-time"]) if file.get("upload-time") else None,
        )
        for file in orjson.loads(content)["files"]
    ]


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.urls += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _html_links(content: bytes, page_url: str) -> list[_Link]:
    parser = _Anchors()
    parser.feed(content.decode(errors="replace"))
    links: list[_Link] = []
    for target in parser.urls:
        url, fragment = urldefrag(urljoin(page_url, target))
        links.append(
            _Link(
                url=url,
                filename=unquote(urlsplit(url).path.rpartition("/")[2]),
                sha256=fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else "",
            )
        )
    return links


def unpacked(label: str, archive: bytes) -> dict[str, bytes]:
    """Return path -> content of a .tar.gz, its one top directory cut off.

    Raises:
        PackageError: it is no such archive, it unpacks to too much, or a member is a link, a device, a
            path outside the top directory, or there twice.
    """
    try:
        # Bounded before tarfile sees it: a header alone may claim any size.
        inflater = zlib.decompressobj(wbits=31)
        content = inflater.decompress(archive, MAX_UNPACKED_BYTES + 1)
    except zlib.error:
        raise PackageError(f"{label}: the archive is no gzip file") from None
    if len(content) > MAX_UNPACKED_BYTES:
        raise PackageError(f"{label}: the archive unpacks to more than {MAX_UNPACKED_BYTES >> 20} MiB")
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                if not member.isdir():
                    path = _member_path(label, member, files)
                    file = tar.extractfile(member)
                    assert file is not None
                    files[path] = file.read()
    except tarfile.TarError as error:
        raise PackageError(f"{label}: the archive is broken ({error})") from None
    if not files:
        raise PackageError(f"{label}: the archive is empty")
    for path in files:
        if any(parent.as_posix() in files for parent in PurePosixPath(path).parents):
            raise PackageError(f"{label}: the archive holds {path!r} below a file")
    return dict(sorted(files.items()))


def _member_path(label: str, member: tarfile.TarInfo, seen: Mapping[str, bytes]) -> str:
    parts = PurePosixPath(member.name).parts
    if not member.isreg() or member.issparse():
        raise PackageError(f"{label}: the archive holds a link, a device or a sparse file, {member.name!r}")
    if member.name.startswith("/") or ".." in parts or "\\" in member.name or "\0" in member.name:
        raise PackageError(f"{label}: the archive holds an unsafe path, {member.name!r}")
    path = "/".join(parts[1:])
    if not path or path in seen:
        raise PackageError(f"{label}: the archive holds {member.name!r} twice, or outside its directory")
    if len(seen) >= MAX_FILES:
        raise PackageError(f"{label}: the archive holds more than {MAX_FILES} files")
    return path
