"""The warm start's data: what may be learnt from a batch, and what renaming words leaves as it was."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.cli import main
from pilotage.recipes import load_recipe
from pilotage.recipes.tiny_tokenizer import write_tokenizer
from pilotage.recipes.warmstart import (
    MAX_SEARCHES,
    MODEL_STEPS,
    ROLLOUTS_PER_TASK,
    _searches,
    copy_batch,
    shuffle_words,
    task_words,
)
from pilotage.rendering import TokenizerFile
from pilotage.types import Sample, Task

VOCAB = np.arange(10, 90)
RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def make_sample(ids: list[int], mask: list[bool]) -> Sample:
    zeros = np.zeros(len(ids), np.float32)
    return Sample(
        sequence_id="s",
        group_id="g",
        token_ids=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.bool_),
        sampler_logprobs=zeros,
        advantages=zeros.copy(),
        weights_versions=np.full(len(ids), -1, np.int32),
    )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_copy_batch_asks_for_nothing_that_its_context_does_not_tell(seed: int) -> None:
    for sample in copy_batch(VOCAB, 3, np.random.default_rng(seed)):
        ids = sample.token_ids.tolist()
        phrases = [tuple(ids[start : start + 3]) for start in range(0, len(ids), 3)]
        for position, phrase in enumerate(phrases):
            start = 3 * position
            expected = phrase in phrases[:position]  # what was never seen cannot be known
            assert sample.loss_mask[start : start + 3].tolist() == [False, expected, expected]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_a_copy_batch_repeats_every_phrase_three_times(seed: int) -> None:
    batch = copy_batch(VOCAB, 4, np.random.default_rng(seed))
    assert [sample.sequence_id for sample in batch] == [f"copy-{index}" for index in range(4)]
    for sample in batch:
        ids = sample.token_ids.tolist()
        assert set(ids) <= set(VOCAB.tolist())
        counts = Counter(tuple(ids[start : start + 3]) for start in range(0, len(ids), 3))
        assert all(count % 3 == 0 for count in counts.values())
        assert 6 <= sum(counts.values()) // 3 <= 11
        assert sample.trained_tokens == 2 * (len(ids) // 3 - len(counts))


def test_a_copy_batch_follows_from_its_seed() -> None:
    one, same, other = (copy_batch(VOCAB, 2, np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    assert one.token_ids.tolist() == same.token_ids.tolist() != other.token_ids.tolist()


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    ids = draw(st.lists(st.integers(0, 19), min_size=1, max_size=30))
    mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    return make_sample(ids, [False, *mask[1:]])


@settings(deadline=None)
@given(
    sample=samples(),
    words=st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True),
    seed=st.integers(0, 2**31),
)
def test_renamed_words_are_a_permutation_and_everything_else_stays(
    sample: Sample, words: list[int], seed: int
) -> None:
    before = sample.token_ids.tolist()
    renamed = shuffle_words(sample, np.array(words), np.random.default_rng(seed))
    after = renamed.token_ids.tolist()
    name_of = dict(zip(before, after, strict=True))
    assert [name_of[token] for token in before] == after  # the same word to the same word throughout
    assert len(set(name_of.values())) == len(name_of)  # and two words to two
    for old, new in name_of.items():
        assert new in words if old in words else new == old
    assert renamed.loss_mask.tolist() == sample.loss_mask.tolist()
    assert renamed.sequence_id == sample.sequence_id
    assert sample.token_ids.tolist() == before


def test_renaming_does_change_words() -> None:
    sample = make_sample([5, 6, 7, 8, 5], [False, True, True, True, True])
    after = shuffle_words(sample, np.arange(5, 9), np.random.default_rng(0)).token_ids.tolist()
    assert after != sample.token_ids.tolist()
    assert after[0] == after[4]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TokenizerFile:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, ["search h11/core.py::read alpha beta idna/util.py::feed 12 (a) `, `"])
    return TokenizerFile.load(directory)


def test_words_are_of_four_kinds_without_what_the_format_repeats(tokenizer: TokenizerFile) -> None:
    size = 1 + max(tokenizer.encode(["search idna/util.py::feed"]).tolist())

    def encoded(*texts: str) -> Sample:
        ids = [int(tokenizer.encode([text])[0]) for text in texts]
        return make_sample(ids, [False] * len(ids))

    # `search` is in every transcript; the others in one of three, below the share of the format.
    transcripts = [encoded("search", word) for word in ("alpha", "h11/", "::read")]
    every_id = max(size, *(int(s.token_ids.max()) + 1 for s in transcripts), 400)
    vocabulary = [token for token in range(every_id) if tokenizer.decode([token])]
    found = task_words(transcripts, tokenizer, max(vocabulary) + 1)
    kinds = {frozenset(tokenizer.decode([token]) for token in kind.tolist()) for kind in found}
    assert kinds == {
        frozenset({"alpha", "beta"}),
        frozenset({"h11/", "idna/"}),
        frozenset({"core.py", "util.py"}),
        frozenset({"::read", "::feed"}),
    }


@pytest.mark.parametrize("name", ["demo", "demo_factory"])
def test_a_demos_recipe_starts_from_a_policy_that_was_made_for_it(name: str) -> None:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    made = json.loads((recipe.policy.model / "warm_start.json").read_text())
    assert made["recipe"] == recipe.name
    tokenizer = TokenizerFile.load(recipe.policy.model)
    for word in ("code_search", "localization_finish", "::", ["no", "match"][1]):
        assert tokenizer.encode([word]).size == 1, word
    size = json.loads((recipe.policy.model / "config.json").read_text())["vocab_size"]
    assert tokenizer.decode([size - 1])
    assert not tokenizer.decode([size])


def test_of_many_choices_of_names_the_same_sample_is_searched_and_of_few_all(tmp_path: Path) -> None:
    task = Task(id="p/a", path=tmp_path)
    few = _searches(task, ["one", "two", "three"])
    assert len(few) == 7  # three, three pairs, and all
    many = _searches(task, [f"name{number}" for number in range(20)])
    assert len(set(many)) == len(many) == MAX_SEARCHES
    assert all(1 <= len(choice) <= 3 for choice in many)
    assert _searches(task, [f"name{number}" for number in range(20)]) == many


@pytest.mark.agents
def test_a_model_that_there_is_learns_to_imitate_and_keeps_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data", "demo", "--out", str(tmp_path / "tasks"), "--train", "4", "--held-out", "2"]) == 0
    train = f'tasks.train=["{tmp_path / "tasks" / "train"}"]'
    held_out = f'tasks.held_out=["{tmp_path / "tasks" / "held_out"}"]'
    out = tmp_path / "policy"
    command = ["warmstart", str(RECIPES / "demo.toml"), "--model", str(RECIPES / "demo" / "policy")]
    assert main([*command, "--out", str(out), train, held_out, "rollouts.workers=0"]) == 0
    losses = [float(found) for found in re.findall(r"imitation: .* loss (\S+)", capsys.readouterr().out)]
    assert len(losses) == MODEL_STEPS // 5
    assert losses[-1] < losses[0]
    kept = (out / "tokenizer.json").read_bytes()
    assert kept == (RECIPES / "demo" / "policy" / "tokenizer.json").read_bytes()
    assert json.loads((out / "warm_start.json").read_text())["demonstrations"] == 4 * ROLLOUTS_PER_TASK
    assert not (out / "optimizer.safetensors").exists()


def test_a_model_with_a_template_that_the_demonstrations_are_not_written_in_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(RECIPES / "demo" / "policy", tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] += "{{- 'more' -}}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    command = ["warmstart", str(RECIPES / "demo.toml"), "--model", str(model)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert "written in the ChatML of this project, and no other" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
