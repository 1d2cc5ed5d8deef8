"""How weights versions count: +1 a publish, except that weights which a load restores as they had been
published keep the version under which they were.
"""


class WeightsVersions:
    """The version of a trainer's weights, and whether its sampler has these very weights."""

    def __init__(self) -> None:
        self.current = 0
        """Of the last publish, or of the one that is under way."""
        self.is_published = True
        self._keeps_current = False

    def changed(self) -> None:
        """The trainer's weights have changed."""
        self.is_published = self._keeps_current = False

    def advance(self) -> int:
        """Take the version of a publish; returns it."""
        if not self._keeps_current:
            self.current += 1
        return self.current

    def published(self) -> None:
        """The sampler has the trainer's weights, under the current version."""
        self.is_published, self._keeps_current = True, False

    def restored(self, version: int, *, is_published: bool) -> None:
        """The trainer has the weights of a checkpoint that says this of itself."""
        self.current = version
        self.is_published = self._keeps_current = is_published
