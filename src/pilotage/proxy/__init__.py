"""The recording proxy: agents speak chat completions, Messages or Responses, the policy token ids.

Invariant: a turn's prompt is the recorded sequence that it extends plus the encoding of the new messages
only, and the turn is recorded before any byte of its answer is sent. Nothing that was sampled is ever
encoded again; what an agent sends back finds its place in the tree, or starts a branch with a cause.

It does not score, mask or batch, and it keeps no opinion of the agent: `SessionRecord` is all it hands over.
"""

from pilotage.proxy.app import ChatCompletionsProxy
from pilotage.proxy.patience import Patience
from pilotage.proxy.serving import serve

__all__ = ["ChatCompletionsProxy", "Patience", "serve"]
