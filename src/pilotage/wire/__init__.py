"""What crosses the network between a driver and the training service: frames, chunks and JSON bodies.

Invariant: bytes from outside become a checked record or a `WireError`; nothing here executes, waits or opens
a socket. The public Cortex client reads what this writes and the reverse.

Pure numpy, orjson and pydantic: no torch, no web framework.
"""
