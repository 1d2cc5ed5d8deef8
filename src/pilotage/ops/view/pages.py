"""What the pages of runs and steps show, gathered from files; routes and templates are elsewhere."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotage.algorithms import BatchRules, build_batch
from pilotage.loops.summaries import Summary
from pilotage.ops.alarms import Alarm, find_alarms
from pilotage.ops.report import Record, totals, training_steps
from pilotage.ops.view.charts import Chart, Span, chart, series, sparkline, waterfall
from pilotage.ops.view.library import Run, RunState, step_of
from pilotage.ops.watch import surroundings

_WIDE, _NARROW = (960.0, 260.0), (360.0, 220.0)
_SMALL = (300.0, 150.0)
_SMALL_CHARTS = (
    ("reward/mean_completed", "reward of completed rollouts"),
    ("policy/logprob_gap_mean", "sampler/trainer gap, mean nats"),
    ("policy/logprob_gap_max", "sampler/trainer gap, largest nats"),
    ("policy/clip_fraction", "clipped share of tokens"),
    ("policy/kl_to_reference", "KL to reference, nats"),
    ("optim/grad_norm", "gradient norm"),
    ("ledger/trained_tokens", "trained tokens"),
    ("rollout/turns_mean", "turns of a rollout"),
    ("lag/mean_versions", "lag, versions"),
    ("time/step_s", "seconds of a step"),
)
_GAUGE_PREFIXES = ("hack/", "proxy/hack_", "proxy/", "branch/")
_RECENT_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One run in the list of runs."""

    name: str
    state: RunState
    step: int
    num_steps: int | None
    reward: float | None
    first_held_out: float | None
    last_held_out: float | None
    spark: str
    model: str
    backend: str
    started_at: float | None
    alarms: list[Alarm]


def run_row(run: Run) -> RunRow:
    """Return what the list of runs says of one."""
    records, config = run.metrics(), run.config()
    rewards = [value for step, value in series(records, "reward/mean") if step > 0]
    held_out = [value for _, value in series(records, "eval/reward_mean")]
    events = run.events()
    num_steps = run.section("loop").get("num_steps")
    started = events[0].get("at") if events else None
    state = run.state()
    around = surroundings(run.directory) if state is RunState.LIVE else None
    return RunRow(
        name=run.name,
        state=state,
        step=int(records[-1]["step"]) if records else 0,
        num_steps=num_steps if isinstance(num_steps, int) else None,
        reward=rewards[-1] if rewards else None,
        first_held_out=held_out[0] if len(held_out) > 1 else None,
        last_held_out=held_out[-1] if held_out else None,
        spark=sparkline(rewards[-200:]),
        model=Path(run.model()).name,
        backend=str(config.get("backend", "")),
        started_at=float(started) if isinstance(started, int | float) else None,
        alarms=find_alarms(records, around),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A count that a person watches: hacks, malformed calls, rewritten histories."""

    name: str
    last: float
    recent: float
    """Sum over the newest steps."""
    total: float
    spark: str


def gauges(records: Sequence[Record]) -> list[Gauge]:
    """Return the counts that appear in the records under the watched prefixes; those of hacks first."""
    steps = training_steps(records)
    names = sorted({name for record in steps for name in record if name.startswith(_GAUGE_PREFIXES)})
    found: list[Gauge] = []
    for name in sorted(names, key=lambda name: ("hack" not in name, "malformed" not in name, name)):
        values = [float(record.get(name, 0)) for record in steps]
        is_quiet = not any(values) and not ("hack" in name or "malformed" in name)
        if is_quiet or name == "proxy/requests":
            continue
        found.append(
            Gauge(
                name=name,
                last=values[-1],
                recent=sum(values[-_RECENT_STEPS:]),
                total=sum(values),
                spark=sparkline(values[-200:]),
            )
        )
    return found


def run_charts(records: Sequence[Record]) -> tuple[list[Chart], list[Chart]]:
    """Return the reward curve, wide and narrow, and the small charts of what was measured."""
    large = [
        chart(records, "reward/mean", title="mean reward", width=width, height=height, is_smoothed=True)
        for width, height in (_WIDE, _NARROW)
    ]
    width, height = _SMALL
    small = [chart(records, key, title=title, width=width, height=height) for key, title in _SMALL_CHARTS]
    return [found for found in large if found], [found for found in small if found]


def ledger(records: Sequence[Record]) -> list[tuple[str, float]]:
    """Return what became of the sampled tokens of a run: (name, tokens), sampled first."""
    steps = training_steps(records)
    sums = [
        (name, sum(record.get(f"ledger/{name}_tokens", 0) for record in steps))
        for name in ("sampled", "trained", "masked", "dropped")
    ]
    for kind in ("masked", "dropped"):
        sums += [
            (f"{kind}: {reason}", float(count))
            for reason, count in totals(steps, f"ledger/{kind}_tokens/").items()
        ]
    return sums


def run_context(run: Run) -> dict[str, object]:
    """Return what the page of a run shows."""
    records = run.metrics()
    reward_charts, charts = run_charts(records)
    return {
        "run": run_row(run),
        "path": str(run.path),
        "reward_charts": reward_charts,
        "charts": charts,
        "gauges": gauges(records),
        "ledger": ledger(records),
        "outcomes": totals(training_steps(records), "outcome/"),
        "records": list(reversed(records)),
        "events": list(reversed(run.events()))[:50],
        "folders": {step_of(name): name for name in run.folders() if name.startswith("step-")},
        "evaluations": {step_of(name): name for name in run.folders() if name.startswith("eval-")},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """The rollouts of one task in a step."""

    id: str
    task: str
    rollouts: list[Summary]
    mean: float | None
    spread: float | None
    """Largest reward minus smallest."""
    verdict: str
    """Whether the group gave a gradient, or why not; empty where it was never compared."""
    advantages: Mapping[str, float]


def groups(summaries: Sequence[Summary], rules: BatchRules | None) -> list[GroupView]:
    """Return groups in the order of their first rollout.

    Args:
        rules: None for an evaluation, or for a recipe that cannot be read: nothing is compared.
    """
    members: dict[str, list[Summary]] = {}
    for summary in summaries:
        members.setdefault(summary.group or summary.id, []).append(summary)
    return [_group(name, rollouts, rules) for name, rollouts in members.items()]


def _group(name: str, rollouts: list[Summary], rules: BatchRules | None) -> GroupView:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    verdict, advantages = "", dict[str, float]()
    if rules is not None:
        whole = [rollout.skeleton() for rollout in rollouts if not rollout.fault]
        batch = build_batch(whole, rules)
        advantages = dict(batch.advantages)
        verdict = "compared" if advantages else ""
        if batch.num_groups_too_small:
            verdict = "too small"
        elif batch.num_groups_without_spread:
            verdict = "no spread"
        elif batch.num_groups_filtered:
            verdict = "filtered by reward"
    return GroupView(
        id=name,
        task=rollouts[0].task,
        rollouts=rollouts,
        mean=sum(rewards) / len(rewards) if rewards else None,
        spread=max(rewards) - min(rewards) if rewards else None,
        verdict=verdict,
        advantages=advantages,
    )


def step_spans(summaries: Sequence[Summary], href: str) -> list[Span]:
    """Return when the rollouts of a folder talked to the model."""
    return [
        Span(
            label=summary.id,
            kind=summary.outcome,
            start_s=summary.started_at,
            end_s=summary.finished_at,
            href=href + summary.id,
        )
        for summary in summaries
        if summary.started_at is not None and summary.finished_at is not None
    ]


def _phases(record: Record) -> list[Span]:
    """Return the phases of a training step, end to end."""
    spans: list[Span] = []
    start = 0.0
    for name, seconds in record.items():
        if name.startswith("time/") and name not in ("time/step_s", "time/evaluation_s"):
            label = name.removeprefix("time/").removesuffix("_s")
            spans.append(Span(label=label, kind="phase", start_s=start, end_s=start + seconds))
            start += seconds
    return spans


def step_context(run: Run, folder: str, summaries: Sequence[Summary]) -> dict[str, object]:
    """Return what the page of a step or an evaluation shows."""
    record = run.record(step_of(folder))
    is_training = folder.startswith("step-")
    settings = run.settings() if is_training else None
    names = run.folders()
    at = names.index(folder)
    return {
        "run": run_row(run),
        "folder": folder,
        "step": step_of(folder),
        "is_training": is_training,
        "record": record,
        "groups": groups(summaries, None if settings is None else settings.batch_rules()),
        "outcomes": dict(Counter(summary.outcome or "unreadable" for summary in summaries).most_common()),
        "phases": waterfall(_phases(record)) if is_training else None,
        "spans": waterfall(step_spans(summaries, f"/runs/{run.name}/rollouts/")),
        "previous": names[at - 1] if at else None,
        "next": names[at + 1] if at + 1 < len(names) else None,
    }
