from hypothesis import given
from hypothesis import strategies as st

from pilotage.engine.distributed.routing import StickyRouter


def test_a_session_stays_with_its_replica_and_new_ones_go_to_the_least_loaded() -> None:
    router = StickyRouter(2)

    assert router.take("a") == 0
    assert router.take("b") == 1
    assert router.take("a") == 0  # two calls on 0, one on 1
    assert router.take("c") == 1
    router.release(1)
    router.release(1)
    assert router.take("b") == 1


def test_idle_replicas_take_new_sessions_in_turn() -> None:
    router = StickyRouter(3)
    for session, expected in (("a", 0), ("b", 1), ("c", 2), ("d", 0)):
        assert router.take(session) == expected
        router.release(expected)


def test_the_sessions_of_a_lost_replica_move_and_the_others_stay() -> None:
    router = StickyRouter(2)
    assert [router.take(session) for session in "abcd"] == [0, 1, 0, 1]

    router.lose(1)
    router.release(1)  # the call that found out

    assert router.replicas == [0]
    assert [router.take(session) for session in "abcd"] == [0, 0, 0, 0]
    router.lose(0)
    assert router.take("a") is None


events = st.lists(st.tuples(st.sampled_from(["take", "release", "lose"]), st.integers(0, 9)), max_size=60)


@given(events)
def test_whatever_happens_a_session_never_changes_a_replica_that_is_left(
    history: list[tuple[str, int]],
) -> None:
    router = StickyRouter(3)
    of_session: dict[str, int] = {}
    open_calls: list[int] = []
    for event, number in history:
        if event == "take":
            replica = router.take(f"s{number}")
            assert (replica is None) == (not router.replicas)
            if replica is not None:
                previous = of_session.get(f"s{number}")
                assert previous in (None, replica) or previous not in router.replicas
                of_session[f"s{number}"] = replica
                open_calls.append(replica)
        elif event == "release" and open_calls:
            router.release(open_calls.pop(number % len(open_calls)))
        elif event == "lose":
            router.lose(number % 3)
            assert number % 3 not in router.replicas
