"""What must not mind that the machine's clock is set. Run with `set_clock` in front of PYTHONPATH.

python -m tests.chaos.under_set_clock SCENARIO DIRECTORY SEED
prints what was not as it should be, as a JSON list.
"""

import asyncio
import json
import random
import sys
import time
from pathlib import Path

from tests.chaos.run_faults import crashed_run, resumed
from tests.service.rig import PREFIX, sample
from tests.service.rig import rig as service_rig

from pilotage.wire.frames import encode_frame
from pilotage.wire.samples import pack_forward_request


async def run(directory: Path, rng: random.Random) -> list[str]:
    """A run crashes and is resumed."""
    await crashed_run(directory / "run", rng)
    return await resumed(directory / "run", directory / "whole")


async def service(directory: Path, rng: random.Random) -> list[str]:
    """A job with a lease of seconds lives on, and what was answered is kept for who asks again."""
    async with service_rig(directory) as rig:
        job_id = await rig.running(**{"x-pilotage": {"lease_s": 30}})
        frame = encode_frame(pack_forward_request([sample()], temperature=1.0))
        for number in range(20):
            reply = await rig.core(job_id, "forward", operation_id=f"f{number}", content=frame)
            assert reply.status_code == 200, reply.text
        await asyncio.sleep(rng.uniform(0.5, 1.5))  # several looks at every job
        base = f"{PREFIX}/{job_id}/core/operations"
        kept = [(await rig.http.get(f"{base}/f{number}")).status_code for number in range(20)]
        status = (await rig.http.get(f"{PREFIX}/{job_id}")).json()["status"]
    problems = [] if status == "running" else [f"the job is {status}"]
    return problems + ([] if kept == [200] * 20 else [f"of 20 outcomes {kept.count(200)} are kept"])


SCENARIOS = {"run": run, "service": service}

if __name__ == "__main__":
    name, where, seed = sys.argv[1:]
    assert max(abs(time.time() - time.time()) for _ in range(100)) > 1000, "nobody sets this clock"
    problems = asyncio.run(SCENARIOS[name](Path(where), random.Random(int(seed))))
    sys.stdout.write(json.dumps(problems) + "\n")
