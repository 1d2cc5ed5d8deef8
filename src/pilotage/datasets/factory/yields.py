"""The table of what each package and each kind of bug gave."""

from collections.abc import Mapping, Sequence

from pilotage.datasets.factory.package_bugs import Yield

_COLUMNS = ("tried", "ran", "valid", "kept", "valid / minute")


def _cells(row: Yield) -> list[str]:
    rate = f"{60 * row.valid / row.run_s:.1f}" if row.run_s else "-"
    return [str(row.tried), str(row.ran), str(row.valid), str(row.kept), rate]


def summed(rows: Sequence[Yield]) -> Yield:
    """Return the sum of rows."""
    return Yield(
        tried=sum(row.tried for row in rows),
        ran=sum(row.ran for row in rows),
        valid=sum(row.valid for row in rows),
        kept=sum(row.kept for row in rows),
        run_s=sum(row.run_s for row in rows),
    )


def yield_table(title: str, rows: Mapping[str, Yield], more: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table, a row each and their sum.

    Args:
        title: head of the first column.
        rows: name -> figures. The rate is that of one worker that does nothing else.
        more: head of a further column -> (name, or "all") -> cell, as the score of a baseline; what is
            missing is a dash.
    """
    heads = [title, *_COLUMNS, *more]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, row in [*rows.items(), ("all", summed(list(rows.values())))]:
        cells = [name, *_cells(row), *(column.get(name, "-") for column in more.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
