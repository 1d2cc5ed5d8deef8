"""A server of the Tinker API that does not add up as ours needs is refused before anything is trained."""

import asyncio
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types

from pilotage.client import Secret
from pilotage.client.tinker_engine import TinkerEngine, TinkerPlan
from pilotage.client.tinker_sdk import TinkerConnection
from pilotage.errors import RequestFailedError
from pilotage.types import LossConfig, PolicyLoss


@dataclass(frozen=True, slots=True)
class Answered:
    """What the SDK calls a future, with its value there already."""

    value: Any

    def __await__(self) -> Generator[Any, None, Any]:
        yield from asyncio.sleep(0).__await__()
        return self.value


@dataclass(frozen=True, slots=True)
class Server:
    """Gives every token log-prob -1, and makes of a loss what it is told to."""

    reduction: str

    def create_lora_training_client(self, base_model: str, *, rank: int, seed: int | None) -> Answered:
        return Answered(self)

    def get_info(self) -> types.GetInfoResponse:
        data = types.ModelData(model_name="policy")
        return types.GetInfoResponse(model_data=data, model_id="m", is_lora=False)

    def forward(self, data: list[types.Datum], loss_fn: str, config: Any) -> Answered:
        weights = [np.array(datum.loss_fn_inputs["weights"].data) for datum in data]
        values = [weight.sum() for weight in weights]
        loss = {"sum": sum(values), "mean": float(np.mean([value / 6 for value in values]))}
        outputs = [
            {"logprobs": types.TensorData(data=[-1.0] * weight.size, dtype="float32", shape=[weight.size])}
            for weight in weights
        ]
        metrics = {"loss:sum": float(loss[self.reduction])} if self.reduction in loss else {}
        return Answered(
            types.ForwardBackwardOutput(
                loss_fn_output_type="ArrayRecord", loss_fn_outputs=outputs, metrics=metrics
            )
        )


def engine(server: Server) -> TinkerEngine:
    plan = TinkerPlan(
        base_model="policy",
        lora_rank=8,
        lora_seed=None,
        max_context_tokens=64,
        stop_token_ids=(2,),
        loss=LossConfig(policy_loss=PolicyLoss.GSPO),
    )
    connection = TinkerConnection(base_url="http://127.0.0.1:9", key=Secret("tml-x"))
    return TinkerEngine(server, connection, plan)  # pyright: ignore[reportArgumentType] - stands for the SDK


@pytest.mark.parametrize(
    ("reduction", "message"),
    [("mean", "does not sum weighted tokens"), ("untold", "does not tell its loss")],
)
async def test_a_server_that_averages_or_tells_no_loss_is_refused(
    reduction: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(RequestFailedError, match=message):
        await engine(Server(reduction)).save(tmp_path / "checkpoint")


async def test_a_server_that_sums_is_taken() -> None:
    await engine(Server("sum"))._trainer()
