"""When a token expires, where it says so itself."""

import base64
import binascii

import orjson

from pilotage.client.secret import Secret


def expires_at(token: Secret) -> float | None:
    """Return the expiry that a token states as a JWT does, in Unix seconds; None where it states none.

    The signature is not checked: that is the server's to do.
    """
    parts = token.reveal().split(".")
    if len(parts) != 3:
        return None
    try:
        claims = orjson.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return None
    expiry = claims.get("exp") if isinstance(claims, dict) else None
    return float(expiry) if isinstance(expiry, int | float) else None
