"""Where every sampled token of a step went."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Counts of sampled tokens; it balances by construction, or it does not exist.

    masked: in the batch but not in the loss. dropped: not in the batch. Each with a reason, which is the
    name of an outcome, `orphan`, `first_token`, `stale`, `too_long`, `no_spread`, `group_too_small` or
    `group_reward`.
    """

    sampled_tokens: int
    trained_tokens: int
    masked_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    dropped_tokens: Mapping[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        accounted = self.trained_tokens + sum(self.masked_tokens.values()) + sum(self.dropped_tokens.values())
        if accounted != self.sampled_tokens:
            raise ValueError(
                f"the ledger does not balance: sampled {self.sampled_tokens}, trained {self.trained_tokens}"
                f" + masked {dict(self.masked_tokens)} + dropped {dict(self.dropped_tokens)} = {accounted}"
            )
