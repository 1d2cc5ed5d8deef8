"""SDK, server and key: each that cannot be used is one line, before anything is asked of anybody."""

import json
import tomllib
from pathlib import Path

import pytest

from pilotage.client.tinker_sdk import (
    HOSTED_URL,
    SDK,
    TESTED_VERSIONS,
    check_sdk,
    installed_version,
    resolve_tinker,
)
from pilotage.errors import ConfigError

KEY = "tml-" + "k" * 12
OWN = "https://trainer.example:8443"


def test_the_installed_sdk_is_one_that_was_tested() -> None:
    check_sdk(installed_version())


def test_the_extra_installs_the_tested_range() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["tinker"] == [f"{SDK}{TESTED_VERSIONS}"]


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (None, r"needs the package tinker .*; install pilotage\[tinker\]"),
        ("0.37.9", r"tested with tinker .*, and 0.37.9 is installed; install pilotage\[tinker\]"),
        ("0.39.0", r"0.39.0 is installed"),
    ],
)
def test_another_sdk_or_none_is_one_line(version: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_sdk(version)
    assert "\n" not in str(refused.value)


def test_without_a_base_url_the_key_is_for_the_hosted_service(tmp_path: Path) -> None:
    connection = resolve_tinker({"TINKER_API_KEY": KEY, "XDG_CONFIG_HOME": str(tmp_path)})
    assert (connection.base_url, connection.key.reveal()) == (HOSTED_URL, KEY)
    assert KEY not in repr(connection)


def test_no_key_is_one_line_that_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no key for {OWN}; set TINKER_API_KEY"):
        resolve_tinker({"TINKER_BASE_URL": OWN, "XDG_CONFIG_HOME": str(tmp_path)})


@pytest.mark.parametrize(
    ("base_url", "key", "message"),
    [
        (OWN, "other-key", "TINKER_API_KEY does not start with tml-"),
        (OWN, "tml-two words", "TINKER_API_KEY: a token is printable ASCII"),
        ("http://trainer.example", KEY, "over TLS only; use https://"),
        ("trainer.example", KEY, "is no URL"),
        ("https://user@trainer.example", KEY, "is no URL"),
    ],
)
def test_what_cannot_be_used_is_refused_without_showing_the_key(
    tmp_path: Path, base_url: str, key: str, message: str
) -> None:
    environment = {"TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=message) as refused:
        resolve_tinker(environment)
    assert key not in str(refused.value)


def test_a_login_gives_the_key_for_its_own_server_only(tmp_path: Path) -> None:
    login = tmp_path / "pilotage" / "login.json"
    login.parent.mkdir(mode=0o700)
    login.write_text(json.dumps({"base_url": OWN, "pat": "plt_abc"}))
    login.chmod(0o600)
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    found = resolve_tinker(environment | {"TINKER_BASE_URL": f"{OWN}/"})
    assert (found.base_url, found.key.reveal()) == (OWN, "tml-plt_abc")
    with pytest.raises(ConfigError, match=r"no key for https://other\.example"):
        resolve_tinker(environment | {"TINKER_BASE_URL": "https://other.example"})
