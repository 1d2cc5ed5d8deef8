"""What `pilotage serve` refuses before it listens."""

from pathlib import Path

import pytest

from pilotage.cli import main


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--host", "0.0.0.0", "--no-auth"), "--no-auth is for loopback only, not for 0.0.0.0"),
        (("--host", "0.0.0.0"), "tokens would cross the network to 0.0.0.0 in the clear; give --tls-cert"),
        ((), "nobody has a token yet; run `pilotage token create NAME` first"),
    ],
)
def test_a_service_that_knows_nobody_or_would_show_tokens_is_not_started(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", "--models", str(tmp_path), "--data", str(tmp_path / "service"), *words])
    assert code == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--tinker-gpus", "x"), "--tinker-gpus is TRAIN+SAMPLE, as in 4+4, got 'x'"),
        (("--capacity", "many"), "many"),
        (("--models", "nowhere"), "--models nowhere is no directory"),
    ],
)
def test_a_wrong_option_leaves_no_data_directory(
    words: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "service"
    assert main(["serve", "--no-auth", "--models", str(tmp_path), "--data", str(data), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not data.exists()
