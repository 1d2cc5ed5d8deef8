"""Which training service, and with which token.

Sources, first to last:

    1. what the caller gives (a recipe's `cortex` section, a command's options);
    2. ARCTIC_CORTEX_BASE_URL or _HOST, with _PAT, _DATABASE, _SCHEMA, _ENDPOINT, _CA_FILE;
    3. the stock client's environment: CORTEX_TRAINING_CONNECTION (a Snowflake profile),
       CORTEX_TRAINING_CONFIG (a JSON file), CORTEX_TRAINING_BASE_URL, _HOST, _PAT, _DATABASE, _SCHEMA,
       _ENDPOINT, and SNOWFLAKE_HOST, _PAT, _DATABASE, _SCHEMA where those are not set;
    4. the file that `pilotage login` wrote;
    5. what the stock client's `login` remembers;
    6. Snowflake's default profile.

The server is that of the first source that names one. The token, and every other field, is that of the first
source that gives it and names the same server or none: a token is never sent to a server that it was not
given for. A host, which is Snowflake's, needs a token; a base URL may go without.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, urlsplit

from pilotage.client.secret import Secret
from pilotage.client.sources import (
    LOOPBACK,
    Fields,
    fields_of,
    from_default_profile,
    from_environment,
    from_json_file,
    from_login,
    from_named_profile,
    from_stock_environment,
    from_stock_login,
)
from pilotage.errors import ConfigError

DATABASE, SCHEMA, ENDPOINT = "CORTEX_TRAINING_DB", "PUBLIC", "cortex-training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A training service and the right to use it."""

    origin: str
    """Scheme, host and port."""
    token: Secret | None = field(default=None, repr=False)
    database: str = DATABASE
    schema: str = SCHEMA
    endpoint: str = ENDPOINT
    ca_file: Path | None = None
    """PEM file of the CA that signed the server's certificate; absent is the system's CAs."""
    source: str = ""
    """Where it is written down, in words."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.origin)
        if parts.scheme == "http" and self.token is not None and parts.hostname not in LOOPBACK:
            raise ConfigError(f"{self.origin}: a token is sent over TLS only; use https://")
        if self.ca_file is not None and not self.ca_file.is_file():
            raise ConfigError(f"ca_file {self.ca_file} is not there")

    @property
    def is_loopback(self) -> bool:
        """Whether the service is on this machine."""
        return urlsplit(self.origin).hostname in LOOPBACK

    @property
    def prefix(self) -> str:
        """Path that all calls start with."""
        database, schema, endpoint = (quote(p, safe="") for p in (self.database, self.schema, self.endpoint))
        return f"/api/v2/databases/{database}/schemas/{schema}/{endpoint}"

    def redact(self, text: str) -> str:
        """Return `text` without the token's value."""
        return text if self.token is None else self.token.redact(text)


def resolve_connection(
    *,
    base_url: str | None = None,
    host: str | None = None,
    token: Secret | None = None,
    database: str | None = None,
    schema: str | None = None,
    endpoint: str | None = None,
    ca_file: Path | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Connection:
    """Find the connection by the order above.

    Raises:
        ConfigError: no source names a server, a host comes without a token, or a source that is read is
            wrong. Sources after the first that has all that is needed are not read.
    """
    values = {
        "base_url": base_url,
        "host": host,
        "database": database,
        "schema": schema,
        "endpoint": endpoint,
        "ca_file": None if ca_file is None else str(ca_file),
    }
    given = replace(fields_of(values, source="the given connection"), token=token)
    sources: list[Fields] = []
    for source in itertools.chain((given,), _sources(environment)):
        sources.append(source)
        server = next((s for s in sources if s.origin is not None), None)
        if server is not None and _token(server, sources) is not None:
            break
    server = next((s for s in sources if s.origin is not None), None)
    if server is None:
        raise ConfigError(
            "no training service is configured: run `pilotage login`, or set ARCTIC_CORTEX_BASE_URL, or"
            " ARCTIC_CORTEX_HOST and ARCTIC_CORTEX_PAT"
        )
    return _merged(server, sources)


def _sources(environment: Mapping[str, str]) -> Iterator[Fields]:
    """Yield the sources from the second on, reading each only when it is asked for."""
    yield from_environment(environment)
    if profile := environment.get("CORTEX_TRAINING_CONNECTION"):
        yield from_named_profile(profile, environment)
    if config := environment.get("CORTEX_TRAINING_CONFIG"):
        yield from_json_file(Path(config).expanduser())
    for read in (from_stock_environment, from_login, from_stock_login, from_default_profile):
        found = read(environment)
        if found is not None:
            yield found


def _token(server: Fields, sources: Sequence[Fields]) -> Secret | None:
    fitting = (source.token for source in sources if source.origin in (None, server.origin))
    return next((token for token in fitting if token is not None), None)


def _merged(server: Fields, sources: Sequence[Fields]) -> Connection:
    assert server.origin is not None
    token = _token(server, sources)
    if server.needs_token and token is None:
        raise ConfigError(
            f"{server.source} names {server.origin} without a token: set ARCTIC_CORTEX_PAT, or run"
            " `pilotage login`"
        )
    fitting = [source for source in sources if source.origin in (None, server.origin)]
    return Connection(
        origin=server.origin,
        token=token,
        database=next((s.database for s in fitting if s.database), DATABASE),
        schema=next((s.schema for s in fitting if s.schema), SCHEMA),
        endpoint=next((s.endpoint for s in fitting if s.endpoint), ENDPOINT),
        ca_file=next((s.ca_file for s in fitting if s.ca_file), None),
        source=server.source,
    )
