"""Settings that Harbor, litellm and agents' libraries read from the environment when they are imported."""

import logging
import os
from functools import cache

from pilotage.rollouts.register import default_directory, private_directory

_SETTINGS = {
    "DISABLE_AIOHTTP_TRANSPORT": "True",  # litellm never closes those sessions; its httpx ones it does
    "HARBOR_TELEMETRY": "off",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise a download of prices starts at import
    "LOG_AUTO_CONFIG": "false",  # otherwise the SDK reconfigures the root logger
    "LOG_LEVEL": "ERROR",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the proxy waits faults out itself
    "MSWEA_SILENT_STARTUP": "1",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}


@cache
def prepare() -> None:
    """Set what the user has not set; call it before any of them is imported, as often as you like."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["DEBUG_LLM"] = "false"  # true makes the import wait for an answer on the terminal
    # Both keep files in the user's home unless they are told another place.
    home = private_directory(default_directory())
    os.environ.setdefault("OH_PERSISTENCE_DIR", str(home / "openhands"))
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(home / "mini-swe-agent"))
    # Its errors are outcomes of rollouts here, told once and in their place.
    logging.getLogger("openhands").setLevel(logging.CRITICAL)
