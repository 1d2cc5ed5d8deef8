"""Scripted demonstrations for the warm start: a sampler that plays a hesitant engineer.

It reads its context like any policy does, as token ids, and answers with token ids, so its rollouts go
through the same proxy, renderer, agent, tools and verifier as those of a model. It knows no gold: it
searches for some of the names that the issue mentions and hands in one of the hits, and it is right only part
of the time. What to search for, which hit to take and how much of it to name is left open on purpose:
those choices are what reinforcement learning has to make.
"""

import json
import random
import re

import numpy as np

from pilotage.datasets import issue_of
from pilotage.localization import mentioned_names
from pilotage.rendering import Markup, TemplateRenderer, TokenizerFile
from pilotage.types import Completion, FinishReason, SamplingParams, TokenIds

QUERY_SIZES = {1: 0.45, 2: 0.2, 3: 0.35}
"""How many mentioned names a demonstration searches for, with probabilities."""
FIRST_HIT = 0.2
"""Probability of taking the first hit on purpose; otherwise any hit, all alike."""
FILE_ONLY = 0.55
"""Probability of naming the hit's file alone, without its class and function."""


class DemonstrationSampler:
    """Implements `Sampler` with a script; log-probs are 0, since nothing was drawn from a distribution."""

    max_context_tokens = 4096

    def __init__(self, renderer: TemplateRenderer, tokenizer: TokenizerFile) -> None:
        self._renderer = renderer
        self._tokenizer = tokenizer

    async def sample(
        self, prompt_ids: TokenIds, params: SamplingParams, *, session_id: str, turn_index: int
    ) -> Completion:
        """See `Sampler`; seeded by the session, so that demonstrations can be made again."""
        del session_id
        rng = random.Random(f"{params.seed}/{turn_index}")
        ids = self._call(*self._decide(self._renderer.decode(prompt_ids), rng))
        return Completion(
            token_ids=ids,
            logprobs=np.zeros(ids.size, np.float32),
            weights_versions=np.zeros(ids.size, np.int32),
            finish_reason=FinishReason.STOP,
        )

    @staticmethod
    def _decide(context: str, rng: random.Random) -> tuple[str, dict[str, object]]:
        """Return the next call: a search, or, once there are hits, a hand-in."""
        *_, last_role = re.findall(r"<\|im_start\|>(\w+)\n", context.removesuffix("<|im_start|>assistant\n"))
        if last_role != "tool":
            names = mentioned_names(issue_of(context))
            (size,) = rng.choices(list(QUERY_SIZES), list(QUERY_SIZES.values()))
            return "code_search", {"query": " ".join(rng.sample(names, min(size, len(names))))}
        result = context.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
        hits = result.splitlines()
        hit = hits[0] if rng.random() < FIRST_HIT else rng.choice(hits)
        location = hit.partition("::")[0] if rng.random() < FILE_ONLY else hit
        return "localization_finish", {"locations": [location]}

    def _call(self, name: str, arguments: dict[str, object]) -> TokenIds:
        text = json.dumps({"name": name, "arguments": arguments})
        segments = [Markup("<tool_call>"), text, Markup("</tool_call>"), Markup("<|im_end|>")]
        return self._tokenizer.encode(segments)
