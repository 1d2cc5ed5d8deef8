"""The canonical form of arguments forgets spelling, and only spelling."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotage.proxy.canonical import CanonicalCall, canonical_arguments

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4), st.booleans(), st.sampled_from([None, 0, 3]))
def test_spacing_escapes_and_key_order_are_forgotten(
    value: dict[str, Any], is_ascii: bool, indent: int | None
) -> None:
    text = json.dumps(value)
    other = json.dumps(dict(reversed(value.items())), ensure_ascii=is_ascii, indent=indent)
    assert canonical_arguments(text) == canonical_arguments(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": [1, 2]}', '{"a": [2, 1]}'),
        ('{"a": null}', "{}"),
        ('{"a": 1}', '{"a": 1, "timeout": 30}'),
        ('{"a": "x"}', '{"a": "x "}'),
        ('{"a"', '{"b"'),
        ("{}", "[]"),
    ],
)
def test_what_a_call_means_is_kept(one: str, other: str) -> None:
    assert canonical_arguments(one) != canonical_arguments(other)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ('{"b": 1, "a": {"d": 2, "c": 3}}', '{"a":{"c":3,"d":2},"b":1}'),
        ('{"a": "one\ntwo"}', '{"a":"one\\ntwo"}'),  # a raw line break, which agents repair
        ('{"a": NaN}', '{"a":NaN}'),
        ('{"a": "ls', 'raw:{"a": "ls'),
        ("", "raw:"),
        ("[" * 100_000, "raw:" + "[" * 100_000),
        ('{"a": ' + "[" * 300 + "]" * 300 + "}", '{"a":' + "[" * 300 + "]" * 300 + "}"),
    ],
)
def test_canonical_arguments_by_example(text: str, canonical: str) -> None:
    assert canonical_arguments(text) == canonical
    assert CanonicalCall(name="f", arguments=canonical).is_malformed is canonical.startswith("raw:")
