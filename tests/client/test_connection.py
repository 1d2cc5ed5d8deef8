"""Where a connection comes from, who gets the token, and that it is never shown."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotage.client import Connection, Secret, resolve_connection
from pilotage.errors import ConfigError

TOKEN = "ver:1-hint:tok-0123456789abcdef"
ACCOUNT = "org-account.snowflakecomputing.com"


def private_file(path: Path, content: str, *, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment whose home is empty."""
    return {"XDG_CONFIG_HOME": str(tmp_path / "config"), "SNOWFLAKE_HOME": str(tmp_path / "snowflake")}


def write_every_source(tmp_path: Path, environment: dict[str, str]) -> dict[str, str]:
    """Write the login file, the stock client's, and a default profile, each with a host of its own."""
    own = {"host": "own.example", "pat": "own-token", "database": "OWN"}
    private_file(tmp_path / "config" / "pilotage" / "login.json", json.dumps(own))
    stock = private_file(
        tmp_path / "stock.json", json.dumps({"connection": {"host": "stock.example", "pat": "stock-token"}})
    )
    state = tmp_path / "config" / "cortex-training" / "login.json"
    private_file(state, json.dumps({"config_path": str(stock)}), mode=0o644)
    profile = (
        '[default]\naccount = "my_org-my_account"\nuser = "u"\n'
        'authenticator = "programmatic_access_token"\ntoken = "profile-token"\ndatabase = "PROFILE"\n'
    )
    private_file(tmp_path / "snowflake" / "connections.toml", profile)
    return environment | {
        "ARCTIC_CORTEX_HOST": "arctic.example",
        "ARCTIC_CORTEX_PAT": "arctic-token",
        "CORTEX_TRAINING_HOST": "training.example",
        "CORTEX_TRAINING_PAT": "training-token",
    }


def test_the_first_source_that_names_a_server_wins(tmp_path: Path, environment: dict[str, str]) -> None:
    every = write_every_source(tmp_path, environment)
    seen: list[tuple[str, str]] = []

    def look() -> None:
        found = resolve_connection(environment=every)
        assert found.token is not None
        seen.append((found.origin, found.token.reveal()))

    look()
    del every["ARCTIC_CORTEX_HOST"], every["ARCTIC_CORTEX_PAT"]
    look()
    del every["CORTEX_TRAINING_HOST"], every["CORTEX_TRAINING_PAT"]
    look()
    (tmp_path / "config" / "pilotage" / "login.json").unlink()
    look()
    (tmp_path / "stock.json").unlink()
    look()
    assert seen == [
        ("https://arctic.example", "arctic-token"),
        ("https://training.example", "training-token"),
        ("https://own.example", "own-token"),
        ("https://stock.example", "stock-token"),
        ("https://my-org-my-account.snowflakecomputing.com", "profile-token"),
    ]


def test_what_the_caller_gives_wins_and_takes_the_token_that_belongs_to_it(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    every = write_every_source(tmp_path, environment)
    found = resolve_connection(host="own.example", schema="MINE", environment=every)
    assert found.token == Secret("own-token")
    assert (found.database, found.schema) == ("OWN", "MINE")


def test_a_token_is_not_sent_to_a_server_that_it_was_not_given_for(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    every = write_every_source(tmp_path, environment)
    found = resolve_connection(base_url="https://elsewhere.example:8443", environment=every)
    assert (found.origin, found.token) == ("https://elsewhere.example:8443", None)
    with pytest.raises(ConfigError, match=r"names https://elsewhere\.example without a token"):
        resolve_connection(host="elsewhere.example", environment=every)


def test_a_token_without_a_server_goes_with_the_one_that_is_given(environment: dict[str, str]) -> None:
    found = resolve_connection(host=ACCOUNT, environment=environment | {"ARCTIC_CORTEX_PAT": f" {TOKEN}\n"})
    assert found.token == Secret(TOKEN)
    assert found.prefix == "/api/v2/databases/CORTEX_TRAINING_DB/schemas/PUBLIC/cortex-training"


def test_no_source_at_all_says_what_to_do(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="run `pilotage login`, or set ARCTIC_CORTEX_BASE_URL"):
        resolve_connection(environment=environment)


def test_a_snowflake_host_without_its_token_is_other_tools_business(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="no training service is configured"):
        resolve_connection(environment=environment | {"SNOWFLAKE_HOST": ACCOUNT})


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        (ACCOUNT, f"https://{ACCOUNT}"),
        (f"https://{ACCOUNT}/console#/data", f"https://{ACCOUNT}"),
        (f"{ACCOUNT}:443", f"https://{ACCOUNT}:443"),
        (
            "https://app.snowflake.com/MYORG/my_account/#/homepage",
            "https://myorg-my-account.snowflakecomputing.com",
        ),
        ("ORG-ACCOUNT.snowflakecomputing.com", f"https://{ACCOUNT}"),
    ],
)
def test_a_pasted_url_becomes_a_host(given: str, origin: str, environment: dict[str, str]) -> None:
    found = resolve_connection(host=given, environment=environment | {"ARCTIC_CORTEX_PAT": TOKEN})
    assert found.origin == origin


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"host": "my_org.snowflakecomputing.com"}, "has an underscore"),
        ({"host": "https://"}, "is no host"),
        ({"host": "a.example:port"}, "is no port"),
        ({"base_url": "trainer:8080"}, "needs a scheme"),
        ({"base_url": "https://trainer/api"}, "is scheme, host and port only"),
        ({"base_url": f"https://user:{TOKEN}@trainer"}, "is scheme, host and port only"),
        ({"base_url": "http://a_b"}, "has an underscore"),
        ({"base_url": "http://a", "host": "b"}, "give base_url or host, not both"),
    ],
)
def test_a_wrong_address_is_refused(given: dict[str, str], says: str, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_connection(**given, environment=environment)  # pyright: ignore[reportArgumentType]


def test_a_token_is_sent_over_tls_or_to_this_machine_only(environment: dict[str, str]) -> None:
    env = environment | {"ARCTIC_CORTEX_PAT": TOKEN}
    with pytest.raises(ConfigError, match="over TLS only") as caught:
        resolve_connection(base_url="http://trainer.example:8080", environment=env)
    assert TOKEN not in str(caught.value)
    assert resolve_connection(base_url="http://127.0.0.1:8080", environment=env).token is not None


# --- files ---


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_with_a_token_that_others_can_read_is_refused(
    mode: int, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = private_file(
        tmp_path / "config" / "pilotage" / "login.json",
        json.dumps({"host": "a.example", "pat": TOKEN}),
        mode=mode,
    )
    with pytest.raises(ConfigError, match=f"has mode 0{mode:o}; make it private: chmod 600") as caught:
        resolve_connection(environment=environment)
    assert str(path) in str(caught.value)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"base_url": "http://a", "pta": "x"}', "unknown keys pta; known are"),
        ('{"base_url": "http://a", "verify_ssl": false}', "TLS is always verified"),
        ('{"base_url": "http://a", "no_verify_ssl": true}', "TLS is always verified"),
        ('{"host": 7}', "host must be a text"),
        ('{"connection": []}', "connection must be an object"),
        ('{"pat": "SECRET-VALUE', "is not JSON: line 1"),
        ("[]", "is not a JSON object"),
    ],
)
def test_a_wrong_stock_config_is_refused_without_showing_what_is_in_it(
    content: str, says: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    path = private_file(tmp_path / "c.json", content)
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_connection(environment=environment | {"CORTEX_TRAINING_CONFIG": str(path)})
    assert "SECRET-VALUE" not in str(caught.value)


def test_a_stock_config_may_use_aliases_and_a_bare_host_as_base_url(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    content = {"url": "account.example", "pat": TOKEN, "db": "D", "poll_interval": 1, "verify_ssl": True}
    path = private_file(tmp_path / "c.json", json.dumps(content))
    found = resolve_connection(environment=environment | {"CORTEX_TRAINING_CONFIG": str(path)})
    assert (found.origin, found.database) == ("https://account.example", "D")


def test_a_named_profile_is_read_from_config_toml_too(tmp_path: Path, environment: dict[str, str]) -> None:
    profile = f'authenticator = "PROGRAMMATIC_ACCESS_TOKEN"\nhost = "{ACCOUNT}"\ntoken = "{TOKEN}"\n'
    private_file(tmp_path / "snowflake" / "config.toml", f"[connections.rl]\n{profile}")
    found = resolve_connection(environment=environment | {"CORTEX_TRAINING_CONNECTION": "rl"})
    assert found.token == Secret(TOKEN)
    with pytest.raises(ConfigError, match="has no profile 'lr'; it has rl"):
        resolve_connection(environment=environment | {"CORTEX_TRAINING_CONNECTION": "lr"})


def test_a_profile_with_another_authenticator_cannot_be_used(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    private_file(tmp_path / "snowflake" / "connections.toml", '[x]\nauthenticator = "externalbrowser"\n')
    with pytest.raises(ConfigError, match="only programmatic_access_token is usable"):
        resolve_connection(environment=environment | {"CORTEX_TRAINING_CONNECTION": "x"})


# --- the secret ---


@settings(deadline=None)
@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=12, max_size=80))
def test_a_secret_is_in_no_text_about_it(value: str) -> None:
    def texts(secret: Secret) -> list[str]:
        connection = Connection(origin="https://a.example", token=secret)
        return [repr(secret), str(secret), f"{secret}", f"{secret!r:>40}", f"{secret:>40}", repr(connection)]

    secret = Secret(value)
    assert texts(secret) == texts(Secret("another-secret"))
    assert secret.reveal() == value
    redacted = secret.redact(f"failed with {value}; again {value}")
    assert redacted == f"failed with {secret}; again {secret}"
    with pytest.raises(TypeError, match="is not pickled"):
        pickle.dumps(secret)


def test_secrets_compare_by_value() -> None:
    assert Secret("aaaa") == Secret("aaaa")
    assert Secret("aaaa") != Secret("aaab")
    assert Secret("aaaa") != "aaaa"
    assert len({Secret("aaaa"), Secret("aaaa")}) == 1


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "\u00e9"])
def test_what_cannot_be_a_header_is_no_token(value: str) -> None:
    with pytest.raises(ValueError, match="a token is printable ASCII"):
        Secret(value)
