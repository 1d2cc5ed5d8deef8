"""The driver's side of the training service: connections, jobs, and engines behind a network.

`open_engine` gives a run its trainer and sampler:

    connection = resolve_connection()                       # see `connection` for the order of sources
    async with open_engine(connection, plan) as engine:     # creates the job, waits, holds its lease
        ...                                                 # an `Engine`: strict core, or the plain wire
                                                            # at the end the job is cancelled

Invariant: a token is sent only to the server that it was given for, over TLS that is verified, and is in no
text that this package writes. A call whose repetition could be carried out twice is never repeated.
"""

from pilotage.client.connection import Connection, resolve_connection
from pilotage.client.core import CoreEngine
from pilotage.client.engine import JOB_ID_FILES, JobPlan, open_engine
from pilotage.client.http import Http, Patience
from pilotage.client.jobs import Jobs, default_comment
from pilotage.client.plain import PlainEngine
from pilotage.client.secret import Secret

__all__ = [
    "JOB_ID_FILES",
    "Connection",
    "CoreEngine",
    "Http",
    "JobPlan",
    "Jobs",
    "Patience",
    "PlainEngine",
    "Secret",
    "default_comment",
    "open_engine",
    "resolve_connection",
]
