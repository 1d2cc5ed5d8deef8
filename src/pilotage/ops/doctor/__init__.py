"""The preflight: what would stop a run, or hurt it, said before it starts, with what to do about it.

    facts, leftovers  what there is on this machine        machine, service, rendering, sampler, proxy, trials
    need              what the recipe wants of it     -->  judge, and return findings

Invariant: looking changes nothing that a run can see, and `remove_leftovers` touches only what is
surely ours.
"""

from pilotage.ops.doctor.facts import MachineFacts, gather
from pilotage.ops.doctor.findings import Finding, FindingName, Severity, in_order
from pilotage.ops.doctor.leftovers import remove_leftovers
from pilotage.ops.doctor.machine import check_file_times, check_machine
from pilotage.ops.doctor.need import MachineNeed, SamplerNeed, ServiceNeed, TaskNeed
from pilotage.ops.doctor.service import check_service, find_connection

__all__ = [
    "Finding",
    "FindingName",
    "MachineFacts",
    "MachineNeed",
    "SamplerNeed",
    "ServiceNeed",
    "Severity",
    "TaskNeed",
    "check_file_times",
    "check_machine",
    "check_service",
    "find_connection",
    "gather",
    "in_order",
    "remove_leftovers",
]
