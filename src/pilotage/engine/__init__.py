"""The embedded engine: a torch sampler and trainer for one Hugging Face causal language model.

Invariant: sampler and trainer hold the same weights under the same version, or the publish that should
have made it so has failed. The engine knows tokens, not text, tasks or rewards.

Names are loaded when they are used: a recipe that only sizes a policy does not pay for torch.
"""

from typing import TYPE_CHECKING, Any

from pilotage.engine.policy import PolicyConfig, create_policy

if TYPE_CHECKING:
    from pilotage.engine.local import LocalEngine

__all__ = ["LocalEngine", "PolicyConfig", "create_policy"]


def __getattr__(name: str) -> Any:
    if name == "LocalEngine":
        from pilotage.engine.local import LocalEngine

        return LocalEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
