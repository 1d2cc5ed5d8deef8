"""The program of an engine process: `python -m pilotage.cli.engine JOB_DIRECTORY`, started by the service."""

import asyncio
import logging
import sys
from pathlib import Path

from pilotage.interfaces import Engine
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
        stop_token_ids=sizes.stop_token_ids,
        trainer_threads=sizes.trainer_threads,
        micro_batch_tokens=sizes.micro_batch_tokens,
    )


def main() -> None:
    """Serve one job's engine."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(serve_engine(Path(sys.argv[1]), open_local))


if __name__ == "__main__":
    main()
