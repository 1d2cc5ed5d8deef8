"""Commands that run the training service: serve, token."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pilotage.errors import ConfigError

if TYPE_CHECKING:
    from pilotage.service.tinker_models import TinkerTerms


def _capacity(words: list[str]) -> dict[str, int]:
    """Read `H200=8` and the like; without any, this machine's CUDA devices, or eight slots on a CPU."""
    from pilotage.wire.jobs import HARDWARE

    found: dict[str, int] = {}
    for word in words:
        kind, separator, count = word.partition("=")
        if kind not in HARDWARE or not separator or not count.isdigit():
            raise ConfigError(f"--capacity is KIND=COUNT with KIND of {', '.join(HARDWARE)}, got {word!r}")
        found[kind] = int(count)
    return found or {"H200": _num_devices() or 8}


def _tinker_terms(text: str, *, adapts_unembed: bool) -> "TinkerTerms":
    from pilotage.service.tinker_models import TinkerTerms

    parts = text.split("+")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise ConfigError(f"--tinker-gpus is TRAIN+SAMPLE, as in 4+4, got {text!r}")
    return TinkerTerms(
        training_gpus=int(parts[0]), sampling_gpus=int(parts[1]), adapts_unembed=adapts_unembed
    )


def _num_devices() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _engine_kind(given: str | None) -> str:
    """Return what is asked for, or what suits the machine: Ray where it has CUDA devices and vLLM."""
    kind = given or ("ray" if _num_devices() and find_spec("vllm") else "local")
    if kind == "ray" and not find_spec("ray"):
        raise ConfigError(
            "--engine ray needs Ray; install the extra pilotage[gpu] in an environment of its own"
        )
    return kind


async def serve(arguments: argparse.Namespace) -> int:
    """Run the training service until it is stopped."""
    from pilotage.service.app import Service
    from pilotage.service.jobs import Jobs
    from pilotage.service.serving import Listen
    from pilotage.service.serving import serve as run
    from pilotage.service.store import Store
    from pilotage.service.tokens import TokenBook

    listen = Listen(
        host=arguments.host, port=arguments.port, tls_cert=arguments.tls_cert, tls_key=arguments.tls_key
    )
    if (listen.tls_cert is None) != (listen.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key come together")
    if arguments.no_auth and not listen.is_loopback:
        raise ConfigError(f"--no-auth is for loopback only, not for {listen.host}; make a token instead")
    if not arguments.no_auth and not listen.is_loopback and listen.tls_cert is None:
        raise ConfigError(f"tokens would cross the network to {listen.host} in the clear; give --tls-cert")
    if not arguments.models.is_dir():
        raise ConfigError(f"--models {arguments.models} is no directory; give the one that holds your models")
    kind = _engine_kind(arguments.engine)
    terms = _tinker_terms(arguments.tinker_gpus, adapts_unembed=kind == "local")
    capacity = _capacity(arguments.capacity)
    store = Store(arguments.data / "service.db")  # made from here on
    if not arguments.no_auth and not store.tokens():
        raise ConfigError("nobody has a token yet; run `pilotage token create NAME` first, or give --no-auth")
    jobs = Jobs(
        store,
        directory=arguments.data.resolve() / "jobs",
        models=arguments.models,
        capacity=capacity,
        engine_command=(sys.executable, "-m", "pilotage.cli.engine", kind),
    )
    service = Service(jobs, None if arguments.no_auth else TokenBook(store), tinker=terms)
    try:
        await run(service, jobs, listen, lambda url: print(f"serving on {url}", flush=True))
    finally:
        store.close()
    return 0


async def token(arguments: argparse.Namespace) -> int:
    """Make or revoke tokens."""
    from pilotage.service.store import Store
    from pilotage.service.tokens import create_token

    store = Store(arguments.data / "service.db")
    try:
        if arguments.action == "create":
            print(create_token(store, arguments.owner))
        else:
            count = store.revoke_tokens(arguments.owner)
            print(f"revoked {count} tokens of {arguments.owner}")
            return 0 if count else 4
    finally:
        store.close()
    return 0
