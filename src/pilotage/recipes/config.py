"""The recipe: one frozen class, read from TOML and overrides.

Relative paths are relative to the recipe's file, so a recipe works from any directory.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pilotage.errors import ConfigError
from pilotage.loops.settings import LoopSettings
from pilotage.recipes.reference import changes
from pilotage.rollouts.mcp_servers import McpServer
from pilotage.rollouts.routes import Route, proxy_address
from pilotage.trackers.names import TrackerName
from pilotage.types import ProxyAddress
from pilotage.wire.jobs import PeftConfig


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PolicySettings(_Section):
    """The policy, and how the local engine holds it."""

    model: Path
    """Hugging Face model directory: weights to start from, tokenizer and chat template."""
    max_context_tokens: int = Field(default=4096, ge=16)
    """Most tokens of prompt and completion together."""
    max_batch: int = Field(default=32, ge=1)
    """Completions that are sampled at once."""
    enable_thinking: bool | None = None
    """For templates with a think block; absent leaves it to the template."""
    trainer_threads: int = Field(default=1, ge=1)
    """Intra-op threads of the trainer; the sampler has one."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Tokens of one forward pass of the trainer, a shared prefix counted once; less needs less memory, and
    changes no result."""
    peft_config: PeftConfig | None = None


class TaskSettings(_Section):
    """Harbor task directories, or directories of them."""

    train: tuple[Path, ...] = ()
    """To train on."""
    held_out: tuple[Path, ...] = ()
    """To evaluate on; none switches evaluation off."""


class RolloutSettings(_Section):
    """How a rollout is run."""

    agent: str = "openhands"
    """`openhands`, `module:Class`, or the name of one of Harbor's agents."""
    agent_options: dict[str, Any] = Field(default_factory=dict)
    """For agents other than `openhands`."""
    agent_route: Route = Route.DRIVER
    """`driver`; for an agent that runs inside the environment, `relay`, or `address` over a network."""
    proxy_address: str = "127.0.0.1:0"
    """`HOST:PORT` where the proxy listens for agents of the route `address`; port 0 is any that is free.
    Other machines may reach it there; it answers those only who hold the key of a running rollout."""
    proxy_url: str | None = None
    """Where those agents find it: the far end of a tunnel to `proxy_address`; absent is that address."""
    tools: tuple[str, ...] = ("terminal", "localization_finish")
    """Of the `openhands` agent, in the order in which it offers them."""
    system_prompt_file: Path | None = None
    """Text file for the `openhands` agent; absent is two sentences."""
    skills: tuple[Path, ...] = ()
    """Directories with a SKILL.md, put into the environment and told to the agent; of `openhands`, also text
    files that follow the system prompt."""
    mcp_servers: dict[str, McpServer] = Field(default_factory=dict)
    """Name to `{command, args}`, a program on this machine, or `{url}`; `openhands` gets their tools too."""
    environment: str = "host"
    """`host`, `module:Class`, or one of Harbor's environment types."""
    environment_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    unsandboxed: bool = False
    """Run commands of the `host` environment as plain processes, without any protection."""
    max_turns: int = Field(default=10, ge=1)
    """Model calls of one rollout; the proxy answers no more."""
    agent_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds; absent leaves it to the task."""
    verifier_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds; absent leaves it to the task."""
    trial_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds of a whole trial, whatever it hangs in."""
    reward_key: str = "reward"
    """Which entry of the verifier's output is the reward."""
    expects_hand_in: bool = False
    """Whether a rollout that does not hand in once, alone in its last turn, is `submission_invalid`."""
    submission_floor: float | None = None
    """Reward of such rollouts; absent leaves them the verifier's."""
    concurrency: int = Field(default=8, ge=1)
    """Rollouts that run at once, whatever their phase."""
    setup_slots: int | None = Field(default=None, ge=1)
    """Of these, how many set up environment and agent at once; absent is all."""
    agent_slots: int | None = Field(default=None, ge=1)
    """Of these, how many agents run at once; absent is all."""
    verifier_slots: int | None = Field(default=None, ge=1)
    """Of these, how many verifiers run at once; absent is all."""
    starts_per_s: float | None = Field(default=None, gt=0)
    """Most trials that start in a second; absent is as many as there are."""
    workers: int = Field(default=2, ge=0)
    """Processes that run trials, on each host; 0 runs them in the driver."""
    ray_address: str | None = None
    """Ray cluster that runs them: `HOST:PORT`, or `auto` for this machine's; absent is this machine."""
    trials_directory: Path | None = None
    """Where Harbor's trial directories are made; absent is the run directory."""
    keep_trials: bool = False
    """Whether Harbor's trial directories stay."""

    @model_validator(mode="after")
    def _proxy_is_found(self) -> Self:
        address = proxy_address(self.proxy_address, self.proxy_url)
        if address != ProxyAddress() and self.agent_route is not Route.ADDRESS:
            raise ValueError(
                'proxy_address and proxy_url are for agent_route = "address"; other agents call the proxy'
                " from this machine"
            )
        if address != ProxyAddress() and self.ray_address is not None:
            raise ValueError(
                "proxy_address and proxy_url are not for ray_address: its hosts find the proxy at the"
                " driver's address in the cluster"
            )
        return self

    @model_validator(mode="after")
    def _needs_workers_on_hosts(self) -> Self:
        if self.ray_address is not None and self.workers == 0:
            raise ValueError(
                "workers = 0 runs trials in the driver, and ray_address on hosts; set one of them"
            )
        return self


class JobSettings(_Section):
    """The job of `backend = "cortex"`. Which service and which token is never in a recipe: `pilotage login`
    or the environment says."""

    model_name: str | None = None
    """The policy's name at the service; absent is the name of `policy.model`'s directory."""
    hardware: Literal["H200", "B200", "B300"] = "H200"
    """Kind of GPU."""
    training_gpus: int = Field(default=1, ge=1)
    """GPUs of the trainer."""
    sampling_gpus: int = Field(default=1, ge=1)
    """GPUs of the sampler."""
    startup_timeout_s: float = Field(default=1800.0, gt=0)
    """A job that does not run after so long is cancelled."""
    lease_s: float = Field(default=60.0, ge=5, le=86_400)
    """A job whose driver is silent for so long is cancelled by the service."""
    idle_timeout_s: int = Field(default=1800, ge=0)
    """A job that nobody uses for so long is reclaimed; 0 never is."""
    comment: str | None = None
    """Marks the job as yours; absent is ARCTIC_CORTEX_JOB_COMMENT, or user and host."""


class TinkerSettings(_Section):
    """The model of `backend = "tinker"`. Server and key are never in a recipe: TINKER_BASE_URL and
    TINKER_API_KEY say."""

    model_name: str | None = None
    """The policy's name at the server; absent is the name of `policy.model`'s directory."""
    lora_rank: int = Field(default=32, ge=1)
    """Rank of the adapter; a server that trains all weights has none."""
    lora_seed: int | None = Field(default=None, ge=0)
    """Of the adapter's first weights; absent leaves them to the server."""
    startup_timeout_s: float = Field(default=1800.0, gt=0)
    """The run stops where the server has no trainer ready after so long."""


class Recipe(_Section):
    """A whole experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Of the experiment; runs are named after it."""
    reference: Literal["harbor", "code_localization"] | None = None
    """Whose hyperparameters it takes or forks; a recipe of the reference's own name has exactly those."""
    backend: Literal["local", "cortex", "tinker"] = "local"
    """Where trainer and sampler are: `local` is this process, `cortex` a job of a training service, `tinker`
    a model at a server of the Tinker API."""
    logger: tuple[TrackerName, ...] = (TrackerName.CONSOLE,)
    """Who gets each step's record beside `metrics.jsonl`; one name or a list. May change on a resume."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port on 127.0.0.1 where the driver answers Prometheus; absent answers none. May change on a resume."""
    policy: PolicySettings
    tasks: TaskSettings = TaskSettings()
    rollouts: RolloutSettings = RolloutSettings()
    loop: LoopSettings = LoopSettings()
    job: JobSettings = JobSettings()
    tinker: TinkerSettings = TinkerSettings()

    @field_validator("logger", mode="before")
    @classmethod
    def _read_names(cls, value: object) -> object:
        """Take one name, or names between commas, as launch blocks write them."""
        return [name.strip() for name in value.split(",")] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _keep_references_intact(self) -> Self:
        if self.reference is not None and self.name == self.reference:
            changed = changes(self.resolved(), self.reference)
            if changed:
                raise ValueError(
                    f"recipe {self.name} is a reference and stays as it is, but {changed[0]};"
                    " give the fork a name of its own, name=..."
                )
        return self

    @model_validator(mode="after")
    def _ask_tinker_in_its_own_words(self) -> Self:
        if self.backend == "tinker" and self.policy.peft_config is not None:
            raise ValueError(
                "policy.peft_config is for the backends local and cortex; give tinker.lora_rank instead"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Return plain values for TOML: what is absent is left out."""
        return _without_none(self.model_dump(mode="json"))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _override(text: str) -> tuple[list[str], Any]:
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"an override is a.b=value, got {text!r}")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw  # a bare word is a string
    return key.strip().split("."), value


def _applied(config: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    for text in overrides:
        path, value = _override(text)
        section = config
        for name in path[:-1]:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                raise ConfigError(f"override {text!r}: {name} is a value, not a section")
        section[path[-1]] = value
    return config


_PATH_KEYS = (
    ("policy", "model"),
    ("tasks", "train"),
    ("tasks", "held_out"),
    ("rollouts", "system_prompt_file"),
    ("rollouts", "skills"),
    ("rollouts", "trials_directory"),
)


def _anchored(config: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make the file's relative paths absolute; what is no text is left for validation to refuse."""
    for section_name, key in _PATH_KEYS:
        section = config.get(section_name)
        if not isinstance(section, dict) or key not in section:
            continue
        value = section[key]
        if isinstance(value, str):
            section[key] = str(base / Path(value).expanduser())
        elif isinstance(value, list):
            section[key] = [str(base / Path(v).expanduser()) if isinstance(v, str) else v for v in value]
    return config


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file and apply overrides (whose paths are relative to the working directory).

    Raises:
        ConfigError: no such file, not TOML, an unknown key or a wrong value; the message names the key.
    """
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; give a recipe file, for example recipes/demo.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    config = _anchored(config, path.resolve().parent)
    config = _anchored(_applied(config, overrides), Path.cwd())
    try:
        return Recipe.model_validate(config)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_fault(error)}") from None


def _first_fault(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {key}; docs/reference.md lists the keys"
    if first["type"] == "value_error":
        return f"{key}: {first['msg']}".replace("Value error, ", "").removeprefix(": ")
    if first["type"] == "missing":
        return f"missing key {key}"
    return f"{key} = {first['input']!r}: {first['msg']}"
