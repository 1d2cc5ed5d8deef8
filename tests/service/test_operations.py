"""Operations run once, in order, whatever is sent again and whatever order it comes in."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.errors import TrainerError
from pilotage.service.operations import Operations, Reply, digest_of
from pilotage.service.refusals import Refusal


def reply(text: str) -> Reply:
    return Reply(content=text.encode())


@given(
    arrivals=st.integers(1, 8).flatmap(
        lambda n: st.lists(st.integers(1, n), max_size=3 * n).flatmap(
            lambda extra: st.permutations([*range(1, n + 1), *extra])
        )
    )
)
@settings(max_examples=300, deadline=None)
def test_any_order_and_any_repetition_runs_each_number_once_in_order(arrivals: list[int]) -> None:
    async def check() -> None:
        ran: list[int] = []

        def work(number: int):
            async def run() -> Reply:
                ran.append(number)
                await asyncio.sleep(0)
                return reply(f"outcome {number}")

            return run

        operations = Operations()
        submitted = [
            operations.submit_sequenced(f"op-{n}", n, "step", digest_of("step", b"%d" % n), work(n))
            for n in arrivals
        ]
        for operation in submitted:
            assert await operation.wait(5)
        assert ran == sorted(set(arrivals))
        for number, operation in zip(arrivals, submitted, strict=True):
            assert operation.reply == reply(f"outcome {number}")
        assert operations.next_sequence == max(arrivals) + 1

    asyncio.run(check())


async def test_an_id_with_other_bytes_and_a_number_with_another_id_are_conflicts() -> None:
    operations = Operations()

    async def work() -> Reply:
        return reply("done")

    first = operations.submit_sequenced("a", 1, "step", digest_of("step", b"x"), work)
    assert await first.wait(1)
    with pytest.raises(Refusal, match="was used for another step call"):
        operations.submit_sequenced("a", 1, "step", digest_of("step", b"y"), work)
    with pytest.raises(Refusal, match="sequence 1 was used by another operation; the next number is 2"):
        operations.submit_sequenced("b", 1, "step", digest_of("step", b"x"), work)


async def test_a_failure_is_an_outcome_and_is_replayed_not_repeated() -> None:
    operations, calls = Operations(), 0

    async def work() -> Reply:
        nonlocal calls
        calls += 1
        raise TrainerError("the gradient's norm is nan")

    for _ in range(3):
        operation = operations.submit_sequenced("a", 1, "step", digest_of("step", b""), work)
        assert await operation.wait(1)
        assert operation.error is not None
        assert (operation.error.code, operation.error.message) == (
            "trainer_error",
            "the gradient's norm is nan",
        )
    assert calls == 1
    following = operations.submit_sequenced("b", 2, "step", digest_of("step", b""), work)
    assert await following.wait(1)
    assert calls == 2


async def test_a_number_that_never_comes_holds_back_those_after_it_but_not_without_bound() -> None:
    operations = Operations()

    async def work() -> Reply:
        return reply("done")

    waiting = operations.submit_sequenced("later", 2, "step", digest_of("step", b""), work)
    assert not await waiting.wait(0.05)
    assert waiting.status == "waiting"
    with pytest.raises(Refusal, match="too far ahead of 1"):
        operations.submit_sequenced("far", 66, "step", digest_of("step", b""), work)
    operations.submit_sequenced("first", 1, "step", digest_of("step", b""), work)
    assert await waiting.wait(1)


async def test_a_free_operation_can_be_cancelled_and_a_sequenced_one_cannot() -> None:
    operations = Operations()
    started = asyncio.Event()

    async def forever() -> Reply:
        started.set()
        await asyncio.sleep(60)
        return reply("never")

    sample = operations.submit_free("s", "sample", digest_of("sample", b""), forever)
    step = operations.submit_sequenced("t", 1, "step", digest_of("step", b""), forever)
    await started.wait()
    assert operations.cancel("s")
    assert not operations.cancel("t")
    assert not operations.cancel("unknown")
    assert await sample.wait(1)
    assert sample.status == "cancelled"
    assert not step.has_ended
    await operations.close()
    assert operations.num_in_flight == 0
