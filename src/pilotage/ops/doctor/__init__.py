"""The preflight: what would stop a run, or hurt it, said before it starts, with what to do about it.

    facts, leftovers  what there is on this machine        machine, service, rendering, sampler, proxy, trials
    need              what the recipe wants of it     -->  judge, and return findings

Invariant: looking changes nothing that a run can see, and `remove_leftovers` touches only what is
surely ours. Names are imported from their modules: a process that samples does not load the client.
"""
