"""Progress on a terminal: a bar for the phase under way, and one line for each finished step."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pilotage.types import Rollout


class _Bar:
    """A bar that is shown while its context is open, and lines above it."""

    _progress: Progress

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print one line above the bar."""
        self._progress.console.print(text, markup=False, soft_wrap=True)


class TerminalObserver(_Bar):
    """An `Observer`; where the output is no terminal, only the lines are printed."""

    def __init__(self, *, num_steps: int, prints_records: bool = True) -> None:
        """Args:
        prints_records: whether each step's record becomes a line.
        """
        self._num_steps = num_steps
        self._prints_records = prints_records
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[reward]}"),
            TimeElapsedColumn(),
            console=Console(highlight=False),
            transient=True,
        )
        self._bar = self._progress.add_task("starting", total=None, reward="")
        self._rewards: list[float] = []

    def on_phase(self, phase: str, step: int, total: int) -> None:
        """See `Observer`."""
        self._rewards.clear()
        description = f"step {step}/{self._num_steps} {phase}"
        self._progress.reset(self._bar, description=description, total=total or None, reward="")

    def on_rollout(self, rollout: Rollout) -> None:
        """See `Observer`."""
        if rollout.reward is not None:
            self._rewards.append(rollout.reward.value)
        mean = f"reward {sum(self._rewards) / len(self._rewards):.2f}" if self._rewards else ""
        self._progress.update(self._bar, advance=1, reward=mean)

    def on_record(self, record: dict[str, float]) -> None:
        """See `Observer`."""
        if self._prints_records:
            self.say(step_line(record, self._num_steps))


class PackagesProgress(_Bar):
    """A bar over what all packages shall give, and a line for each one done; safe from several threads."""

    def __init__(self) -> None:
        console = Console(highlight=False, stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._progress.add_task("fetching", total=None)
        self._counts: dict[str, tuple[int, int]] = {}

    def on_progress(self, package: str, found: int, wanted: int) -> None:
        """Show that a package has so many bugs of those wanted."""
        self._counts[package] = (found, wanted)
        counts = list(self._counts.values())
        self._progress.update(
            self._bar,
            description=f"bugs, now {package}",
            completed=sum(found for found, _ in counts),
            total=sum(wanted for _, wanted in counts),
        )


_CELLS = (
    ("reward/mean", "reward {:.3f}"),
    ("eval/reward_mean", "held-out {:.3f}"),
    ("outcome/completed", "completed {:.0f}"),
    ("reward/none_count", "without reward {:.0f}"),
    ("ledger/trained_tokens", "trained {:.0f} tokens"),
    ("policy/logprob_gap_max", "gap {:.1e}"),
    ("policy/clip_fraction", "clip {:.1%}"),
    ("optim/grad_norm", "grad {:.2f}"),
    ("time/step_s", "{:.1f} s"),
)


def step_line(record: dict[str, float], num_steps: int) -> str:
    """Return a step's record as one line; what was not measured is left out."""
    cells = [form.format(record[name]) for name, form in _CELLS if name in record]
    return f"step {int(record['step']):>3}/{num_steps}  " + "  ".join(cells)
