"""Which groups start and which are trained, over every order in which rollouts may end."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pilotage.loops import Stragglers
from pilotage.loops.schedule import Position, Schedule


def schedule(
    *,
    per_step: int = 2,
    num_steps: int = 4,
    max_lag: int = 1,
    stragglers: Stragglers = Stragglers.WAIT,
    position: Position | None = None,
) -> Schedule:
    return Schedule(
        per_step=per_step,
        num_steps=num_steps,
        max_lag=max_lag,
        stragglers=stragglers,
        position=position or Position(),
    )


def start_all(plan: Schedule) -> list[int]:
    started: list[int] = []
    while (number := plan.start()) is not None:
        started.append(number)
    return started


def test_without_lag_the_groups_of_a_step_start_when_the_step_before_it_is_done() -> None:
    plan = schedule(max_lag=0)
    assert start_all(plan) == [0, 1]
    plan.finish(1, counts=True)
    assert plan.take() is None
    plan.finish(0, counts=True)
    assert plan.take() == (0, 1)
    assert start_all(plan) == []  # the step is under way
    plan.finish_step()
    assert start_all(plan) == [2, 3]


def test_a_finished_group_overtakes_a_straggler_as_long_as_that_can_still_be_trained_in_time() -> None:
    plan = schedule(per_step=1, max_lag=1)
    assert start_all(plan) == [0, 1]
    plan.finish(1, counts=True)
    assert plan.take() == (1,)
    plan.finish_step()
    assert start_all(plan) == [2]
    plan.finish(2, counts=True)
    assert plan.take() is None  # group 0 started before both steps: this one must train it
    plan.finish(0, counts=True)
    assert plan.take() == (0,)
    plan.finish_step()
    assert plan.position == Position(steps_done=2, next_group=2)


def test_where_old_tokens_are_masked_nobody_waits_for_a_straggler() -> None:
    plan = schedule(per_step=1, max_lag=1, stragglers=Stragglers.MASK)
    assert start_all(plan) == [0, 1]
    for number in (1, 2, 3):
        plan.finish(number, counts=True)
        assert plan.take() == (number,)
        plan.finish_step()
        start_all(plan)
    plan.finish(0, counts=True)
    assert plan.take() == (0,)


def test_a_group_that_counts_for_nothing_is_replaced_and_reported_with_the_batch() -> None:
    plan = schedule(max_lag=0)
    assert start_all(plan) == [0, 1]
    plan.finish(0, counts=False)
    assert start_all(plan) == [2]
    plan.finish(2, counts=True)
    assert plan.set_aside_in_a_row == 1
    plan.finish(1, counts=True)
    assert plan.take() == (0, 1, 2)
    assert plan.set_aside_in_a_row == 0


def test_a_run_goes_on_from_where_it_stood() -> None:
    position = Position(steps_done=2, next_group=3, ahead=frozenset({4, 6}))
    assert start_all(schedule(per_step=2, max_lag=1, position=position)) == [3, 5, 7, 8]


@dataclass(kw_only=True)
class Played:
    """What became of a schedule that somebody played against."""

    trained: list[tuple[int, ...]]
    lags: list[int]
    most_under_way: int


def play(plan: Schedule, draw: st.DataObject, *, set_aside: bool = False) -> Played:
    """Let groups end in any order, and steps take any time, until the run is over.

    Fails where nothing can happen any more: a deadlock.
    """
    started_at: dict[int, int] = {}
    under_way: set[int] = set()
    played = Played(trained=[], lags=[], most_under_way=0)
    batch: tuple[int, ...] | None = None
    aside: set[int] = set()
    while plan.position.steps_done < plan.num_steps:
        for number in start_all(plan):
            started_at[number] = plan.position.steps_done
            under_way.add(number)
        played.most_under_way = max(played.most_under_way, len(under_way))
        if batch is None:
            batch = plan.take()
        choices = [*sorted(under_way), *(["step"] if batch is not None else [])]
        assert choices, "nothing is under way, and no batch can be made"
        choice = draw.draw(st.sampled_from(choices))
        if isinstance(choice, int):
            under_way.remove(choice)
            if set_aside and len(aside) < 5 and draw.draw(st.booleans()):
                aside.add(choice)
            plan.finish(choice, counts=choice not in aside)
        else:
            assert batch is not None
            played.trained.append(batch)
            played.lags += [plan.position.steps_done - started_at[n] for n in batch if n not in aside]
            plan.finish_step()
            batch = None
    assert not under_way
    return played


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(0, 3),
    st.sampled_from(Stragglers),
    st.booleans(),
    st.data(),
)
def test_every_group_is_trained_once_within_the_lag_and_nothing_waits_for_ever(
    per_step: int, num_steps: int, max_lag: int, stragglers: Stragglers, refill: bool, data: st.DataObject
) -> None:
    plan = schedule(per_step=per_step, num_steps=num_steps, max_lag=max_lag, stragglers=stragglers)
    played = play(plan, data, set_aside=refill)
    trained = [number for batch in played.trained for number in batch]
    assert sorted(trained) == list(range(len(trained)))
    assert len(played.trained) == num_steps
    assert refill or all(len(batch) == per_step for batch in played.trained)
    assert all(len(batch) >= per_step for batch in played.trained)
    assert played.most_under_way <= (max_lag + 1) * per_step
    if stragglers is Stragglers.WAIT:
        assert max(played.lags) <= max_lag
    assert plan.position == Position(steps_done=num_steps, next_group=len(trained))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(2, 5), st.data())
def test_a_run_that_is_taken_up_again_after_any_step_trains_the_rest_once(
    per_step: int, max_lag: int, num_steps: int, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(1, num_steps - 1))
    first = schedule(per_step=per_step, num_steps=stop, max_lag=max_lag)
    before = play(first, data)
    second = schedule(per_step=per_step, num_steps=num_steps, max_lag=max_lag, position=first.position)
    after = play(second, data)
    trained = [number for batch in (*before.trained, *after.trained) for number in batch]
    assert sorted(trained) == list(range(num_steps * per_step))
