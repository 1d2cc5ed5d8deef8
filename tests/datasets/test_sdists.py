"""Source archives: found, verified, unpacked; whatever is hostile is refused with one line."""

import gzip
import io
import tarfile
from pathlib import Path

import pytest
from tests.datasets.factory.toy import FILES, add_to_index, archive

from pilotage.datasets import sdists
from pilotage.datasets.sdists import Sdist, configured_index, fetch_sdist, unpacked
from pilotage.errors import PackageError


def fetch(root: Path, name: str = "toybox", version: str = "1.0") -> Sdist:
    return fetch_sdist(name, version, index_url=(root / "index").as_uri(), cache=root / "cache")


def test_an_archive_is_fetched_verified_and_unpacked(tmp_path: Path) -> None:
    add_to_index(tmp_path / "index", "toybox", "1.0", archive(FILES))
    sdist = fetch(tmp_path)
    assert sdist.files == FILES
    assert list(sdist.files) == sorted(FILES)
    assert len(sdist.sha256) == 64


def test_a_cached_archive_needs_no_index(tmp_path: Path) -> None:
    add_to_index(tmp_path / "index", "toybox", "1.0", archive(FILES))
    first = fetch(tmp_path)
    (tmp_path / "index" / "toybox" / "index.html").unlink()
    assert fetch(tmp_path) == first


def test_a_damaged_cache_is_fetched_anew(tmp_path: Path) -> None:
    add_to_index(tmp_path / "index", "toybox", "1.0", archive(FILES))
    first = fetch(tmp_path)
    (cached,) = (tmp_path / "cache").glob("*.tar.gz")
    cached.write_bytes(b"damaged")
    assert fetch(tmp_path) == first


def test_a_name_is_normalized(tmp_path: Path) -> None:
    content = archive(FILES, top="toy_box-1.0")
    page = tmp_path / "index" / "toy-box"
    add_to_index(tmp_path / "index", "toy-box", "1.0", content)
    text = (page / "index.html").read_text().replace("toy-box-1.0", "toy_box-1.0")
    (page / "index.html").write_text(text)
    (page / "toy-box-1.0.tar.gz").rename(page / "toy_box-1.0.tar.gz")
    assert fetch(tmp_path, name="Toy.Box").files == FILES


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("nothing", "1.0", "nothing==1.0: the index has no such package"),
        ("toybox", "2.0", "toybox==2.0: the index has no such version"),
        ("toybox", "9.0", "toybox==9.0: the version has no source archive (.tar.gz)"),
    ],
)
def test_what_the_index_lacks_is_told(tmp_path: Path, name: str, version: str, message: str) -> None:
    add_to_index(tmp_path / "index", "toybox", "1.0", archive(FILES))
    with pytest.raises(PackageError) as caught:
        fetch(tmp_path, name, version)
    assert str(caught.value) == message


def test_other_bytes_than_the_index_says_are_refused(tmp_path: Path) -> None:
    add_to_index(tmp_path / "index", "toybox", "1.0", archive(FILES), sha256="0" * 64)
    with pytest.raises(PackageError, match="has not the SHA-256 that the index gives"):
        fetch(tmp_path)
    assert not (tmp_path / "cache").exists()


def tarball(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return gzip.compress(buffer.getvalue())


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 1) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = size if kind == tarfile.REGTYPE else 0
    info.linkname = "target"
    return info


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tarball(member("top/../../etc/passwd")), "an unsafe path"),
        (tarball(member("/etc/passwd")), "an unsafe path"),
        (tarball(member("top/a\\b")), "an unsafe path"),
        (tarball(member("top/link", tarfile.SYMTYPE)), "a link, a device"),
        (tarball(member("top/link", tarfile.LNKTYPE)), "a link, a device"),
        (tarball(member("top/pipe", tarfile.FIFOTYPE)), "a link, a device"),
        (tarball(member("top/a"), member("top/a")), "twice, or outside"),
        (tarball(member("a")), "twice, or outside"),
        (tarball(member("top/a"), member("top/a/b")), "below a file"),
        (tarball(member("top", tarfile.DIRTYPE)), "is empty"),
        (tarball(), "is empty"),
        (b"no archive", "is no gzip file"),
        (gzip.compress(b"no tar at all" * 100), "is broken"),
        (gzip.compress(bytes(sdists.MAX_UNPACKED_BYTES + 1), 1), "unpacks to more than 256 MiB"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_hostile_archive_is_refused_with_one_line(content: bytes, message: str) -> None:
    with pytest.raises(PackageError, match=message) as caught:
        unpacked("toybox==1.0", content)
    assert str(caught.value).startswith("toybox==1.0: the archive ")
    assert "\n" not in str(caught.value)


def test_a_header_that_claims_too_much_is_refused() -> None:
    content = bytearray(gzip.decompress(tarball(member("top/a", size=512))))
    header = tarfile.TarInfo("top/a")
    header.size = 1 << 40
    content[:512] = header.tobuf(tarfile.GNU_FORMAT)[:512]
    with pytest.raises(PackageError):
        unpacked("toybox==1.0", gzip.compress(bytes(content)))


def test_too_many_files_are_refused() -> None:
    members = [member(f"top/{number}", size=0) for number in range(sdists.MAX_FILES + 1)]
    with pytest.raises(PackageError, match="more than 5000 files"):
        unpacked("toybox==1.0", tarball(*members))


def test_the_index_is_the_one_that_pip_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "file:///here")
    assert configured_index() == "file:///here"
