"""A sampler that breaks its word in one way gives the one finding for it."""

import dataclasses

import pytest
from tests.fakes import WordRenderer
from tests.ops.doctor import samplers
from tests.ops.doctor.samplers import HonestSampler

from pilotage.ops.doctor.findings import Finding, FindingName, Severity
from pilotage.ops.doctor.need import SamplerNeed
from pilotage.ops.doctor.sampler import check_sampler, skip_sampler

NEED = SamplerNeed(max_context_tokens=512, temperature=0.7, max_tokens=64)
BROKEN: list[tuple[type[HonestSampler], FindingName, str, str]] = [
    (samplers.Down, FindingName.SAMPLER, "the engine is gone", "read the log"),
    (samplers.Talkative, FindingName.SAMPLER, "at most 64 tokens were asked for", "another sampler"),
    (samplers.WithoutLogprobs, FindingName.SAMPLER_LOGPROBS, "every log-prob is 0", "return the log-prob"),
    (samplers.Infinite, FindingName.SAMPLER_LOGPROBS, "a log-prob is nan", "return the log-prob"),
    (samplers.Raw, FindingName.PROCESSED_LOGPROBS, "raw log-probs", "processed_logprobs"),
    (samplers.DeafToTemperature, FindingName.TEMPERATURE, "not honoured", "temperature of each request"),
    (samplers.AlwaysGreedy, FindingName.TEMPERATURE, "not honoured", "temperature of each request"),
    (samplers.DeafToTopP, FindingName.TOP_P, "not honoured", "leave loop.sampling.top_p at 1.0"),
    (samplers.RefusesTopP, FindingName.TOP_P, "refused", "leave loop.sampling.top_p at 1.0"),
    (samplers.DeafToSeed, FindingName.SEED, "not honoured", "cannot be drawn again"),
    (samplers.StripsEnd, FindingName.END_TOKEN, "does not end with one of [0]", "keep the stop token"),
    (samplers.RunsOn, FindingName.END_TOKEN, "went on after", "stop at those of the template"),
    (samplers.CutsPrompts, FindingName.CONTEXT_WINDOW, "the sampler cut it", "truncation"),
    (samplers.FailsOnLongPrompts, FindingName.CONTEXT_WINDOW, "out of memory", "must end a rollout"),
]
SIDE_EFFECTS: dict[type[HonestSampler], set[FindingName]] = {
    samplers.WithoutLogprobs: {FindingName.PROCESSED_LOGPROBS},  # what is 0 at both temperatures is raw too
}


async def findings_of(sampler: HonestSampler, need: SamplerNeed = NEED) -> dict[FindingName, Finding]:
    return {finding.name: finding for finding in await check_sampler(sampler, WordRenderer(), need)}


def above_ok(findings: dict[FindingName, Finding]) -> set[FindingName]:
    return {name for name, finding in findings.items() if finding.fix}


@pytest.mark.parametrize(
    ("kind", "name", "evidence", "fix"), BROKEN, ids=[kind.__name__ for kind, *_ in BROKEN]
)
async def test_a_broken_sampler_is_named_with_the_fix(
    kind: type[HonestSampler], name: FindingName, evidence: str, fix: str
) -> None:
    findings = await findings_of(kind())
    assert above_ok(findings) - SIDE_EFFECTS.get(kind, set()) == {name}
    assert evidence in findings[name].evidence
    assert fix in findings[name].fix


async def test_an_honest_sampler_has_nothing_above_ok_and_nothing_skipped() -> None:
    findings = await findings_of(HonestSampler())
    assert {finding.severity for finding in findings.values()} == {Severity.OK}
    assert len(findings) == 8
    assert "processed: gap of" in findings[FindingName.PROCESSED_LOGPROBS].evidence


async def test_raw_logprobs_are_well_at_temperature_1() -> None:
    findings = await findings_of(samplers.Raw(), dataclasses.replace(NEED, temperature=1.0))
    assert above_ok(findings) == set()
    assert "raw, which is the same" in findings[FindingName.PROCESSED_LOGPROBS].evidence


async def test_a_window_below_the_recipes_is_an_error_that_names_both() -> None:
    findings = await findings_of(HonestSampler(max_context_tokens=256))
    assert above_ok(findings) == {FindingName.CONTEXT_WINDOW}
    assert "holds 256 tokens, the recipe wants 512" in findings[FindingName.CONTEXT_WINDOW].evidence


async def test_a_sampler_that_is_not_asked_is_said_to_be_skipped_claim_by_claim() -> None:
    skipped = skip_sampler("no job")
    assert {finding.severity for finding in skipped} == {Severity.SKIPPED}
    assert {finding.name for finding in skipped} == set(await findings_of(HonestSampler()))
