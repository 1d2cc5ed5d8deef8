"""Ids as parts of a URL's path."""

from urllib.parse import quote

from pilotage.errors import ConfigError


def segment(name: str) -> str:
    """Return an id as one segment of a path.

    Raises:
        ConfigError: it is empty, or would be read as a way through directories.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise ConfigError(f"{name!r} is no id")
    return quote(name, safe=":")
