"""Checking a model directory's own chat template: is it append-only, and does our renderer agree with it.

A template is append-only over a conversation if each prompt begins with all that was there before: the
last prompt, then the reply. Where it is not, rendering again would change tokens that were sampled; our
renderer never does that, it extends what was recorded.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from pilotage.errors import TemplateError
from pilotage.rendering.chat_template import ChatTemplate
from pilotage.rendering.families import choose_dialect
from pilotage.rendering.renderer import TemplateRenderer
from pilotage.rendering.scripted import SCENARIOS, TOOLS, TURNS, Scenario
from pilotage.rendering.tokenizer import Markup, TokenizerFile
from pilotage.types import Message, TokenIds

_SHOWN_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first place where two token sequences differ."""

    turn: int
    """Counted from 1."""
    token_index: int
    expected: str
    """Text around it in the sequence that should have stayed, or in the template's render."""
    got: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioReport:
    """What one scripted conversation showed."""

    name: str
    rewritten: Divergence | None = None
    """Where the template changed what it had rendered; None where it is append-only."""
    disagreement: Divergence | None = None
    """Where our renderer writes other tokens than the template."""
    refusal: str = ""
    """Why the template would not render the conversation at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeReport:
    """All conversations under one setting of `enable_thinking`; None is the template's default."""

    enable_thinking: bool | None
    family: str
    """Empty where no renderer exists for the template."""
    problem: str
    """Why there is none."""
    scenarios: tuple[ScenarioReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What `verify_template` found."""

    model_dir: Path
    modes: tuple[ModeReport, ...]

    @property
    def is_append_only(self) -> bool:
        """Whether no conversation was ever rewritten."""
        return all(scenario.rewritten is None for mode in self.modes for scenario in mode.scenarios)

    @property
    def is_usable(self) -> bool:
        """Whether our renderer exists and writes what the template writes, in every mode."""
        return all(
            mode.family and all(scenario.disagreement is None for scenario in mode.scenarios)
            for mode in self.modes
        )


def verify_template(model_dir: Path) -> TemplateReport:
    """Render scripted conversations of 1 to 8 turns through the directory's chat template.

    Raises:
        TemplateError: the directory has no tokenizer or no chat template that compiles.
    """
    tokenizer = TokenizerFile.load(model_dir)
    template = ChatTemplate.load(model_dir)
    modes = (False, True) if "enable_thinking" in template.source else (None,)
    return TemplateReport(
        model_dir=model_dir, modes=tuple(_verify_mode(tokenizer, template, mode) for mode in modes)
    )


def find_disagreement(
    renderer: TemplateRenderer,
    tokenizer: TokenizerFile,
    template: ChatTemplate,
    *,
    enable_thinking: bool | None,
) -> Divergence | None:
    """Return where the longest prompts of the scripted conversations differ from the template's, if at all.

    Raises:
        TemplateError: the template refuses one of them.
    """
    official = _Official(tokenizer=tokenizer, template=template, enable_thinking=enable_thinking)
    last = TURNS - 1
    return _first(
        _difference(
            tokenizer,
            last,
            official.prompt(scenario, last),
            renderer.render_prompt(scenario.messages_before(last), TOOLS),
        )
        for scenario in SCENARIOS
    )


def format_report(report: TemplateReport) -> str:
    """Return a report as text for a terminal."""
    lines = [str(report.model_dir)]
    for mode in report.modes:
        lines += _mode_lines(mode)
    lines.append(f"append-only: {'yes' if report.is_append_only else 'no'}")
    if report.is_usable:
        lines.append("usable: yes; recorded tokens are extended, never rendered again")
    else:
        lines.append("usable: no; use a model of a supported family with its official template")
    return "\n".join(lines)


def _mode_lines(mode: ModeReport) -> Iterator[str]:
    thinking = {None: "", False: ", thinking off", True: ", thinking on"}[mode.enable_thinking]
    yield f"{mode.family or 'no renderer'}{thinking}" + (f": {mode.problem}" if mode.problem else "")
    for scenario in mode.scenarios:
        if scenario.refusal:
            yield f"  {scenario.name}: refused: {scenario.refusal}"
            continue
        yield f"  {scenario.name}: {'rewrites history' if scenario.rewritten else 'append-only'}"
        for title, found in (("rewritten", scenario.rewritten), ("renderer differs", scenario.disagreement)):
            if found is not None:
                yield f"    {title} at turn {found.turn}, token {found.token_index}:"
                yield f"      expected {found.expected!r}"
                yield f"      got      {found.got!r}"


def _verify_mode(
    tokenizer: TokenizerFile, template: ChatTemplate, enable_thinking: bool | None
) -> ModeReport:
    renderer, family, problem = None, "", ""
    try:
        dialect = choose_dialect(template, enable_thinking=enable_thinking)
        renderer, family = TemplateRenderer(tokenizer=tokenizer, dialect=dialect), dialect.name
    except TemplateError as error:
        problem = str(error)
    official = _Official(tokenizer=tokenizer, template=template, enable_thinking=enable_thinking)
    scenarios = tuple(_verify_scenario(official, renderer, scenario) for scenario in SCENARIOS)
    return ModeReport(enable_thinking=enable_thinking, family=family, problem=problem, scenarios=scenarios)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Official:
    """The template's own prompts and replies, as ids."""

    tokenizer: TokenizerFile
    template: ChatTemplate
    enable_thinking: bool | None

    def prompt(self, scenario: Scenario, turn: int) -> TokenIds:
        return self._render(scenario.messages_before(turn), add_generation_prompt=True)

    def replied(self, scenario: Scenario, turn: int) -> TokenIds:
        """The conversation up to and with the reply of turn `turn`."""
        messages = [*scenario.messages_before(turn), scenario.turns[turn].reply]
        return self._render(messages, add_generation_prompt=False)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> TokenIds:
        text = self.template.render(
            messages,
            TOOLS,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=self.enable_thinking,
        )
        return self.tokenizer.encode([Markup(text)])


def _verify_scenario(
    official: _Official, renderer: TemplateRenderer | None, scenario: Scenario
) -> ScenarioReport:
    try:
        prompts = [official.prompt(scenario, turn) for turn in range(TURNS)]
        replied = [official.replied(scenario, turn) for turn in range(TURNS)]
    except TemplateError as error:
        return ScenarioReport(name=scenario.name, refusal=str(error))
    rewritten = _first(_rewrites(official.tokenizer, prompts, replied))
    disagreement = None
    if renderer is not None:
        comparisons = [_prompt_differences(official.tokenizer, renderer, scenario, prompts)]
        if rewritten is None:
            comparisons.append(_suffix_differences(official.tokenizer, renderer, scenario, prompts, replied))
        disagreement = _first(chain.from_iterable(comparisons))
    return ScenarioReport(name=scenario.name, rewritten=rewritten, disagreement=disagreement)


def _rewrites(
    tokenizer: TokenizerFile, prompts: Sequence[TokenIds], replied: Sequence[TokenIds]
) -> Iterator[Divergence | None]:
    """Compare each prompt and each reply with the beginning of the next render."""
    for turn in range(TURNS):
        yield _difference(tokenizer, turn, prompts[turn], replied[turn][: prompts[turn].size])
        if turn + 1 < TURNS:
            yield _difference(tokenizer, turn + 1, replied[turn], prompts[turn + 1][: replied[turn].size])


def _prompt_differences(
    tokenizer: TokenizerFile, renderer: TemplateRenderer, scenario: Scenario, prompts: Sequence[TokenIds]
) -> Iterator[Divergence | None]:
    """Compare our whole prompts with the template's."""
    for turn, prompt in enumerate(prompts):
        ours = renderer.render_prompt(scenario.messages_before(turn), TOOLS)
        yield _difference(tokenizer, turn, prompt, ours)


def _suffix_differences(
    tokenizer: TokenizerFile,
    renderer: TemplateRenderer,
    scenario: Scenario,
    prompts: Sequence[TokenIds],
    replied: Sequence[TokenIds],
) -> Iterator[Divergence | None]:
    """Compare our extensions of recorded replies with the template's prompts.

    Read after the prompts were found equal, so each reply holds the renderer's end marker.
    """
    end_id = renderer.stop_token_ids[0]
    for turn in range(1, TURNS):
        past = replied[turn - 1]
        recorded = past[: np.flatnonzero(past == end_id)[-1] + 1]
        suffix = renderer.render_suffix(end_id, scenario.turns[turn - 1].answers, TOOLS)
        yield _difference(tokenizer, turn, prompts[turn], np.concatenate([recorded, suffix]))


def _difference(tokenizer: TokenizerFile, turn: int, expected: TokenIds, got: TokenIds) -> Divergence | None:
    """Return the first difference; a missing token differs."""
    shared = min(expected.size, got.size)
    differing = np.flatnonzero(expected[:shared] != got[:shared])
    if differing.size == 0 and expected.size == got.size:
        return None
    at = int(differing[0]) if differing.size else shared
    window = slice(max(0, at - 2), at + _SHOWN_TOKENS)
    return Divergence(
        turn=turn + 1,
        token_index=at,
        expected=tokenizer.decode(expected[window].tolist()),
        got=tokenizer.decode(got[window].tolist()),
    )


def _first(found: Iterable[Divergence | None]) -> Divergence | None:
    return next((divergence for divergence in found if divergence is not None), None)
