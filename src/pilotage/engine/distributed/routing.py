"""Which sampler replica answers a session: always the same one, and at first the least loaded.

A replica that a session stays with has its context in the prefix cache. Pure bookkeeping; nothing here
knows how a replica is reached.
"""

from collections import OrderedDict

_MAX_SESSIONS = 65_536
"""Sessions that are remembered; the one that was idle longest is forgotten first, and is placed anew."""


class StickyRouter:
    """Sessions, and calls under way, of each replica. Every call that is taken must be released."""

    def __init__(self, num_replicas: int) -> None:
        self._calls = dict.fromkeys(range(num_replicas), 0)
        self._sessions = dict.fromkeys(range(num_replicas), 0)
        self._replica_of: OrderedDict[str, int] = OrderedDict()

    @property
    def replicas(self) -> list[int]:
        """Numbers of the replicas that are left."""
        return list(self._calls)

    def take(self, session_id: str) -> int | None:
        """Return the replica of a session and count a call on it; None where no replica is left.

        A new session, or one whose replica was lost, goes to the replica with the fewest calls under way,
        then the fewest sessions, then the lowest number.
        """
        if not self._calls:
            return None
        replica = self._replica_of.get(session_id)
        if replica is None:
            replica = min(self._calls, key=lambda each: (self._calls[each], self._sessions[each], each))
            self._place(session_id, replica)
        self._replica_of.move_to_end(session_id)
        self._calls[replica] += 1
        return replica

    def release(self, replica: int) -> None:
        """End a call; nothing where the replica was lost meanwhile."""
        if replica in self._calls:
            self._calls[replica] -= 1

    def lose(self, replica: int) -> None:
        """Forget a replica; its sessions are placed anew at their next call."""
        self._calls.pop(replica, None)
        self._sessions.pop(replica, None)
        for session_id in [each for each, at in self._replica_of.items() if at == replica]:
            del self._replica_of[session_id]

    def _place(self, session_id: str, replica: int) -> None:
        self._replica_of[session_id] = replica
        self._sessions[replica] += 1
        if len(self._replica_of) > _MAX_SESSIONS:
            _, forgotten = self._replica_of.popitem(last=False)
            self._sessions[forgotten] -= 1
