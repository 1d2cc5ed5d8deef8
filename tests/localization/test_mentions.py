"""Names that an issue mentions as code: the same rule for backticks, blocks and tracebacks."""

from hypothesis import given
from hypothesis import strategies as st

from pilotage.localization import COMMON_NAMES, mentioned_names

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{2,11}", fullmatch=True).filter(
    lambda name: name not in COMMON_NAMES
)
SOME_NAMES = st.lists(NAMES, min_size=1, max_size=6, unique=True)
OF_A_FACTORY = """# ValueError: no limit

This does not work as it should:

```python
reader = Reader("some text", limit=3)
reader.feed_all(b'more text')  # fails here
```

It ends with

```
ValueError: no limit for 'some file'
```
"""


def test_a_snippet_and_its_error_give_their_names_in_order_without_strings_and_comments() -> None:
    # `b` and `no` are too short, ValueError and `for` are everywhere, the title is no code.
    assert mentioned_names(OF_A_FACTORY) == ["reader", "Reader", "limit", "feed_all"]


def test_words_between_backticks_are_code() -> None:
    text = "A limit is wrong.\nSeen with `read_limit`, `chunk2` and ``sock.recv(1)``.\n"
    assert mentioned_names(text) == ["read_limit", "chunk2", "sock", "recv"]


def test_a_traceback_gives_its_functions_and_code_and_not_its_files() -> None:
    traceback = (
        "Traceback (most recent call last):\n"
        '  File "/srv/app/reader.py", line 12, in read_all\n'
        "    self.pump(limit)\n"
        '  File "<string>", line 1\n'
        "mypkg.errors.PumpError: dry\n"
    )
    expected = ["read_all", "pump", "limit", "mypkg", "errors", "PumpError", "dry"]
    assert mentioned_names(f"It went wrong.\n\n{traceback}And nothing came back.\n") == expected
    assert mentioned_names(f"```\n{traceback}```\n") == expected


def test_a_string_that_holds_an_escaped_quote_or_a_hash_is_left_out_whole() -> None:
    assert mentioned_names('`feed("one \\" two # three", four)`') == ["feed", "four"]


@given(SOME_NAMES)
def test_both_kinds_of_issues_mention_the_same_names(names: list[str]) -> None:
    quoted = " and ".join(f"`{name}`" for name in names)
    block = "\n".join(f'{name} = 1  # "{name}"' for name in names)
    assert mentioned_names(f"A count is too high. Seen with {quoted}.") == names
    assert mentioned_names(f"It fails:\n\n```python\n{block}\n```\n\nalways\n") == names
    assert mentioned_names(f"~~~\n{block}\n~~~\n") == names


@given(SOME_NAMES, st.lists(st.sampled_from(sorted(COMMON_NAMES)), max_size=3))
def test_a_name_is_mentioned_once_and_common_ones_never(names: list[str], common: list[str]) -> None:
    code = " ".join([*common, *names, *common, *reversed(names)])
    assert mentioned_names(f"```\n{code}\n```\n") == names


@given(st.lists(NAMES, max_size=8))
def test_prose_mentions_nothing(words: list[str]) -> None:
    assert mentioned_names(f"{' '.join(words)}.\n") == []
