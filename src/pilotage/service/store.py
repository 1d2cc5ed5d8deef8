"""What must survive a restart of the front: jobs and tokens, in SQLite.

One connection, used from one thread at a time; WAL, so that `pilotage token` can write beside a running
service. A write is on disk when the call returns. The schema is made and checked at open.
"""

import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from pilotage.errors import ConfigError

_VERSION = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (id TEXT PRIMARY KEY, created_at REAL NOT NULL, content TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (digest TEXT PRIMARY KEY, owner TEXT NOT NULL, created_at REAL NOT NULL);
"""


class Store:
    """The service's database."""

    def __init__(self, path: Path) -> None:
        """Open or create it.

        Raises:
            ConfigError: the file is something else, or of another version.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self._lock = threading.Lock()  # readers of tokens and the writer of jobs share one connection
        self._connection = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise ConfigError(f"{path} has version {version}, this program reads {_VERSION}")
            self._connection.executescript(_SCHEMA)
            self._connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is no database of the service: {error}") from None

    def put_job(self, job_id: str, created_at: float, content: str) -> None:
        """Write a job, new or known."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT INTO jobs VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE SET content = excluded.content",
                (job_id, created_at, content),
            )

    def jobs(self) -> list[str]:
        """Return the content of all jobs, oldest first."""
        with self._transaction() as connection:
            rows = connection.execute("SELECT content FROM jobs ORDER BY created_at, id").fetchall()
        return [content for (content,) in rows]

    def add_token(self, digest: str, owner: str, created_at: float) -> None:
        """Write a token's digest."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO tokens VALUES (?, ?, ?)", (digest, owner, created_at))

    def revoke_tokens(self, owner: str) -> int:
        """Remove all tokens of an owner; returns how many there were."""
        with self._transaction() as connection:
            return connection.execute("DELETE FROM tokens WHERE owner = ?", (owner,)).rowcount

    def tokens(self) -> dict[str, str]:
        """Return the owner of every digest."""
        with self._transaction() as connection:
            return dict(connection.execute("SELECT digest, owner FROM tokens").fetchall())

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")
