"""`pilotage login`, `capacity` and `jobs`, against a service on a socket: output, exit codes, files."""

import io
import json
import socket
import stat
import threading
from collections.abc import Generator
from hashlib import sha256
from pathlib import Path

import pytest
import uvicorn
from tests.client.tiny_core import TinyCore

from pilotage.cli.commands import run
from pilotage.client import default_comment
from pilotage.wire.core import CheckpointRecord

TOKEN = "tok-0123456789abcdef"


class Served:
    """A service on a socket, and the environment that points to it."""

    def __init__(self, core: TinyCore, base_url: str, home: Path) -> None:
        self.core = core
        self.base_url = base_url
        self.home = home


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Served]:
    core = TinyCore()
    listener = socket.create_server(("127.0.0.1", 0))
    base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = uvicorn.Server(uvicorn.Config(core.app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    for name in ("ARCTIC_CORTEX_HOST", "ARCTIC_CORTEX_PAT", "ARCTIC_CORTEX_JOB_COMMENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SNOWFLAKE_HOME", str(tmp_path / "snowflake"))
    monkeypatch.setenv("ARCTIC_CORTEX_BASE_URL", base_url)
    try:
        yield Served(core, base_url, tmp_path)
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def failing(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """Run a command that must end with `code`; returns its one line on stderr."""
    assert run(list(argv)) == code
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith("pilotage: ")
    assert printed.out == ""
    return line


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must succeed; returns what it printed."""
    assert run(list(argv)) == 0
    return capsys.readouterr().out


# --- jobs ---


def test_capacity_is_a_table_or_json(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "capacity").splitlines()
    assert lines[0].split() == ["hardware", "total", "in", "use", "pending", "available"]
    assert [line.split() for line in lines[1:]] == [[k, "8", "2", "0", "6"] for k in ("H200", "B200", "B300")]
    found = json.loads(printed(capsys, "capacity", "--hardware", "H200", "--json"))
    assert found["H200"]["available_gpus"] == 6
    assert list(found) == ["H200"]


def test_list_filters_by_status_and_by_comment(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.core.jobs |= {"a": {"comment": default_comment()}, "b": {"comment": "other"}}
    served.core.status = "running"
    both = json.loads(printed(capsys, "jobs", "list", "--status", "active", "--json"))
    assert [job["job_id"] for job in both["jobs"]] == ["a", "b"]
    mine = json.loads(printed(capsys, "jobs", "list", "--mine", "--json"))
    assert [job["job_id"] for job in mine["jobs"]] == ["a"]
    assert json.loads(printed(capsys, "jobs", "list", "--status", "done", "--json")) == {"jobs": []}
    assert "running" in printed(capsys, "jobs", "list").splitlines()[1]
    assert "--status is of pending" in failing(capsys, 2, "jobs", "list", "--status", "runing")


def test_cancel_needs_force_for_a_job_with_another_comment(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.core.jobs["a"] = {"comment": "team-b"}
    served.core.status = "running"
    assert "has the comment 'team-b', not yours" in failing(capsys, 9, "jobs", "cancel", "a")
    assert served.core.status == "running"
    monkeypatch.setenv("ARCTIC_CORTEX_JOB_COMMENT", "team-b")
    assert printed(capsys, "jobs", "cancel", "a") == "cancelled a\n"
    assert served.core.status == "cancelled"
    served.core.status = "running"
    monkeypatch.delenv("ARCTIC_CORTEX_JOB_COMMENT")
    assert json.loads(printed(capsys, "jobs", "cancel", "a", "--force", "--json")) == {
        "cancelled": True,
        "job_id": "a",
    }


def test_each_way_to_fail_has_its_exit_code(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.core.jobs["a"] = {}
    assert "no job b here" in failing(capsys, 4, "jobs", "get", "b")
    served.core.status, served.core.polls_until_running = "pending", 1_000
    assert "was still pending" in failing(capsys, 8, "jobs", "wait", "a", "--timeout", "0.2")
    assert served.core.status == "pending"  # a wait gives up; it does not cancel
    served.core.status = "terminated"
    assert "has ended: terminated" in failing(capsys, 9, "jobs", "cancel", "a", "--force")
    served.core.token = TOKEN
    assert "give a valid token" in failing(capsys, 3, "capacity")
    served.core.status, served.core.reason = "failed", "pending_timeout"
    assert run(["jobs", "wait", "a"]) == 6
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == ["  ERROR engine: out of memory", "pilotage: job a is failed: pending_timeout"]


def test_no_connection_is_a_usage_error(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ARCTIC_CORTEX_BASE_URL")
    assert "run `pilotage login`" in failing(capsys, 2, "capacity")


def test_wait_get_logs_and_metrics(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.core.jobs["a"] = {}
    assert json.loads(printed(capsys, "jobs", "wait", "a", "--json"))["status"] == "running"
    assert "running" in printed(capsys, "jobs", "get", "a")
    assert printed(capsys, "jobs", "logs", "a").splitlines() == served.core.log
    records = json.loads(printed(capsys, "jobs", "metrics", "a", "--json"))["records"]
    assert [record["cursor"] for record in records] == [0, 1, 2]
    assert "grad_norm 2" in printed(capsys, "jobs", "metrics", "a").splitlines()[-1]


# --- checkpoints ---


def checkpoint(core: TinyCore, files: dict[str, bytes]) -> None:
    """Keep a checkpoint of these files in the service."""
    digest = sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0{sha256(files[name]).hexdigest()}\n".encode())
    record = CheckpointRecord(
        checkpoint_id="c1",
        checkpoint_type="resumable",
        global_steps=3,
        weights_version=3,
        created_at="2026-01-01T00:00:00Z",
        size_bytes=sum(map(len, files.values())),
        sha256=digest.hexdigest(),
    )
    core.jobs["a"], core.files, core.saved = {}, files, {"c1": (1.0, record)}


def test_export_writes_the_newest_checkpoint_checked_by_digest(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"\0" * 100_000}
    checkpoint(served.core, files)
    assert "c1" in printed(capsys, "jobs", "checkpoints", "a").splitlines()[1]
    out = served.home / "out"
    said = json.loads(printed(capsys, "jobs", "export", "a", "--out", str(out), "--json"))
    assert (said["num_files"], said["size_bytes"], said["is_digest_checked"]) == (2, 100_002, True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    assert "exists already" in failing(capsys, 2, "jobs", "export", "a", "--out", str(out))


def test_an_export_that_arrives_damaged_leaves_nothing(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(served.core, {"model.safetensors": b"good"})
    served.core.files = {"model.safetensors": b"evil"}
    line = failing(capsys, 7, "jobs", "export", "a", "c1", "--out", str(served.home / "out"))
    assert "arrived with another digest" in line
    assert [path.name for path in served.home.iterdir() if "out" in path.name] == []


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "..", "a\\b"])
def test_a_file_name_that_leaves_the_directory_is_refused(
    name: str, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint(served.core, {name: b"x"})
    line = failing(capsys, 7, "jobs", "export", "a", "c1", "--out", str(served.home / "out"))
    assert "is no path below a directory" in line
    assert not (served.home / "evil").exists()


def test_a_checkpoint_that_is_not_there(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(served.core, {"f": b"x"})
    out = str(served.home / "out")
    assert "has no checkpoint c2" in failing(capsys, 4, "jobs", "export", "a", "c2", "--out", out)
    served.core.saved.clear()
    assert "has no checkpoints" in failing(capsys, 4, "jobs", "export", "a", "--out", out)


# --- login ---


def log_in(served: Served, monkeypatch: pytest.MonkeyPatch, *more: str, token: str = TOKEN) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{token}\n"))
    monkeypatch.delenv("ARCTIC_CORTEX_BASE_URL", raising=False)
    return run(["login", "--base-url", served.base_url, "--pat-stdin", *more])


def test_login_keeps_a_private_file_that_later_commands_use(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.core.token = TOKEN
    assert log_in(served, monkeypatch, "--json") == 0
    shown = capsys.readouterr()
    path = served.home / "config" / "pilotage" / "login.json"
    assert json.loads(shown.out)["file"] == str(path)
    assert TOKEN not in shown.out + shown.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [p.name for p in path.parent.iterdir()] == ["login.json"]
    assert "H200" in printed(capsys, "capacity")


def test_a_login_that_the_service_refuses_keeps_nothing(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.core.token = TOKEN
    assert log_in(served, monkeypatch, token="wrong-token-value") == 3
    shown = capsys.readouterr()
    assert "give a valid token" in shown.err
    assert "wrong-token-value" not in shown.out + shown.err
    written = [path for path in served.home.rglob("*") if path.is_file()]
    assert all(b"wrong-token-value" not in path.read_bytes() for path in written)


def test_login_refuses_a_place_where_others_can_look_or_write(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = served.home / "config" / "pilotage" / "login.json"
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_text("{}")
    path.chmod(0o644)
    assert log_in(served, monkeypatch) == 2
    assert f"others may read {path}" in capsys.readouterr().err
    path.unlink()
    path.parent.chmod(0o777)
    assert log_in(served, monkeypatch) == 2
    assert f"others may write to {path.parent}" in capsys.readouterr().err
    assert list(path.parent.iterdir()) == []


def test_login_without_a_terminal_says_which_option_is_missing(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "there is no terminal to ask for the account host" in failing(capsys, 2, "login")
    line = failing(capsys, 2, "login", "--host", "org-account.snowflakecomputing.com")
    assert "pipe it in and give --pat-stdin" in line


def test_a_token_is_no_option(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["login", "--pat", TOKEN])
    assert caught.value.code == 2
