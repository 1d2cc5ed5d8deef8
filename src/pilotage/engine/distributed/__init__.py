"""The training service's engine on many devices: FSDP2 trainer ranks and sampler replicas, placed by Ray.

Invariant: every trainer rank runs the same collectives in the same order, whatever share of a batch it
holds; and every replica that answers has passed a probe under the version that it stamps on its tokens.

Needs the extra `pilotage[gpu]`, which cannot be installed beside `pilotage[agents]`. Modules are imported
where they are used; nothing here is imported by the embedded engine.
"""
