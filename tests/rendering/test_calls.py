"""Reading and writing calls: JSON (Hermes) and XML, typed by schema, never repaired, never raising."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rendering.conversations import TERMINAL, TOOLS, call

from pilotage.rendering import MALFORMED_NAME, hermes, xml_calls
from pilotage.rendering.dialect import CallText, load_json, load_object, malformed
from pilotage.types import ToolCall, ToolSchema

TYPED = ToolSchema(
    name="typed",
    parameters={
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "flag": {"type": "boolean"},
            "items": {"type": "array"},
            "record": {"type": "object"},
            "maybe_count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "maybe_text": {"type": ["string", "null"]},
            "choice": {"enum": ["1", "2"]},
            "level": {"enum": [1, 2]},
            "referred": {"$ref": "#/$defs/Count"},
            "endless": {"$ref": "#/properties/endless"},
            "untyped": {},
        },
        "$defs": {"Count": {"type": "integer"}},
    },
)


def read_typed(key: str, text: str) -> object:
    found = xml_calls.read_call(
        f"\n<function=typed>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n", [TYPED]
    )
    assert not found.is_malformed
    return json.loads(found.arguments)[key]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "0", "0"),
        ("text", "true", "true"),
        ("text", '["a"]', '["a"]'),
        ("text", "  indented\n\n", "  indented\n\n"),
        ("text", "", ""),
        ("count", "5", 5),
        ("count", " 5 ", 5),
        ("ratio", "5", 5),
        ("ratio", "0.5", 0.5),
        ("flag", "true", True),
        ("flag", "True", True),  # as the official Qwen3.5 template writes it
        ("flag", "False", False),
        ("items", '["a", 1]', ["a", 1]),
        ("record", '{"a": null}', {"a": None}),
        ("maybe_count", "null", None),
        ("maybe_count", "None", None),
        ("maybe_count", "7", 7),
        ("maybe_text", "null", "null"),
        ("choice", "1", "1"),
        ("level", "1", 1),
        ("referred", "3", 3),
        ("endless", "3", "3"),
        ("untyped", "3", "3"),
        ("unknown", "3", "3"),
    ],
)
def test_an_xml_argument_is_typed_by_the_schema(key: str, text: str, value: object) -> None:
    read = read_typed(key, text)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("count", "five"),
        ("count", "5.5"),
        ("count", '"5"'),
        ("count", "true"),
        ("flag", "1"),
        ("flag", "yes"),
        ("items", "__import__('os').system('true')"),
        ("items", "['single quotes']"),
        ("items", "[1,]"),
        ("items", '{"a": 1}'),
        ("record", "[1]"),
        ("ratio", "NaN"),
        ("ratio", "1e999"),
        ("items", '["\\ud800"]'),
        ("items", "[" * 100_000),
    ],
)
def test_an_argument_that_does_not_fit_its_schema_stays_the_raw_text(key: str, text: str) -> None:
    assert read_typed(key, text) == text


@pytest.mark.parametrize("name", ["nosuchtool", "str_replace </parameter", "str_replace</function"])
def test_an_unknown_tool_name_is_passed_through_unrepaired(name: str) -> None:
    as_xml = xml_calls.read_call(f"<function={name}>\n<parameter=a>\n1\n</parameter>\n</function>", TOOLS)
    as_json = hermes.read_call(f'{{"name": "{name}", "arguments": {{"a": "1"}}}}')
    assert as_xml == as_json == CallText(name=name, arguments='{"a": "1"}')


def test_json_arguments_keep_the_types_that_the_policy_wrote() -> None:
    found = hermes.read_call('\n{"name": "terminal", "arguments": {"timeout": "5", "command": 5}}\n')
    assert found == CallText(name="terminal", arguments='{"timeout": "5", "command": 5}')


BROKEN_JSON = [
    ('{"name": "terminal", "arguments": {"command": "ls', "terminal"),
    ("{'name': 'terminal', 'arguments': {}}", MALFORMED_NAME),
    ('{"name": "terminal", "arguments": {"command": "ls",}}', "terminal"),
    ('{"name": "terminal", "arguments": "ls"}', "terminal"),
    ('{"name": "terminal", "arguments": "{\\"command\\": \\"ls\\"}"}', "terminal"),
    ('{"name": "terminal", "arguments": {"command": NaN}}', "terminal"),
    ('{"name": "terminal", "arguments": {"command": "\\ud800"}}', "terminal"),
    ('{"name": "terminal"}', "terminal"),
    ('{"name": "", "arguments": {}}', MALFORMED_NAME),
    ('{"name": 5, "arguments": {}}', MALFORMED_NAME),
    ('{"arguments": {}}', MALFORMED_NAME),
    ('{"command": "ls"}', MALFORMED_NAME),
    ("[1]", MALFORMED_NAME),
    ("", MALFORMED_NAME),
    ("<function=terminal>\n</function>", MALFORMED_NAME),
    ("[" * 100_000, MALFORMED_NAME),
]


@pytest.mark.parametrize(("text", "name"), BROKEN_JSON)
def test_a_broken_json_call_keeps_its_text_and_what_can_be_read_of_its_name(text: str, name: str) -> None:
    found = hermes.read_call(text)
    assert found.is_malformed
    assert found.name == name
    # No object, so that no tool can run on it; a text that is one arrives as a JSON string of itself.
    assert load_object(found.arguments) is None
    assert text in (found.arguments, json.loads(found.arguments) if load_object(text) is not None else None)


BROKEN_XML = [
    ("<function=terminal>\n<parameter=command>\nls", "terminal"),
    ("<function=terminal>\n<parameter=command>\nls\n</parameter>", "terminal"),
    ("<function=terminal>\n<parameter=command>\nls\n</function>", "terminal"),
    ("<function=terminal>\n<parameter=command>\nls\n</parameter>\nrest</function>", "terminal"),
    ("<function=terminal>\nls\n</function>", "terminal"),
    (
        "<function=terminal>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
        "terminal",
    ),
    ("<function=>\n</function>", MALFORMED_NAME),
    ("<function= >\n</function>", MALFORMED_NAME),
    ('{"name": "terminal", "arguments": {"command": "ls"}}', MALFORMED_NAME),
    ("", MALFORMED_NAME),
]


@pytest.mark.parametrize(("text", "name"), BROKEN_XML)
def test_a_broken_xml_call_keeps_its_text_and_what_can_be_read_of_its_name(text: str, name: str) -> None:
    found = xml_calls.read_call(text, TOOLS)
    assert found.is_malformed
    assert found.name == name
    assert load_object(found.arguments) is None


def test_an_xml_value_may_hold_the_tags_of_the_format() -> None:
    command = "cat <<X\n<parameter=a>\n1\n</parameter> and </function>\nX"
    written = xml_calls.write_call(call(command=command), writes_json_scalars=False)
    assert json.loads(xml_calls.read_call(written, TOOLS).arguments) == {"command": command}


def test_an_xml_call_without_arguments_is_a_call() -> None:
    found = xml_calls.read_call("\n<function=terminal>\n</function>\n", TOOLS)
    assert found == CallText(name="terminal", arguments="{}")


def test_arguments_that_are_no_object_are_written_as_they_are() -> None:
    broken = ToolCall(id="0", name="terminal", arguments='{"command": "ls')
    assert hermes.write_call(broken) == '{"name": "terminal", "arguments": {"command": "ls}'
    assert (
        xml_calls.write_call(broken, writes_json_scalars=False)
        == '<function=terminal>\n{"command": "ls\n</function>'
    )


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
    | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=8), json_values, max_size=4))
def test_a_json_call_reads_as_it_was_written(arguments: dict[str, object]) -> None:
    written = hermes.write_call(ToolCall(id="0", name="f", arguments=json.dumps(arguments)))
    found = hermes.read_call(written)
    assert not found.is_malformed
    assert json.loads(found.arguments) == arguments


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "text": st.text(max_size=20),
            "count": st.integers(),
            "ratio": st.floats(allow_nan=False, allow_infinity=False),
            "flag": st.booleans(),
            "items": st.lists(json_values, max_size=3),
            "record": st.dictionaries(st.text(max_size=5), json_values, max_size=3),
            "maybe_count": st.none() | st.integers(),
        },
    ),
    st.booleans(),
)
def test_an_xml_call_reads_as_it_was_written_under_its_schema(
    arguments: dict[str, object], writes_json_scalars: bool
) -> None:
    made = ToolCall(id="0", name="typed", arguments=json.dumps(arguments))
    written = xml_calls.write_call(made, writes_json_scalars=writes_json_scalars)
    assert json.loads(xml_calls.read_call(written, [TYPED]).arguments) == arguments


pieces = st.sampled_from(
    [
        *("<function=", "</function>", "<parameter=", "</parameter>", "terminal", "typed", "count", "items"),
        *('{"name": "a"', ', "arguments": ', "{", "}", "[", "]", '"', "\\", ",", ">", "\n", " ", "5", "é"),
    ]
)


@given(st.lists(pieces | st.text(max_size=4), max_size=20).map("".join))
def test_no_text_makes_reading_raise_and_a_malformed_call_has_no_usable_arguments(text: str) -> None:
    for found in (hermes.read_call(text), xml_calls.read_call(text, [TERMINAL, TYPED])):
        assert found.name
        assert (load_object(found.arguments) is None) == found.is_malformed


@given(st.text(max_size=40) | json_values.map(json.dumps))
def test_the_arguments_of_a_malformed_call_are_never_an_object(text: str) -> None:
    assert load_object(malformed(text).arguments) is None


@given(json_values)
def test_strict_json_reads_all_json(value: object) -> None:
    assert load_json(json.dumps(value)) == value
