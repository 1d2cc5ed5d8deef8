"""What is said of an environment that cannot be used, before the first rollout."""

import pytest

from pilotage.errors import ConfigError
from pilotage.rollouts.environments import check_environment
from pilotage.rollouts.trial import HOST_ENVIRONMENT, EnvironmentChoice

pytestmark = pytest.mark.agents


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A machine without programs, credentials and a home."""
    for name in (
        "MODAL_TOKEN_ID",
        "MODAL_TOKEN_SECRET",
        "E2B_API_KEY",
        "DAYTONA_API_KEY",
        "DAYTONA_JWT_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("docker", "Docker is not installed or not on PATH"),
        ("podman", "Podman is not installed or not on PATH"),
        ("modal", "set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"),
        ("e2b", "requires E2B_API_KEY to be set"),
        ("daytona", "requires either DAYTONA_API_KEY"),
        ("snowflake", "has no environment 'snowflake'; it is one of host, module:Class, "),
        ("no.such.module:Environment", "cannot be used"),
        ("json:NoSuchClass", "cannot be used"),
        (HOST_ENVIRONMENT, "the sandbox needs bwrap, nsenter, setpriv, bash"),
    ],
)
def test_what_is_missing_is_said_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_environment(EnvironmentChoice(name=name))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_can_be_used_passes() -> None:
    check_environment(EnvironmentChoice(name=HOST_ENVIRONMENT))
    check_environment(EnvironmentChoice(name="pilotage.rollouts:HostEnvironment"))


@pytest.mark.usefixtures("nowhere")
def test_an_unsandboxed_host_needs_no_programs() -> None:
    check_environment(EnvironmentChoice(name=HOST_ENVIRONMENT, options={"unsandboxed": True}))
