"""A driver that holds a job and does nothing.

idle_driver.py BASE_URL RUN_DIRECTORY LEASE_S STARTUP_TIMEOUT_S GPUS
"""

import asyncio
import signal
import sys
from pathlib import Path

from tests.service.rig import job_body

from pilotage.client import Connection, JobPlan, open_engine
from pilotage.errors import ServiceError
from pilotage.types import AdamParams, LossConfig, SamplingParams
from pilotage.wire.jobs import CreateJobBody


async def hold(base_url: str, directory: Path, lease_s: float, startup_timeout_s: float, n_gpus: int) -> int:
    body = CreateJobBody.model_validate(
        job_body(n_gpus=n_gpus) | {"x-pilotage": {"lease_s": lease_s, "engine": {"stop_token_ids": [0]}}}
    )
    plan = JobPlan(
        body=body,
        loss=LossConfig(),
        adam=AdamParams(),
        sampling=SamplingParams(),
        startup_timeout_s=startup_timeout_s,
        run_directory=directory,
    )
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        async with open_engine(Connection(origin=base_url, database="db"), plan):
            sys.stdout.write("running\n")
            sys.stdout.flush()
            await asyncio.sleep(600)
    except ServiceError as error:
        sys.stdout.write(f"{error}\n")
        return error.exit_code
    except asyncio.CancelledError:
        return 130
    return 0


if __name__ == "__main__":
    url, run_directory, *numbers = sys.argv[1:]
    lease, timeout, gpus = (float(number) for number in numbers)
    sys.exit(asyncio.run(hold(url, Path(run_directory), lease, timeout, int(gpus))))
