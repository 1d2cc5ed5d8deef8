"""Whether an environment can be used here, asked before the first rollout."""

from importlib.metadata import version

from pilotage.errors import ConfigError
from pilotage.rollouts.sandbox import check_programs
from pilotage.rollouts.third_party import prepare
from pilotage.rollouts.trial import HOST_ENVIRONMENT, EnvironmentChoice


def check_environment(choice: EnvironmentChoice) -> None:
    """Raise ConfigError where no trial could run in the environment: programs, credentials or the name.

    Harbor's own preflight decides for its types; it looks for programs and credentials, and starts nothing.
    """
    if choice.name == HOST_ENVIRONMENT:
        if not choice.options.get("unsandboxed"):
            check_programs()
        return
    prepare()
    from harbor.environments.factory import EnvironmentFactory
    from harbor.models.environment_type import EnvironmentType

    is_path = ":" in choice.name
    if not is_path and choice.name not in EnvironmentType:
        known = f"host, module:Class, {', '.join(sorted(EnvironmentType))}"
        raise ConfigError(
            f"Harbor {version('harbor')} has no environment {choice.name!r}; it is one of {known}"
        )
    try:
        EnvironmentFactory.run_preflight(
            type=None if is_path else EnvironmentType(choice.name),
            import_path=choice.name if is_path else None,
        )
    except SystemExit as error:
        raise ConfigError(f"environment {choice.name}: {' '.join(str(error).split())}") from None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"environment {choice.name} cannot be used: {error}") from None
