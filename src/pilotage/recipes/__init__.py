"""Recipes: where concrete classes are chosen.

A recipe is one TOML file and `a.b=value` overrides, read into one frozen class; `open_stack` turns it into
a trainer, a proxy and a runner. Unknown keys are refused before anything starts.
"""

from pilotage.recipes.config import Recipe, load_recipe

__all__ = ["Recipe", "load_recipe"]
