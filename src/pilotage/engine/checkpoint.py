"""A checkpoint is an ordinary Hugging Face directory, or a peft adapter's, plus an optimizer and a manifest.

Invariant: a directory that holds the manifest is complete. Everything is written into a directory beside
the target, the manifest last, and renamed when it is on disk; a kill leaves the old state or the new one.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pilotage.algorithms import WeightsVersions
from pilotage.errors import ConfigError, TrainerError

OPTIMIZER_FILE = "optimizer.safetensors"
MANIFEST_FILE = "trainer_state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    weights_version: int
    is_published: bool
    """Whether the sampler had these very weights, under this version."""
    format_version: int = 1
    sha256: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Of every file of tensors, by its path in the directory; a checkpoint from before there were any has
    none."""

    @classmethod
    def of(cls, versions: WeightsVersions) -> "Manifest":
        """Describe the weights as they are now."""
        return cls(weights_version=versions.current, is_published=versions.is_published)


def write_checkpoint(target: Path, manifest: Manifest, write: Callable[[Path], None]) -> None:
    """Let `write` fill a directory, add the manifest, and put the whole in place.

    Raises:
        TrainerError: `target` holds something already, or the tensors cannot be written.
    """
    if target.exists() and any(target.iterdir()):
        raise TrainerError(f"{target} is not empty; a checkpoint never replaces another")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        write(partial)
    except SafetensorError as error:  # which is no OSError, also where the disk is full
        raise TrainerError(
            f"{target} could not be written: {error}; mend that, then resume the run"
        ) from error
    files = {path.relative_to(partial).as_posix(): path for path in sorted(partial.rglob("*.safetensors"))}
    manifest = replace(manifest, sha256=dict(zip(files, _digests(files.values()), strict=True)))
    (partial / MANIFEST_FILE).write_text(json.dumps(asdict(manifest)) + "\n", encoding="utf-8")
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    os.rename(partial, target)
    _sync(target.parent)


def read_manifest(directory: Path) -> Manifest | None:
    """Read the manifest; None for a plain model directory.

    Raises:
        ConfigError: it is not one of ours.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        return None
    try:
        return Manifest(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path} is not a manifest of this version: {error}") from error


def read_undamaged(directory: Path, *, weights_only: bool = False) -> Manifest:
    """Read the manifest, and refuse tensors that are not those that were written with it.

    A plain model directory has version 0 and nothing to compare.

    Args:
        weights_only: the optimizer is not going to be read.

    Raises:
        ConfigError: a file of tensors differs or is gone, or the manifest is not one of ours.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        return Manifest(weights_version=0, is_published=True)
    names = [name for name in manifest.sha256 if not (weights_only and name == OPTIMIZER_FILE)]
    paths = [directory / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path} is gone: the checkpoint was written with it; {_remedy(directory)}")
    for name, path, digest in zip(names, paths, _digests(paths), strict=True):
        if digest != manifest.sha256[name]:
            raise ConfigError(f"{path} is damaged: it is not what was written there; {_remedy(directory)}")
    return manifest


def _remedy(directory: Path) -> str:
    return f"restore it, or use an earlier checkpoint, as a resumed run does where {directory} is removed"


def _digests(paths: Iterable[Path]) -> list[str]:
    """Hash files side by side; hashing frees the interpreter."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_sha256, paths))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def save_optimizer(
    directory: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> None:
    """Write the moments by the names of what is trained; weights that were never stepped have none."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in weights.items():
        state = optimizer.state.get(parameter)
        if state:
            tensors |= {f"{name}/{moment}": stored(moment, state[moment]) for moment in MOMENTS}
    save_file(tensors, directory / OPTIMIZER_FILE)


def load_optimizer(
    directory: Path, weights: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW
) -> None:
    """Read moments into a fresh optimizer; without a file it stays fresh.

    Raises:
        ConfigError: the file is damaged.
    """
    path = directory / OPTIMIZER_FILE
    if not path.is_file():
        return
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ConfigError(f"{path} cannot be read: {error}; go on from an earlier checkpoint") from error
    for name, parameter in weights.items():
        moments = {moment: tensors.get(f"{name}/{moment}") for moment in MOMENTS}
        if moments["step"] is not None:
            optimizer.state[parameter] = {
                key: value.reshape(()) if key == "step" else value.to(parameter.device)
                for key, value in moments.items()
                if value is not None
            }


def stored(moment: str, value: Tensor) -> Tensor:
    """Return a moment as a file holds it: a step count as one element, because joining files of several
    ranks loses tensors without a dimension.
    """
    return value.reshape(1) if moment == "step" else value.contiguous()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
