"""Tokenising only what is new, against rendering and encoding the whole conversation again each turn.

    python scripts/fetch_test_tokenizers.py && python benchmarks/bench_rendering.py

One conversation of 128 turns that ends at about 69,000 tokens, with the official Qwen3 tokenizer and the
Qwen3 2507 template. "again" is the same renderer over the full history, which is the kinder opponent: the
official template through Jinja takes longer. Prints one row of a Markdown table, times of all turns in
seconds of one process.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pilotage.rendering import Qwen3, TemplateRenderer, TokenizerFile
from pilotage.types import Message, Role, ToolCall

TOKENIZER_DIR = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers" / "qwen3"
TURNS = 128
LINES_PER_RESULT = 28  # of about 17 tokens each, for 69,000 tokens in all
REPEATS = 3


def conversation() -> list[tuple[Message, Message]]:
    """Return (reply, tool result) of each turn."""
    turns: list[tuple[Message, Message]] = []
    for turn in range(TURNS):
        arguments = f'{{"command": "sed -n {turn},{turn + 40}p src/package/module_{turn}.py"}}'
        made = ToolCall(id=str(turn), name="terminal", arguments=arguments)
        lines = [f"    self.value_{turn}_{n} = compute(first, second={n})" for n in range(LINES_PER_RESULT)]
        turns.append(
            (
                Message(role=Role.ASSISTANT, content="Let me look at the module.", tool_calls=(made,)),
                Message(role=Role.TOOL, content="\n".join(lines), tool_call_id=str(turn)),
            )
        )
    return turns


def extend(renderer: TemplateRenderer, opening: list[Message], turns: list[tuple[Message, Message]]) -> int:
    """Encode each turn's new messages only; return the tokens of the last prompt without the replies."""
    size = renderer.render_prompt(opening, ()).size
    end_id = renderer.stop_token_ids[0]
    for _, result in turns:
        size += renderer.render_suffix(end_id, [result], ()).size
    return size


def render_again(
    renderer: TemplateRenderer, opening: list[Message], turns: list[tuple[Message, Message]]
) -> int:
    """Encode the whole conversation at each turn; return the tokens of the last prompt."""
    messages = list(opening)
    size = 0
    for reply, result in turns:
        messages += [reply, result]
        size = renderer.render_prompt(messages, ()).size
    return size


def timed(run: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    size = run()
    return time.perf_counter() - started, size


def main() -> int:
    if not (TOKENIZER_DIR / "tokenizer.json").is_file():
        print("no Qwen3 tokenizer: run scripts/fetch_test_tokenizers.py", file=sys.stderr)
        return 1
    renderer = TemplateRenderer(
        tokenizer=TokenizerFile.load(TOKENIZER_DIR), dialect=Qwen3(splits_reasoning=False)
    )
    opening = [
        Message(role=Role.SYSTEM, content="You fix bugs."),
        Message(role=Role.USER, content="It fails."),
    ]
    turns = conversation()
    extended, again = [], []
    tokens = 0
    for _ in range(REPEATS):
        extended.append(timed(lambda: extend(renderer, opening, turns))[0])
        seconds, tokens = timed(lambda: render_again(renderer, opening, turns))
        again.append(seconds)
    ratio = statistics.median(again) / statistics.median(extended)
    spread = np.array(again) / np.array(extended)
    print("| turns | tokens | suffixes s | again s | ratio (spread) |")
    print("|---|---|---|---|---|")
    print(
        f"| {TURNS} | {tokens:,} | {statistics.median(extended):.3f} | {statistics.median(again):.2f}"
        f" | {ratio:.1f} ({spread.min():.1f} to {spread.max():.1f}) |"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
