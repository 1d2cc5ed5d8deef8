"""What one HTTP API has to say about itself: a dialect turns its JSON into our records and back."""

from collections.abc import Iterator
from typing import Any, Protocol

from pilotage.proxy.answers import Answer
from pilotage.proxy.fields import JsonObject
from pilotage.proxy.reader import Reader
from pilotage.proxy.refusals import Refusal
from pilotage.proxy.requests import Asked


class Dialect(Protocol):
    """Pure functions between one API's JSON and `Asked`, `Answer` and `Refusal`.

    Invariant: what `whole` or `events` wrote, and a client sends back as it stands, `read` finds equal to
    the message that was answered, its reasoning possibly dropped. Otherwise each turn would be a branch.
    """

    @property
    def path(self) -> str:
        """Where turns are asked for."""
        ...

    @property
    def count_path(self) -> str | None:
        """Where a prompt's tokens are counted, as `input_tokens`; None where the API has no such call."""
        ...

    def read(self, sent: JsonObject, reader: Reader) -> Asked:
        """Read a body.

        Raises:
            Refusal: 400 where a field has a shape that cannot be served; the message names its place.
        """
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        ...

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the server-sent events of a streamed answer, to the last byte."""
        ...

    def refused(self, refusal: Refusal) -> dict[str, Any]:
        """Return the body of a refusal."""
        ...
