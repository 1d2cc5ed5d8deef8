"""Seeds for wires that know no turns."""

import hashlib


def turn_seed(seed: int, turn_index: int) -> int:
    """Return a seed of 31 bits for one turn of a session."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{turn_index}".encode()).digest()[:4]) >> 1
