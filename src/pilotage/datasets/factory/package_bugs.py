"""Find the proven bugs of one package: single ones, then combinations of them.

What is found depends on the sdist, the seed and the verdicts of the tests alone. Bugs are proven ahead, as
many at once as there is room, but accepted strictly in their seeded order, so that neither the number of
workers nor their speed changes the outcome.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from pilotage.datasets.factory.candidates import Candidate, applied_to, find_candidates, in_random_order
from pilotage.datasets.factory.issue import Symptom, hidden_names, symptoms
from pilotage.datasets.factory.journal import Journal, digest
from pilotage.datasets.factory.proof import MAX_TESTS, Bench, Runner, Suite, Verdict, judge, prove
from pilotage.datasets.factory.sources import SourceFile
from pilotage.datasets.factory.trees import decoded
from pilotage.datasets.sdists import Sdist
from pilotage.localization import Places, gold_places

MULTI_PLACE_SHARE = 0.36
"""Of the bugs, those that are combinations: a third, and a little for rounding."""
MAX_PER_DEFINITION = 3
MAX_USES = 2
"""Combinations that one bug takes part in."""
THREE_PLACE_SHARE = 0.3
"""Of the combinations, those of three; the others are of two."""
CAPPED_SHARE = 0.1
"""At most, of the bugs: those that end in a NameError, which a search for the name finds, and those that
lack a statement."""
_NAME_ERRORS = frozenset({"NameError", "UnboundLocalError"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenBug:
    """One bug, or a combination, with what proves and what tells it."""

    parts: tuple[Candidate, ...]
    gold: Places
    changed: Mapping[str, bytes]
    """Path -> content of the files that hold the bug."""
    verdict: Verdict
    told: tuple[Symptom, ...]
    """One for each part, of different tests."""

    @property
    def is_name_error(self) -> bool:
        """Return whether the text tells of a name that is not there."""
        return any(symptom.error in _NAME_ERRORS for symptom in self.told)


@dataclass(slots=True, kw_only=True)
class Yield:
    """What became of one kind's candidates."""

    tried: int = 0
    ran: int = 0
    valid: int = 0
    kept: int = 0
    run_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageBugs:
    """What one package gave."""

    bugs: tuple[ProvenBug, ...]
    yields: Mapping[str, Yield]
    """By kind; combinations have kinds of their own."""
    drops: Mapping[str, int]
    """Reason -> candidates that it took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Everything that bugs of one package are made with."""

    sdist: Sdist
    bench: Bench
    suite: Suite
    journal: Journal
    runner: Runner
    seed: int
    threads: ThreadPoolExecutor
    """Proofs that are under way at once."""
    lookahead: int

    def rng(self, purpose: str) -> random.Random:
        """Return a generator that depends on the seed, the package and the purpose alone."""
        return random.Random(f"{self.seed} {self.bench.label} {purpose}")

    def start(self, parts: Sequence[Candidate], tests: Sequence[str]) -> Future[Verdict]:
        """Prove a bug, or read in the journal how that went."""
        known: Future[Verdict] = Future()
        changed = applied_to(self.sdist.files, parts)
        if not tests or changed is None:
            known.set_result(Verdict(dropped="untested" if changed is not None else "no_python"))
            return known
        edits = [[part.path, [[e.start, e.end, e.text] for e in part.edits]] for part in parts]
        key = digest(self.sdist.sha256, edits, list(tests), self.seed)
        verdict = self.journal.verdict(key)
        if verdict is not None:
            known.set_result(verdict)
            return known
        return self.threads.submit(self._prove, changed, tests, key)

    def _prove(self, changed: Mapping[str, bytes], tests: Sequence[str], key: str) -> Verdict:
        verdict = judge(*prove(self.bench, self.runner, changed=changed, tests=tests, seed=key))
        self.journal.keep(key, verdict)
        return verdict

    def gold(self, changed: Mapping[str, bytes]) -> Places:
        """Return the places of a bug."""
        return gold_places(decoded(changed, changed), decoded(self.sdist.files, changed))


@dataclass(slots=True)
class _Ledger:
    yields: dict[str, Yield] = field(default_factory=dict[str, Yield])
    drops: Counter[str] = field(default_factory=Counter[str])

    def count(self, kind: str, verdict: Verdict) -> Yield:
        row = self.yields.setdefault(kind, Yield())
        row.tried += 1
        row.ran += verdict.run_s > 0
        row.run_s += verdict.run_s
        return row


def in_order[T, R](
    items: Iterable[T], start: Callable[[T], Future[R]], lookahead: int
) -> Iterator[tuple[T, R]]:
    """Yield each item with its result, in the items' order, `lookahead` of them under way."""
    waiting: deque[tuple[T, Future[R]]] = deque()
    for item in items:
        waiting.append((item, start(item)))
        if len(waiting) >= lookahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


def find_bugs(shop: Workshop, *, wanted: int, on_found: Callable[[int], None]) -> PackageBugs:
    """Return up to `wanted` bugs in random order, at least a third of them combinations.

    Args:
        on_found: is told how many there are after each one.
    """
    ledger = _Ledger()
    # Two bugs at least to combine.
    num_combined = max(0, min(round(wanted * MULTI_PLACE_SHARE), wanted - 2))
    num_singles = wanted - num_combined
    singles: list[ProvenBug] = []
    for bug in _singles(shop, wanted, ledger):
        singles.append(bug)
        on_found(len(singles))
        if len(singles) == num_singles:
            break
    combined: list[ProvenBug] = []
    for bug in _combinations(shop, singles, min(num_combined, len(singles)), ledger):
        combined.append(bug)
        on_found(len(singles) + len(combined))
    bugs = [*singles, *combined]
    shop.rng("names").shuffle(bugs)
    return PackageBugs(bugs=tuple(bugs), yields=ledger.yields, drops=ledger.drops)


def _candidates(shop: Workshop) -> list[Candidate]:
    found: list[Candidate] = []
    for path in shop.bench.layout.sources:
        if path not in shop.suite.lines:
            continue
        try:
            source = SourceFile(path, shop.sdist.files[path])
        except ValueError:
            continue
        found += find_candidates(source)
    return in_random_order(found, shop.rng("order"))


def _singles(shop: Workshop, wanted: int, ledger: _Ledger) -> Iterator[ProvenBug]:
    definitions: Counter[tuple[str, str]] = Counter()
    capped: Counter[str] = Counter()
    limit = int(wanted * CAPPED_SHARE)

    def is_full(candidate: Candidate) -> bool:
        if candidate.kind == "removed_statement" and capped["removed_statement"] >= limit:
            return True
        return definitions[candidate.definition] >= MAX_PER_DEFINITION

    # What is full now stays full, so leaving it out here and below comes to the same.
    items = (candidate for candidate in _candidates(shop) if not is_full(candidate))
    for candidate, verdict in in_order(
        items, lambda part: shop.start([part], shop.suite.witnesses(part.path, *part.lines)), shop.lookahead
    ):
        if is_full(candidate):
            continue
        row = ledger.count(candidate.kind, verdict)
        bug = verdict.dropped or _single(shop, candidate, verdict)
        if isinstance(bug, str):
            ledger.drops[bug] += 1
            continue
        row.valid += 1
        if bug.is_name_error and capped["name_error"] >= limit:
            ledger.drops["name_error"] += 1
            continue
        capped["name_error"] += bug.is_name_error
        capped[candidate.kind] += 1
        definitions[candidate.definition] += 1
        row.kept += 1
        yield bug


def _single(shop: Workshop, candidate: Candidate, verdict: Verdict) -> ProvenBug | str:
    """Return the bug, or why there is none to tell."""
    changed = applied_to(shop.sdist.files, [candidate])
    assert changed is not None
    gold = shop.gold(changed)
    if not gold.files:
        return "same_code"
    told = symptoms(verdict.fail_to_pass, shop.sdist.files, hidden_names(gold))
    if not told:
        return "untold"
    return ProvenBug(parts=(candidate,), gold=gold, changed=changed, verdict=verdict, told=(told[0],))


def _combinations(
    shop: Workshop, singles: Sequence[ProvenBug], wanted: int, ledger: _Ledger
) -> Iterator[ProvenBug]:
    """Yield up to `wanted` combinations of bugs that are tasks of their own."""
    uses: Counter[int] = Counter()
    num_found = 0

    def is_spent(chosen: tuple[int, ...]) -> bool:
        return any(uses[index] >= MAX_USES for index in chosen)

    items = (chosen for chosen in _choices(shop, singles, wanted) if not is_spent(chosen))
    proofs = in_order(
        items, lambda chosen: _start_combined(shop, [singles[i] for i in chosen]), shop.lookahead
    )
    for chosen, verdict in proofs if wanted else ():
        if is_spent(chosen):
            continue
        row = ledger.count(f"{len(chosen)} places", verdict)
        bug = verdict.dropped or _combined(shop, [singles[i] for i in chosen], verdict)
        if isinstance(bug, str):
            ledger.drops[bug] += 1
            continue
        uses.update(chosen)
        row.valid += 1
        row.kept += 1
        yield bug
        num_found += 1
        if num_found == wanted:
            return


def _choices(shop: Workshop, singles: Sequence[ProvenBug], wanted: int) -> Iterator[tuple[int, ...]]:
    """Yield indices of two or three bugs in different definitions, none of which lacks a name."""
    rng = shop.rng("combine")
    usable = [index for index, bug in enumerate(singles) if not bug.is_name_error]
    seen: set[tuple[int, ...]] = set()
    for _ in range(100 * wanted):
        size = 3 if rng.random() < THREE_PLACE_SHARE else 2
        if len(usable) < size:
            continue
        chosen = tuple(sorted(rng.sample(usable, size)))
        definitions = {singles[index].parts[0].definition for index in chosen}
        if chosen not in seen and len(definitions) == size:
            seen.add(chosen)
            yield chosen


def _start_combined(shop: Workshop, bugs: Sequence[ProvenBug]) -> Future[Verdict]:
    each = MAX_TESTS // len(bugs)
    breadth = shop.suite.breadth
    tests = {
        name
        for bug in bugs
        for name in sorted(bug.verdict.fail_to_pass, key=lambda name: (breadth[name], name))[:each]
    }
    return shop.start([bug.parts[0] for bug in bugs], sorted(tests))


def _combined(shop: Workshop, bugs: Sequence[ProvenBug], verdict: Verdict) -> ProvenBug | str:
    """Return the combination, or why it is none: each bug must show in a test of its own."""
    parts = tuple(bug.parts[0] for bug in bugs)
    changed = applied_to(shop.sdist.files, parts)
    assert changed is not None
    gold = shop.gold(changed)
    hidden = hidden_names(gold)
    told: list[Symptom] = []
    for bug in bugs:
        others = [name for other in bugs if other is not bug for name in other.verdict.fail_to_pass]
        own = {
            name: failure
            for name, failure in verdict.fail_to_pass.items()
            if name in bug.verdict.fail_to_pass and name not in others
        }
        found = symptoms(own, shop.sdist.files, hidden)
        if not found:
            return "masked"
        told.append(found[0])
    if any(symptom.error in _NAME_ERRORS for symptom in told):
        return "name_error"
    return ProvenBug(parts=parts, gold=gold, changed=changed, verdict=verdict, told=tuple(told))
