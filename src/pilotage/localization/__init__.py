"""Code localization, pure: gold places from two versions of a tree, and the score of a hand-in.

Three levels, after CodeScout's recipe: files, modules (a class, or a top-level function) and functions
(`Class.method`, or a top-level function). Reward = file F1 + module F1 + function F1, at most 3.

`scoring` imports the standard library only, because its source is copied into a task's `tests/`.
Nothing here reads a disk or runs a program.
"""

from pilotage.localization.gate import Submission, submission_fault
from pilotage.localization.gold import gold_of_changes, gold_places
from pilotage.localization.mentions import COMMON_NAMES, MIN_NAME, mentioned_names
from pilotage.localization.retrieval import BASELINES, Bm25, Function, functions_of, locate
from pilotage.localization.scoring import (
    EmptyLevel,
    Places,
    Score,
    ceiling,
    locations_of,
    places_of,
    score_locations,
)

__all__ = [
    "BASELINES",
    "COMMON_NAMES",
    "MIN_NAME",
    "Bm25",
    "EmptyLevel",
    "Function",
    "Places",
    "Score",
    "Submission",
    "ceiling",
    "functions_of",
    "gold_of_changes",
    "gold_places",
    "locate",
    "locations_of",
    "mentioned_names",
    "places_of",
    "score_locations",
    "submission_fault",
]
