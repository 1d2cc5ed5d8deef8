import pytest

from pilotage.wire.jobs import ACTIVE, read_statuses


@pytest.mark.parametrize("text", [None, ""])
def test_no_status_is_no_filter(text: str | None) -> None:
    assert read_statuses(text) == frozenset()


def test_states_and_their_groups_add_up() -> None:
    assert read_statuses(" Running ,failed") == {"running", "failed"}
    assert read_statuses("active") == {status.value for status in ACTIVE}
    assert read_statuses("done,failed") == {"cancelled", "terminated", "done", "failed"}


@pytest.mark.parametrize("text", ["running,,failed", "alive", ","])
def test_an_unknown_status_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"status is of .*running.*active"):
        read_statuses(text)
