"""SWE-smith rows to tasks: rows and trees of our own making, in the schema of the hub."""

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.datasets.docker_engine import DockerEngine

from pilotage.cli import main
from pilotage.datasets.patches import PatchError, apply_patch, git_blob, read_patch
from pilotage.datasets.swe_smith import (
    SWE_SMITH,
    CloneTrees,
    ImageTrees,
    Row,
    SdistTrees,
    TaskOptions,
    check_rows,
    read_rows,
    write_swe_smith_tasks,
)
from pilotage.datasets.swe_smith.rows import Orientation, read_instance_id
from pilotage.datasets.swe_smith.trees import NoTreeError, two_versions
from pilotage.errors import ConfigError

CLEAN = "class C:\n    def m(self):\n        return 1\n\n\ndef g():\n    return 2\n"
BUGGY = CLEAN.replace("return 1", "return 9")
COMMIT = "0123abcd"


def patch_between(before: str, after: str, path: str = "pkg/a.py") -> str:
    """Return what git prints between two versions of a file."""
    done = subprocess.run(
        ["git", "hash-object", "--stdin"], input=before.encode(), capture_output=True, check=True
    )
    blob = done.stdout.decode()[:7]
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    removed = "".join(f"-{line}" for line in old)
    added = "".join(f"+{line}" for line in new)
    return (
        f"diff --git a/{path} b/{path}\nindex {blob}..fffffff 100644\n--- a/{path}\n+++ b/{path}\n"
        f"@@ -1,{len(old)} +1,{len(new)} @@\n{removed}{added}"
    )


PATCH = patch_between(CLEAN, BUGGY)
NEWLINE_ONLY = patch_between("x = 1\n", "x = 1\n").replace(
    "-x = 1\n", "-x = 1\n\\ No newline at end of file\n"
)
CHANGES = {
    "edited_modules": ["pkg/a.py:C"],
    "edited_entities": ["pkg/a.py:C.m"],
    "added_modules": None,
    "added_entities": None,
}


def raw(number: int = 1, **fields: Any) -> dict[str, Any]:
    name = f"acme__toy.kit.{COMMIT}"
    return {
        "instance_id": f"{name}.func_basic__{number:08d}",
        "repo": f"swesmith/{name}",
        "problem_statement": f"m returns the wrong number ({number})",
        "patch": PATCH,
        "file_changes": [{"file": "pkg/a.py", "changes": CHANGES}],
    } | fields


def row(number: int = 1, orientation: Orientation = SWE_SMITH.orientation, **fields: Any) -> Row:
    [found] = check_rows([raw(number, **fields)], orientation).rows
    return found


def write_sdist(index: Path, name: str, version: str, files: dict[str, str]) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for path, text in files.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    directory = index / name
    directory.mkdir(parents=True, exist_ok=True)
    archive = f"{name}-{version}.tar.gz"
    (directory / archive).write_bytes(content.getvalue())
    page = directory / "index.html"
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    link = f'<a href="{archive}#sha256={digest}">{archive}</a>\n'
    page.write_text((page.read_text() if page.exists() else "") + link)


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A package index with one package: an older, the right and a newer version."""
    index = tmp_path / "index"
    others = {"pkg/other.py": "x = 1\n", "PKG-INFO": "Version: 1", "toy_kit.egg-info/SOURCES.txt": ""}
    write_sdist(index, "toy-kit", "1.0", others | {"pkg/a.py": "# first\n" + CLEAN})
    write_sdist(index, "toy-kit", "1.1", others | {"pkg/a.py": CLEAN})
    write_sdist(index, "toy-kit", "1.2", others | {"pkg/a.py": CLEAN + "\n\ndef new():\n    pass\n"})
    return index


def sdist_trees(index: Path) -> SdistTrees:
    return SdistTrees(index_url=index.as_uri(), cache=index.parent / "cache")


# --- rows ---


def test_an_id_is_read_from_the_right() -> None:
    name = "pdfminer__pdfminer.six.1a8bd2f7"
    assert read_instance_id(f"{name}.pr_12", f"swesmith/{name}") == (
        "pdfminer",
        "pdfminer.six",
        "1a8bd2f7",
        "pr",
    )
    kind = "func_pm_op_swap"
    assert read_instance_id(f"{name}.{kind}__0abc1234", f"swesmith/{name}")[3] == kind


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"problem_statement": " \n"}, "the issue text is blank"),
        ({"problem_statement": None}, "the issue text is blank"),
        ({"patch": ""}, "the patch is empty"),
        ({"patch": "@@ -1 +1 @@\n-a"}, "the patch does not parse"),
        ({"patch": PATCH.replace("pkg/a.py", "../a.py")}, "the patch leaves the tree"),
        ({"patch": PATCH.replace("100644", "120000")}, "the patch holds a symbolic link"),
        ({"patch": PATCH + "GIT binary patch\nliteral 0\n"}, "the patch holds a binary file"),
        ({"file_changes": []}, "no gold file"),
        ({"file_changes": [{"file": "b.py", "changes": {}}]}, "a gold file is not in the patch"),
        (
            {"file_changes": [{"file": "pkg/a.py", "changes": {"edited_modules": ["b.py:C"]}}]},
            "a gold place is not in its own file",
        ),
        (
            {"patch": PATCH + patch_between("x = 1\n", "x = 2\n", "b.py")},
            "the patch touches a file that is not gold",
        ),
        ({"patch": NEWLINE_ONLY}, "no gold file"),
        ({"instance_id": "acme__toy.func"}, "instance_id is not owner__name.commit.kind"),
        ({"repo": "swesmith/acme__other.0123abcd"}, "repo and instance_id disagree"),
    ],
)
def test_a_row_of_no_use_is_counted_by_its_reason(fields: dict[str, Any], reason: str) -> None:
    found = check_rows([raw(1), raw(2, **fields)], Orientation.INTRODUCES_BUG)
    assert len(found.rows) == 1
    assert found.drops == Counter([reason])


def test_a_line_that_moves_is_a_change() -> None:
    header = "--- a/pkg/a.py\n+++ b/pkg/a.py\n"
    assert not read_patch(f"{header}@@ -1,2 +1,2 @@\n-x = 1\n y = x\n+x = 1\n").files[0].is_blank
    assert read_patch(f"{header}@@ -1,1 +1,1 @@\n-x = 1\n+x = 1  \n").files[0].is_blank


def test_a_second_row_of_an_id_is_dropped() -> None:
    found = check_rows([raw(1), raw(1)], Orientation.INTRODUCES_BUG)
    assert (len(found.rows), found.drops) == (1, {"a second row with the same instance_id": 1})


def write_shards(directory: Path) -> list[Path]:
    """Write two shards; the first has only nulls where the second has strings."""
    paths: list[Path] = []
    for number, added in enumerate([None, ["pkg/a.py:C.new"]]):
        changes = {"file": "pkg/a.py", "changes": CHANGES | {"added_entities": added}}
        path = directory / f"train-0000{number}-of-00002.parquet"
        record = raw(
            number, file_changes=[changes], base_commit=None if number == 0 else "abc", use_patch=True
        )
        pq.write_table(pa.Table.from_pylist([record]), path)
        paths.append(path)
    return paths


def test_shards_whose_columns_are_null_have_the_same_features(tmp_path: Path) -> None:
    rows = list(read_rows(SWE_SMITH, parquet=write_shards(tmp_path)))
    assert [record["instance_id"][-1] for record in rows] == ["0", "1"]
    assert rows[0]["file_changes"][0]["changes"]["edited_modules"] == ["pkg/a.py:C"]


def test_a_file_that_is_no_parquet_and_a_short_revision_are_refused(tmp_path: Path) -> None:
    text = tmp_path / "rows.parquet"
    text.write_text("no")
    with pytest.raises(ConfigError, match=r"rows.parquet cannot be read: "):
        list(read_rows(SWE_SMITH, parquet=[text]))
    with pytest.raises(ConfigError, match=r"no such parquet file"):
        list(read_rows(SWE_SMITH, parquet=[tmp_path / "gone.parquet"]))
    with pytest.raises(ConfigError, match=r"--revision needs a full commit of .*; got 'main'"):
        list(read_rows(SWE_SMITH, revision="main"))


# --- patches and trees ---


def test_a_patch_applies_forwards_and_backwards() -> None:
    patch = read_patch(PATCH)
    tree = {"pkg/a.py": CLEAN.encode(), "b.py": b"kept"}
    patched = apply_patch(patch, tree)
    assert patched == {"pkg/a.py": BUGGY.encode(), "b.py": b"kept"}
    assert apply_patch(patch, patched, reverse=True) == tree
    with pytest.raises(PatchError, match="does not apply"):
        apply_patch(patch, {"pkg/a.py": b"something else\n"})


def test_the_blob_hash_is_gits() -> None:
    assert git_blob(CLEAN.encode()).startswith(read_patch(PATCH).files[0].clean_blob)


def test_the_archive_with_exactly_the_patched_files_is_chosen(index: Path) -> None:
    tree = sdist_trees(index).tree_of(row())
    assert (tree.origin, tree.is_exact) == ("toy.kit==1.1", True)
    assert set(tree.files) == {"pkg/a.py", "pkg/other.py"}  # not what only archives have


def test_an_archive_that_the_patch_applies_to_is_second_best(index: Path) -> None:
    moved = patch_between(CLEAN, BUGGY).replace(git_blob(CLEAN.encode())[:7], "1234567")
    tree = sdist_trees(index).tree_of(row(patch=moved))
    assert (tree.origin, tree.is_exact) == ("toy.kit==1.1", False)


def test_a_row_without_a_package_or_a_fitting_archive_has_a_reason(index: Path) -> None:
    trees = sdist_trees(index)
    foreign = patch_between("y = 1\n", "y = 2\n")
    with pytest.raises(NoTreeError, match="the patch applies to no source archive"):
        trees.tree_of(row(patch=foreign))
    name = f"acme__unknown.{COMMIT}"
    with pytest.raises(NoTreeError, match="no package of the repository's name"):
        trees.tree_of(row(instance_id=f"{name}.func_basic__00000001", repo=f"swesmith/{name}"))


def test_a_mirror_is_cloned_once_and_comes_without_history(tmp_path: Path) -> None:
    mirror = tmp_path / "hub" / f"acme__toy.kit.{COMMIT}"
    mirror.mkdir(parents=True)
    (mirror / "pkg").mkdir()
    (mirror / "pkg" / "a.py").write_text(CLEAN)
    (mirror / "link.py").symlink_to("/etc/passwd")
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(mirror), *arguments], check=True)
    trees = CloneTrees(base_url=f"{(tmp_path / 'hub').as_uri()}/", clones=tmp_path / "clones")

    tree = trees.tree_of(row())

    assert (tree.files, tree.is_exact) == ({"pkg/a.py": CLEAN.encode()}, True)
    mirror.rename(tmp_path / "gone")
    assert trees.tree_of(row()).files == tree.files
    with pytest.raises(NoTreeError, match="git cannot clone"):
        CloneTrees(base_url=f"{tmp_path.as_uri()}/", clones=tmp_path / "other").tree_of(row())


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerEngine]:
    """Let the docker program talk to an engine of ours that holds one image."""
    if shutil.which("docker") is None:
        pytest.skip("needs the docker program")
    with DockerEngine(images={f"kit/acme_1776_toy.kit.{COMMIT}": image_files()}) as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        yield engine


def image_files() -> bytes:
    """Return what the engine sends of a /testbed where a repository was cloned, installed and run."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name in (
            "testbed/pkg/a.py",
            "testbed/.git/config",
            "testbed/pkg/__pycache__/a.cpython-312.pyc",
            "testbed/toy.egg-info/PKG-INFO",
            "testbed/../etc/crontab",
            "elsewhere/b.py",
        ):
            member = tarfile.TarInfo(name)
            member.size = len(CLEAN)
            tar.addfile(member, io.BytesIO(CLEAN.encode()))
        link = tarfile.TarInfo("testbed/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return content.getvalue()


def test_an_image_gives_its_repository_and_is_copied_once_from_a_container_that_never_starts(
    engine: DockerEngine,
) -> None:
    trees = ImageTrees(prefix="kit/")

    tree = trees.tree_of(row())

    assert (tree.files, tree.is_exact) == ({"pkg/a.py": CLEAN.encode()}, True)
    assert tree.origin == f"kit/acme_1776_toy.kit.{COMMIT}"
    assert trees.tree_of(row()).files == tree.files
    assert engine.asked == ["create", "archive", "delete"]


def test_rows_without_an_image_are_counted_by_one_reason(engine: DockerEngine, tmp_path: Path) -> None:
    trees = ImageTrees(prefix="other/")

    summary = write_swe_smith_tasks(tmp_path / "out", [row(1), row(2)], trees, TaskOptions())

    assert summary.drops == {"the container engine cannot get the image": 2}
    assert engine.asked == ["create"]  # the second row is not asked for again


def test_an_image_without_a_repository_is_a_reason_too(engine: DockerEngine) -> None:
    engine.images = dict.fromkeys(engine.images)
    with pytest.raises(NoTreeError, match="no /testbed"):
        ImageTrees(prefix="kit/").tree_of(row())
    assert engine.asked == ["create", "delete"]


def test_no_engine_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="a container engine that answers `version`: docker or podman"):
        ImageTrees(prefix="kit/")


def test_the_orientation_says_which_side_the_patch_is_for(index: Path) -> None:
    trees = sdist_trees(index)
    for orientation, expected in (
        (Orientation.INTRODUCES_BUG, (BUGGY, CLEAN)),
        (Orientation.FIXES_BUG, (CLEAN, BUGGY)),
    ):
        found = row(orientation=orientation)
        versions = two_versions(found, trees.tree_of(found))
        assert tuple(version["pkg/a.py"].decode() for version in versions) == expected


# --- tasks ---


def test_a_task_holds_the_buggy_tree_and_the_recomputed_gold(index: Path, tmp_path: Path) -> None:
    wrong = [{"file": "pkg/a.py", "changes": CHANGES | {"edited_entities": ["pkg/a.py:C.n"]}}]
    rows = [row(1), row(2, file_changes=wrong)]
    out = tmp_path / "out"

    summary = write_swe_smith_tasks(out, rows, sdist_trees(index), TaskOptions(held_out_fraction=0))

    task = out / "train" / rows[0].instance_id
    assert (task / "environment" / "pkg" / "a.py").read_text() == BUGGY
    assert json.loads((task / "tests" / "gold.json").read_text()) == {
        "files": ["pkg/a.py"],
        "modules": ["pkg/a.py:C"],
        "functions": ["pkg/a.py:C.m"],
        "empty": "zero",
    }
    assert "m returns the wrong number (1)" in (task / "instruction.md").read_text()
    assert not list(task.rglob(".git*"))
    assert (summary.written, summary.num_exact) == ({"train": 2}, 2)
    assert summary.differences == [f"{rows[1].instance_id}: -pkg/a.py:C.n +pkg/a.py:C.m"]


def test_rows_of_a_repository_are_on_one_side_and_seeds_move_repositories() -> None:
    from pilotage.datasets.swe_smith.tasks import split_of

    repositories = [f"o/{number}" for number in range(400)]
    splits = [
        [split_of(name, TaskOptions(held_out_fraction=0.25, seed=seed)) for name in repositories]
        for seed in (0, 1)
    ]
    assert splits[0] != splits[1]
    assert all(70 < split.count("held_out") < 130 for split in splits)


def test_the_command_writes_tasks_and_counts_what_it_drops(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index.as_uri())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [raw(1), raw(2, problem_statement=""), raw(3, patch=patch_between("y = 1\n", "y = 2\n"))]
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(records), parquet)
    out = tmp_path / "out"
    command = ["data", "swe-smith", "--out", str(out), "--parquet", str(parquet), "--held-out", "0"]

    for _ in range(2):  # a second run finds what the first wrote
        assert main(command) == 0
        said = capsys.readouterr().out
        assert "2 rows can be used, 1 cannot" in said
        assert "     1  the issue text is blank" in said
        assert f"1 tasks in {out}: 1 train, 0 held out" in said
        assert "     1  the patch applies to no source archive of the package" in said
        assert "recomputed gold equals the row's in 1 of 1" in said
    assert json.loads((out / "summary.json").read_text())["written"] == {"train": 1}

    assert main([*command, "--export-swe-smith-to", str(tmp_path / "harbor")]) == 0
    assert (tmp_path / "harbor" / "train" / raw(1)["instance_id"] / "task.toml").is_file()


def test_nothing_usable_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([raw(1, problem_statement="")]), parquet)
    out = tmp_path / "out"
    assert main(["data", "swe-smith", "--out", str(out), "--parquet", str(parquet)]) == 2
    assert "pilotage: no row is left to make a task of\n" in capsys.readouterr().err
    assert not out.exists()
