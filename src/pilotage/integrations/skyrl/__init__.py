"""SkyRL: its trainer, fed with token-exact rollouts of Harbor tasks through one of its generators.

Tested with skyrl 0.4.0. Invariant: what a row holds is what the proxy recorded, id for id; a token that was
sampled is trained in one row, or booked with a reason in the metrics of the batch.
"""

from pilotage.integrations.skyrl.dataset import write_dataset
from pilotage.integrations.skyrl.generator import SkyRLGenerator
from pilotage.integrations.skyrl.interface import (
    GeneratorConfig,
    GeneratorInput,
    GeneratorOutput,
    InferenceClient,
)
from pilotage.integrations.skyrl.sampler import SkyRLSampler

__all__ = [
    "GeneratorConfig",
    "GeneratorInput",
    "GeneratorOutput",
    "InferenceClient",
    "SkyRLGenerator",
    "SkyRLSampler",
    "write_dataset",
]
