"""What backend tinker needs before it may import the SDK: the SDK itself, a server, and a key for it.

The server is that of TINKER_BASE_URL or, without it, the hosted service; the key is TINKER_API_KEY, or what
`pilotage login` keeps for this very server. It is sent over TLS, or to this machine.
"""

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from packaging.specifiers import SpecifierSet

from pilotage.client.secret import Secret
from pilotage.client.sources import LOOPBACK, from_login, secret_of
from pilotage.errors import ConfigError

SDK = "tinker"
TESTED_VERSIONS = ">=0.38,<0.39"
"""As in the extra `tinker`: the SDK is young, and what it drops is announced one version ahead."""
HOSTED_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"
_KEY_PREFIXES = ("tml-", "eyJ")
"""That the SDK lets through: a key, or a token that was made from one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerConnection:
    """A Tinker server and the right to use it."""

    base_url: str
    """Without a slash at its end; it may have a path."""
    key: Secret = field(repr=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ConfigError(f"TINKER_BASE_URL {self.base_url!r} is no URL; give one like https://host:8443")
        if parts.scheme == "http" and parts.hostname not in LOOPBACK:
            raise ConfigError(f"TINKER_BASE_URL {self.base_url}: a key is sent over TLS only; use https://")
        if not self.key.reveal().startswith(_KEY_PREFIXES):
            raise ConfigError(
                "TINKER_API_KEY does not start with tml-, and the SDK sends no other; a server without auth"
                " takes any such key"
            )


def installed_version() -> str | None:
    """Return the version of the SDK in this environment; None where there is none."""
    try:
        return importlib.metadata.version(SDK)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_sdk(version: str | None) -> None:
    """Refuse an SDK that this backend was not tested with.

    Raises:
        ConfigError: so it is, or there is none.
    """
    if version is None:
        raise ConfigError(
            f"backend tinker needs the package {SDK} {TESTED_VERSIONS}; install pilotage[tinker]"
        )
    if not SpecifierSet(TESTED_VERSIONS).contains(version):
        raise ConfigError(
            f"backend tinker was tested with {SDK} {TESTED_VERSIONS}, and {version} is installed; install"
            " pilotage[tinker]"
        )


def resolve_tinker(environment: Mapping[str, str] = os.environ) -> TinkerConnection:
    """Find server and key.

    Raises:
        ConfigError: there is no key, or one of them cannot be used; no message shows the key.
    """
    base_url = (environment.get("TINKER_BASE_URL") or HOSTED_URL).rstrip("/")
    if text := environment.get("TINKER_API_KEY"):
        return TinkerConnection(base_url=base_url, key=secret_of(text, source="TINKER_API_KEY"))
    login = from_login(environment)
    if login is None or login.token is None or login.origin != base_url:
        raise ConfigError(f"there is no key for {base_url}; set TINKER_API_KEY")
    return TinkerConnection(base_url=base_url, key=Secret(f"tml-{login.token.reveal()}"))
