"""Where a connection may be written down: environment, login files, the stock client's and Snowflake's.

Every source is read into the same `Fields`. A file that holds a token must be readable by its owner only.
"""

import json
import os
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pilotage.client.secret import Secret
from pilotage.errors import ConfigError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

_STOCK_KEYS = frozenset(
    {
        "base_url",
        "host",
        "pat",
        "database",
        "schema",
        "endpoint",
        "poll_interval",
        "poll_timeout",
        "verify_ssl",
        "no_verify_ssl",
    }
)
_ALIASES = {"url": "base_url", "db": "database"}
_TEXTS = ("base_url", "host", "pat", "database", "schema", "endpoint", "ca_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """What one source says; None is what it does not say."""

    source: str
    """In words, for errors."""
    origin: str | None = None
    """Scheme, host and port."""
    token: Secret | None = None
    database: str | None = None
    schema: str | None = None
    endpoint: str | None = None
    ca_file: Path | None = None
    needs_token: bool = False
    """Whether the server was named by a host, which is Snowflake's way, and not by a base URL."""


def origin_of_host(text: str, *, source: str) -> str:
    """Return `https://host[:port]` of a bare host or a pasted URL.

    Raises:
        ConfigError: it is no host, or holds `_`, which no certificate matches.
    """
    parts = urlsplit(text if "//" in text else f"//{text}")
    host = (parts.hostname or "").lower()
    if host == "app.snowflake.com":
        host = _account_host(parts.path)
    if "_" in host:
        raise ConfigError(f"{source}: host {host!r} has an underscore, which no certificate matches; use '-'")
    if not host or any(c not in "abcdefghijklmnopqrstuvwxyz0123456789.-:" for c in host):
        raise ConfigError(f"{source}: {text!r} is no host; give one like org-account.snowflakecomputing.com")
    return f"https://{_with_port(host, parts, source)}"


def _account_host(path: str) -> str:
    """Return the host of https://app.snowflake.com/ORGANISATION/ACCOUNT/..."""
    names = [name for name in path.split("/") if name]
    if len(names) < 2:
        return ""
    return f"{names[0]}-{names[1]}.snowflakecomputing.com".lower().replace("_", "-")


def origin_of_url(text: str, *, source: str) -> str:
    """Return the origin of a base URL, which may have no path, query or user.

    Raises:
        ConfigError: it has, or lacks a scheme.
    """
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{source}: base_url {text!r} needs a scheme, as in https://trainer.example:8443")
    if parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        raise ConfigError(f"{source}: base_url is scheme, host and port only, as in https://trainer:8443")
    host = parts.hostname.lower()
    if "_" in host:
        raise ConfigError(f"{source}: host {host!r} has an underscore, which no certificate matches; use '-'")
    return f"{parts.scheme}://{_with_port(host, parts, source)}"


def _with_port(host: str, parts: Any, source: str) -> str:
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(f"{source}: the port of {parts.netloc!r} is no port") from None
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port is None else f"{bracketed}:{port}"


def fields_of(values: Mapping[str, str | None], *, source: str) -> Fields:
    """Build `Fields` from texts named as in a config file; empty texts count as absent.

    Raises:
        ConfigError: both base_url and host, or a value that cannot be used.
    """
    given = {key: value for key, value in values.items() if value}
    base_url, host = given.get("base_url"), given.get("host")
    if base_url and host:
        raise ConfigError(f"{source}: give base_url or host, not both")
    origin = None
    if base_url:
        origin = origin_of_url(base_url, source=source)
    elif host:
        origin = origin_of_host(host, source=source)
    return Fields(
        source=source,
        origin=origin,
        token=secret_of(given["pat"], source=source) if "pat" in given else None,
        database=given.get("database"),
        schema=given.get("schema"),
        endpoint=given.get("endpoint"),
        ca_file=Path(given["ca_file"]).expanduser() if "ca_file" in given else None,
        needs_token=bool(host),
    )


def secret_of(text: str, *, source: str) -> Secret:
    """Return a token without the white space around it.

    Raises:
        ConfigError: what is left is no token; the message does not show it.
    """
    try:
        return Secret(text.strip())
    except ValueError as error:
        raise ConfigError(f"{source}: {error}") from None


def from_environment(environment: Mapping[str, str]) -> Fields:
    """Read ARCTIC_CORTEX_BASE_URL, _HOST, _PAT, _DATABASE, _SCHEMA, _ENDPOINT, _CA_FILE."""
    values = {key: environment.get(f"ARCTIC_CORTEX_{key.upper()}") for key in _TEXTS}
    return fields_of(values, source="environment ARCTIC_CORTEX_*")


def from_stock_environment(environment: Mapping[str, str]) -> Fields | None:
    """Read CORTEX_TRAINING_* and SNOWFLAKE_*, which count only where they name a server, and its token."""
    values = {key: environment.get(f"CORTEX_TRAINING_{key.upper()}") for key in _TEXTS}
    for key in ("host", "pat", "database", "schema"):
        if not values["base_url"]:
            values[key] = values[key] or environment.get(f"SNOWFLAKE_{key.upper()}")
    if not (values["base_url"] or (values["host"] and values["pat"])):
        return None
    return fields_of(values, source="environment CORTEX_TRAINING_* and SNOWFLAKE_*")


def from_json_file(path: Path, *, keys: frozenset[str] = _STOCK_KEYS) -> Fields:
    """Read the stock client's JSON connection file, which may nest its keys under `connection`.

    Raises:
        ConfigError: it cannot be read, has an unknown key or a value of the wrong type, switches off the
            verification of TLS, or holds a token that others can read.
    """
    parsed = _json_object(path)
    if "connection" in parsed:
        parsed = parsed["connection"]
        if not isinstance(parsed, dict):
            raise ConfigError(f"{path}: connection must be an object")
    values = {_ALIASES.get(key, key): value for key, value in parsed.items()}
    unknown = sorted(set(values) - keys)
    if unknown:
        raise ConfigError(f"{path}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(keys))}")
    if values.get("no_verify_ssl") is True or values.get("verify_ssl") is False:
        raise ConfigError(f"{path}: TLS is always verified; remove the key, and name a private CA by ca_file")
    texts = {key: values[key] for key in _TEXTS if values.get(key) is not None}
    _require_texts(texts, path)
    if "pat" in texts:
        require_private(path)
    base_url = texts.get("base_url", "")
    if base_url and "://" not in base_url and "pat" in texts:  # the stock client reads it so
        texts["host"] = texts.pop("base_url")
    return fields_of(texts, source=str(path))


def from_profile(path: Path, name: str) -> Fields:
    """Read one profile of Snowflake's connections.toml, or of its config.toml under `connections`.

    Raises:
        ConfigError: there is no such profile, it does not use a token, or others can read it.
    """
    try:
        parsed = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    profiles = parsed.get("connections", {}) if path.name == "config.toml" else parsed
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        raise ConfigError(f"{path} has no profile {name!r}; it has {', '.join(sorted(profiles)) or 'none'}")
    authenticator = str(profile.get("authenticator", "")).lower()
    if authenticator != "programmatic_access_token":
        raise ConfigError(
            f"{path}: profile {name!r} has authenticator {authenticator!r}; only programmatic_access_token is"
            " usable here"
        )
    texts = {key: profile.get(key) for key in ("host", "database", "schema") if profile.get(key) is not None}
    texts["pat"] = profile.get("token")
    if "host" not in texts and isinstance(profile.get("account"), str):
        texts["host"] = f"{profile['account'].lower().replace('_', '-')}.snowflakecomputing.com"
    _require_texts(texts, path)
    require_private(path)
    return fields_of(texts, source=f"{path} [{name}]")


def _require_texts(values: Mapping[str, Any], path: Path) -> None:
    for key, value in values.items():
        if not isinstance(value, str):
            raise ConfigError(f"{path}: {key} must be a text")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:  # the text may hold a token: where, not what
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "it is no UTF-8"
        raise ConfigError(f"{path} is not JSON: {where}") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parsed


def require_private(path: Path) -> None:
    """Refuse a file with a token that others than its owner may read.

    Raises:
        ConfigError: they may.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigError(f"{path} holds a token and has mode {mode:04o}; make it private: chmod 600 {path}")


# --- what earlier logins left ---


def _config_home(environment: Mapping[str, str]) -> Path:
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config").expanduser()


def login_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where `pilotage login` keeps the connection; PILOTAGE_LOGIN_FILE moves it."""
    moved = environment.get("PILOTAGE_LOGIN_FILE")
    return Path(moved).expanduser() if moved else _config_home(environment) / "pilotage" / "login.json"


LOGIN_KEYS = frozenset(_TEXTS)
"""Keys of the file that `pilotage login` writes."""


def from_login(environment: Mapping[str, str]) -> Fields | None:
    """Read what `pilotage login` wrote, if it did."""
    path = login_file(environment)
    return from_json_file(path, keys=LOGIN_KEYS) if path.exists() else None


def from_stock_login(environment: Mapping[str, str]) -> Fields | None:
    """Read what the stock client's `login` remembers: a config file, or a profile."""
    moved = environment.get("CORTEX_TRAINING_LOGIN_FILE")
    path = Path(moved).expanduser() if moved else _config_home(environment) / "cortex-training" / "login.json"
    if not path.exists():
        return None
    state = _json_object(path)
    config, profile = state.get("config_path"), state.get("connection_name")
    if isinstance(config, str) and Path(config).exists():
        return from_json_file(Path(config))
    if isinstance(profile, str):
        return from_named_profile(profile, environment)
    return None


def _profile_files(environment: Mapping[str, str]) -> list[Path]:
    home = environment.get("SNOWFLAKE_HOME")
    if home:
        folder = Path(home).expanduser()
    else:
        folder = Path.home() / ".snowflake"
        folder = folder if folder.is_dir() else _config_home(environment) / "snowflake"
    found = [folder / "connections.toml", folder / "config.toml"]
    return [path for path in found if path.exists()][:1]  # the first hides the second


def from_named_profile(name: str, environment: Mapping[str, str]) -> Fields:
    """Read a Snowflake profile by name.

    Raises:
        ConfigError: there is no such profile, or it cannot be used.
    """
    for path in _profile_files(environment):
        return from_profile(path, name)
    raise ConfigError(f"profile {name!r}: there is no connections.toml in SNOWFLAKE_HOME or ~/.snowflake")


def from_default_profile(environment: Mapping[str, str]) -> Fields | None:
    """Read Snowflake's default profile, if there is one that can be used.

    One that cannot, such as a profile with a browser login, is for other tools and no mistake.
    """
    name = environment.get("SNOWFLAKE_DEFAULT_CONNECTION_NAME") or "default"
    try:
        return from_named_profile(name, environment)
    except ConfigError:
        return None
