"""Bearer tokens: who they belong to. Only digests are stored; the text of a token is shown once."""

import secrets
import time
from hashlib import sha256

from pilotage.errors import ConfigError
from pilotage.service.store import Store

_PREFIX = "plt_"
_REREAD_S = 2.0


def digest_of(token: str) -> str:
    """Return what is stored of a token."""
    return sha256(token.encode("utf-8", "replace")).hexdigest()


def create_token(store: Store, owner: str) -> str:
    """Make a token for an owner and return its text, which cannot be had again.

    Raises:
        ConfigError: the name cannot be used.
    """
    if not owner or len(owner) > 64 or not owner.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigError(f"an owner is 1 to 64 letters, digits and . _ -, got {owner!r}")
    token = _PREFIX + secrets.token_urlsafe(32)
    store.add_token(digest_of(token), owner, time.time())
    return token


class TokenBook:
    """Answers whose a token is; follows tokens that other processes make and revoke, within seconds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._owners: dict[str, str] = {}
        self._read_at = -_REREAD_S

    def owner_of(self, token: str) -> str | None:
        """Return the owner of a token, or None where nobody has it.

        Digests are looked up, not compared with a secret, so that time tells nothing about a token.
        """
        if time.monotonic() - self._read_at >= _REREAD_S:
            self._owners = self._store.tokens()
            self._read_at = time.monotonic()
        return self._owners.get(digest_of(token))
