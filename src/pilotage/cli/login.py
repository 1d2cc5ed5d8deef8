"""`pilotage login`: ask for a connection, prove it, and keep it where only its owner can read it."""

import argparse
import getpass
import json
import os
import sys
from pathlib import Path

from pilotage.client import Connection, Http, Jobs, Patience
from pilotage.client.secret import Secret
from pilotage.client.sources import fields_of, login_file, secret_of
from pilotage.errors import ConfigError
from pilotage.files import write_atomically


async def login(arguments: argparse.Namespace) -> int:
    """Ask for what is missing, verify, and write the login file."""
    path = login_file()
    _check_place(path)
    if arguments.base_url is None and arguments.host is None:
        arguments.host = _ask("account host (or give --base-url)", None)
    texts = {
        "base_url": arguments.base_url,
        "host": arguments.host,
        "database": arguments.database,
        "schema": arguments.schema,
        "endpoint": arguments.endpoint,
        "ca_file": None if arguments.ca_file is None else str(arguments.ca_file.expanduser().resolve()),
    }
    fields = fields_of(texts, source="login")
    if fields.origin is None:
        raise ConfigError("give a host, or --base-url")
    token = _token(arguments, needed=fields.needs_token)
    given = {key: value for key, value in texts.items() if value}
    if "host" in given:
        given["host"] = fields.origin.removeprefix("https://")
    defaults = Connection(origin=fields.origin)
    connection = Connection(
        origin=fields.origin,
        token=token,
        database=fields.database or defaults.database,
        schema=fields.schema or defaults.schema,
        endpoint=fields.endpoint or defaults.endpoint,
        ca_file=fields.ca_file,
        source="login",
    )
    async with Http(connection, patience=Patience(total_s=10.0)) as http:
        await Jobs(http).capacity("H200")
    if token is not None:
        given["pat"] = token.reveal()
    _write(path, given)
    _report(arguments, connection, path)
    return 0


def _check_place(path: Path) -> None:
    """Refuse a directory that others may write to, and a file that others may read.

    Raises:
        ConfigError: so it is.
    """
    parent = path.parent
    if parent.exists() and parent.stat().st_mode & 0o022:
        raise ConfigError(f"others may write to {parent}; make it private: chmod 700 {parent}")
    if path.exists() and path.stat().st_mode & 0o077:
        raise ConfigError(
            f"others may read {path}, so its token is no secret any more: revoke it, and remove the file"
        )


def _write(path: Path, content: dict[str, str]) -> None:
    if not path.parent.exists():
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700)
        os.chmod(path.parent, 0o700)  # whatever the umask
    write_atomically(path, f"{json.dumps(content, indent=2)}\n".encode(), mode=0o600)


def _token(arguments: argparse.Namespace, *, needed: bool) -> Secret | None:
    """Read the token from standard input or a hidden prompt; never from the command line."""
    if arguments.pat_stdin:
        return secret_of(sys.stdin.readline(), source="standard input")
    if not sys.stdin.isatty():
        if needed:
            raise ConfigError("there is no terminal to ask for the token; pipe it in and give --pat-stdin")
        return None
    typed = getpass.getpass("token (hidden): " if needed else "token (hidden, empty for none): ").strip()
    if not typed and not needed:
        return None
    return secret_of(typed, source="the token")


def _ask(question: str, default: str | None) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"there is no terminal to ask for the {question}; give it as an option")
    sys.stderr.write(f"{question}{f' [{default}]' if default else ''}: ")
    sys.stderr.flush()
    return sys.stdin.readline().strip() or default or ""


def _report(arguments: argparse.Namespace, connection: Connection, path: Path) -> None:
    """Say what is in effect; the token is never part of it."""
    summary = {
        "server": connection.origin,
        "database": connection.database,
        "schema": connection.schema,
        "endpoint": connection.endpoint,
        "has_token": connection.token is not None,
        "file": str(path),
    }
    if arguments.json:
        print(json.dumps(summary, indent=2, sort_keys=True))
    else:
        print(f"logged in to {connection.origin}; kept in {path}")
