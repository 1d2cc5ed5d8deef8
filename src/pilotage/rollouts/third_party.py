"""Settings that Harbor, litellm and the OpenHands SDK read from the environment when they are imported."""

import logging
import os

from pilotage.rollouts.register import default_directory, private_directory

_SETTINGS = {
    "DISABLE_AIOHTTP_TRANSPORT": "True",  # litellm never closes those sessions; its httpx ones it does
    "HARBOR_TELEMETRY": "off",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise a download of prices starts at import
    "LOG_AUTO_CONFIG": "false",  # otherwise the SDK reconfigures the root logger
    "LOG_LEVEL": "ERROR",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}


def prepare() -> None:
    """Set what the user has not set; call it before any of them is imported."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ["DEBUG_LLM"] = "false"  # true makes the import wait for an answer on the terminal
    # The SDK keeps profiles and a lock file in the user's home unless it is told another place.
    home = private_directory(default_directory()) / "openhands"
    os.environ.setdefault("OH_PERSISTENCE_DIR", str(home))
    # Its errors are outcomes of rollouts here, told once and in their place.
    logging.getLogger("openhands").setLevel(logging.CRITICAL)
