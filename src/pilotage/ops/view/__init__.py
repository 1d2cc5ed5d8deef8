"""A local web page over run directories, for a person who wants to see what a policy did and why.

    library: runs, metrics, states      index: summaries, read once, cached outside the runs
    fates: what training did            conversation, drift: what ids say, and where branches parted
    pages, rollout_page, charts: what is shown -> templates -> app, behind guard

Invariant: nothing is written into a run, and nothing is guessed: what the files do not hold, such as the
trainer's log-prob of a single token, the page says it does not have.
"""

from pilotage.ops.view.serving import export, serve

__all__ = ["export", "serve"]
