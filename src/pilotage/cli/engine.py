"""The program of an engine process: `python -m pilotage.cli.engine JOB_DIRECTORY`, started by the service."""

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from pilotage.errors import TemplateError
from pilotage.interfaces import Engine
from pilotage.rendering import load_renderer
from pilotage.service.engine_host import JobSpec
from pilotage.service.engine_process import serve_engine


async def open_local(spec: JobSpec) -> Engine:
    """Open the local engine with a job's sizes."""
    from pilotage.engine import LocalEngine

    sizes = spec.body.extras.engine
    return await LocalEngine.open(
        spec.model_dir,
        max_context_tokens=spec.body.max_context_tokens,
        max_batch=sizes.max_batch,
        stop_token_ids=sizes.stop_token_ids or _stops_of_template(spec.model_dir),
        trainer_threads=sizes.trainer_threads,
        micro_batch_tokens=sizes.micro_batch_tokens,
    )


def _stops_of_template(model_dir: Path) -> Sequence[int] | None:
    """Return what ends a turn in the model's chat template; None leaves it to the model's own config."""
    try:
        return load_renderer(model_dir).stop_token_ids
    except TemplateError:
        return None


def main() -> None:
    """Serve one job's engine."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(serve_engine(Path(sys.argv[1]), open_local))


if __name__ == "__main__":
    main()
