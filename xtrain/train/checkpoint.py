"""Complete checkpoints or none: what a bitwise resume needs, written so that a kill cannot tear it.

    checkpoints/<step>/model.safetensors       fp32 weights under Hugging Face's names
    checkpoints/<step>/optimizer.safetensors   both moments under the same names, update counts
    checkpoints/<step>/manifest.json           step, facts, sha256 of both files and of itself

A checkpoint is written into a temporary directory, flushed to the disk and renamed. Randomness and
data order are functions of the step, so the step number is all the state they have. Files hold no
time or host: the same training gives the same hashes.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xtrain.disk import sync
from xtrain.engine.device import Device
from xtrain.engine.params import FlatBuffers
from xtrain.errors import UsageError, write_error
from xtrain.models.hf import named_tensors
from xtrain.models.tensor_file import put, read_header, write_tensors
from xtrain.train.optimizer import AdamW
from xtrain.typed_json import read_bounded

FORMAT = "xtrain checkpoint 1"
FILES = ("model.safetensors", "optimizer.safetensors")
SEAL = "manifest_sha256"
COUNTS = ("updates", "skipped")


@dataclass(frozen=True)
class Checkpoint:
    """A complete, verified checkpoint on disk."""

    path: Path
    manifest: dict

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def sha256(self) -> str:
        """One hash for weights and optimizer state together."""
        joined = "".join(self.manifest["sha256"][name] for name in FILES)
        return hashlib.sha256(joined.encode()).hexdigest()


def save(
    directory: Path, step: int, buffers: FlatBuffers, optimizer: AdamW, device: Device, facts: dict
) -> Checkpoint:
    """Write checkpoint `step` under `directory`; returns it once it is safely on the disk.

    A complete checkpoint of that step is kept as it is; a damaged one is moved aside. Raises
    WriteError when the disk refuses it; then nothing of it is left, and earlier ones stand.
    """
    final = directory / str(step)
    temporary = directory / f".writing-{step}-{os.getpid()}"
    try:
        directory.mkdir(exist_ok=True)  # its parent is the run's: if that is gone, so is the run
        if final.exists():
            with contextlib.suppress(UsageError):
                return load_manifest(final)
            final.rename(_free_name(directory / f"{step}.damaged"))
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        manifest = _write(temporary, step, buffers, optimizer, device, facts)
        temporary.rename(final)
        sync(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise write_error(final, error) from error
    return Checkpoint(final, manifest)


def _write(
    directory: Path, step: int, buffers: FlatBuffers, optimizer: AdamW, device: Device, facts: dict
) -> dict:
    """The three files of a checkpoint, flushed to the disk; returns the manifest."""
    weights = named_tensors(buffers, buffers.master)
    counts = {name: getattr(optimizer, name).reshape(1) for name in COUNTS}
    write_tensors(directory / FILES[0], weights, device.host, metadata={"format": "pt"})
    write_tensors(directory / FILES[1], _moments(buffers) | counts, device.host)
    hashes = {name: _hash_and_flush(directory / name) for name in FILES}
    manifest = {"format": FORMAT, "step": step, "sha256": hashes, **facts}
    sealed = manifest | {SEAL: _seal(manifest)}
    with open(directory / "manifest.json", "w") as file:
        file.write(json.dumps(sealed, indent=1, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    sync(directory)
    return manifest


def load_manifest(path: Path, *, verify: bool = True) -> Checkpoint:
    """Open a checkpoint directory and check it; UsageError names the file that is damaged."""
    try:
        manifest = json.loads(read_bounded(path / "manifest.json"))
    except FileNotFoundError:
        raise UsageError(f"{path} is not a checkpoint: it has no manifest.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"checkpoint {path}: manifest.json is damaged ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UsageError(f"{path} is not a checkpoint of this program ({FORMAT} expected)")
    if manifest.pop(SEAL, None) != _seal(manifest):
        raise UsageError(f"checkpoint {path}: manifest.json is damaged (its sha256 does not match)")
    if path.name.isdecimal() and int(path.name) != manifest["step"]:
        raise UsageError(f"checkpoint {path} is that of step {manifest['step']}, renamed")
    for name in FILES:
        if not (path / name).is_file():
            raise UsageError(f"checkpoint {path}: {name} is missing")
        if verify and _hash(path / name) != manifest["sha256"][name]:
            raise UsageError(f"checkpoint {path}: {name} is damaged (its sha256 does not match)")
    return Checkpoint(path, manifest)


def restore(checkpoint: Checkpoint, buffers: FlatBuffers, optimizer: AdamW, device: Device) -> None:
    """Put weights, moments and counts back; shapes and names must be those of the model."""
    state = read_header(checkpoint.path / FILES[1])
    moments = _moments(buffers)
    counts = {name: np.zeros(1) for name in COUNTS}
    _require_same_tensors(state, moments | counts, checkpoint.path / FILES[1])
    load_weights(checkpoint.path / FILES[0], buffers, device)
    for name, view in moments.items():
        put(state[name], view, device.array)
    for name in COUNTS:
        ((_, count),) = state[name].pieces()
        getattr(optimizer, name)[...] = int(count[0])


def load_weights(file: Path, buffers: FlatBuffers, device: Device) -> None:
    """Read model weights only, from a file with exactly the model's tensors under their names."""
    weights = read_header(file)
    views = named_tensors(buffers, buffers.master)
    _require_same_tensors(weights, views, file)
    for name, view in views.items():
        put(weights[name], view, device.array)
    buffers.refresh_copy()


def _moments(buffers: FlatBuffers) -> dict:
    """The views of both moments, as they are named in a file."""
    both = {"moment1": buffers.moment1, "moment2": buffers.moment2}
    return {
        f"{label}.{name}": view
        for label, buffer in both.items()
        for name, view in named_tensors(buffers, buffer).items()
    }


def _require_same_tensors(tensors: dict, views: dict, origin: Path) -> None:
    """Before anything is overwritten: raise UsageError unless names and shapes are the model's."""
    for name, view in views.items():
        if name not in tensors:
            raise UsageError(f"{origin}: no tensor {name}; it belongs to another model")
        if tensors[name].shape != view.shape:
            theirs = tensors[name].shape
            raise UsageError(f"{origin}: {name} is {theirs}, the model has {view.shape}")
    for name in tensors:
        if name not in views:
            raise UsageError(f"{origin}: the model has no {name}; it belongs to another model")


def latest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The last complete checkpoint, and one line for each damaged one that was passed over."""
    damaged = []
    for found, line in newest_first(directory):
        if found is not None:
            return found, damaged
        damaged.append(line)
    return None, damaged


def newest_first(directory: Path) -> Iterator[tuple[Checkpoint | None, str]]:
    """(checkpoint, "") or (None, what is damaged) for each of a directory, the last step first."""
    for path in sorted(_step_directories(directory), key=lambda p: -int(p.name)):
        try:
            yield load_manifest(path), ""
        except UsageError as error:
            yield None, str(error)


def prune(directory: Path, *, saved: int, keep_last: int, best_step: int | None) -> None:
    """After saving step `saved`: keep the newest `keep_last` checkpoints up to it, and the best.

    Later ones are left alone and do not count: the training went on from before them because they
    are damaged, or because it was told to. Half-written ones are deleted.
    """
    for leftover in directory.glob(".writing-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    steps = sorted((int(p.name) for p in _step_directories(directory)), reverse=True)
    for step in [s for s in steps if s <= saved][max(keep_last, 1) :]:
        if step != best_step:
            try:
                shutil.rmtree(directory / str(step))
            except OSError as error:
                raise write_error(directory / str(step), error) from error


def _step_directories(directory: Path) -> list[Path]:
    return [p for p in directory.glob("*") if p.is_dir() and p.name.isdecimal()]


def _seal(manifest: dict) -> str:
    """sha256 of a manifest's content: its own file is not covered by the hashes that it holds."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _hash(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _hash_and_flush(file: Path) -> str:
    sync(file)
    return _hash(file)


def _free_name(path: Path) -> Path:
    candidates = [path, *(path.with_name(f"{path.name}-{i}") for i in range(1, 1000))]
    return next(c for c in candidates if not c.exists())
