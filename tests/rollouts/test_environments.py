"""What is said of an environment that cannot be used, before the first rollout."""

from pathlib import Path

import pytest
from harbor.environments.docker.docker import DockerEnvironment
from harbor.models.task.config import EnvironmentConfig
from harbor.models.trial.paths import TrialPaths

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


def image_of(root: Path, name: str, content: str) -> str:
    """The image that Harbor's docker environment builds for a task."""
    directory = root / name / "environment"
    directory.mkdir(parents=True)
    (directory / "Dockerfile").write_text(content)
    environment = DockerEnvironment(
        environment_dir=directory,
        environment_name=name,
        session_id=f"{name}-trial",
        trial_paths=TrialPaths(trial_dir=root / name / "trial"),
        task_env_config=EnvironmentConfig(),
    )
    return environment._main_image_name


def test_tasks_with_the_same_environment_share_an_image_and_no_others_do(tmp_path: Path) -> None:
    one, same = (image_of(tmp_path, name, "FROM base:1\n") for name in ("one", "same"))
    other = image_of(tmp_path, "other", "FROM base:2\n")
    assert one == same != other
