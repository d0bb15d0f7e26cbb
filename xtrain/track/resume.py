"""Which run to go on with: unfinished runs, what must match, and who owns a run now.

`resume=auto` goes on with the latest unfinished run of the same run, phase and config, unless a
later one with that config has FINISHED; `resume=PATH` with that run (its directory or a checkpoint
in it); `resume=none` starts afresh. What differs is named key by key.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from xtrain.config.compose import load_saved
from xtrain.errors import UsageError
from xtrain.track.machine import identity, may_be_alive
from xtrain.track.run_dir import RUNNING, RunDir, all_runs, load_run, now, plain


def choose_run(
    root: str | Path,
    run: str,
    phase: str,
    config: Mapping,
    *,
    resume: str,
    typed: bool,
    ignore: Iterable[str],
    fingerprints: Mapping[str, str] | None = None,
) -> tuple[RunDir | None, str]:
    """The run to go on with, or None for a new one, and a line that says so ("" for none).

    typed: whether the user wrote `resume=`; a typed `auto` refuses a run that differs, the default
    starts a new one. ignore: dotted keys that change nothing that is trained, each with all that is
    below it. fingerprints: those that must match too, e.g. {"data": digest}.
    Raises UsageError listing the keys that differ with both values, and under `auto` for a run of
    this config that has a checkpoint and no readable manifest.
    """
    if resume == "none":
        return None, ""
    if resume != "auto":
        return _by_path(resume, config, fingerprints or {}, tuple(ignore))
    _refuse_lost(root, run, phase, config, tuple(ignore))
    nearest: tuple[RunDir, dict] | None = None
    for found in reversed(all_runs(root, run, phase)):
        differing = _differing(found, config, fingerprints or {}, tuple(ignore))
        if found.manifest["status"] == "FINISHED":
            if not differing:
                return None, ""
        elif not is_alive(found):
            if not differing:
                return found, f"going on with {found.path} ({found.manifest['status']})"
            nearest = nearest or (found, differing)
    if nearest is None:
        return None, ""
    found, differing = nearest
    if typed:
        raise UsageError(
            f"resume=auto: {found.path} is unfinished but differs: {_list(differing)}; "
            "put the values back, or resume=none for a new run"
        )
    return None, f"a new run, because the unfinished {found.path} differs: {_list(differing)}"


def find_unfinished(root: str | Path, run: str, phase: str) -> RunDir | None:
    """The latest run that is KILLED, FAILED, or RUNNING with its process gone."""
    for each in reversed(all_runs(root, run, phase)):
        if each.manifest["status"] != "FINISHED" and not is_alive(each):
            return each
    return None


def continue_run(run: RunDir, *, from_step: int, facts: Mapping[str, object]) -> RunDir:
    """Take over a run: RUNNING under this process, with one more entry in `resumes`.

    Drops every record after `from_step`, the step of the checkpoint that is loaded; from step 0,
    which has no checkpoint, all of them. Raises UsageError when another process has it.
    """
    with _exclusive(run.path):
        taken = load_run(run.path)
        _refuse_alive(taken)
        resumes = [
            *taken.manifest.get("resumes", []),
            {
                "time": now(),
                "from_step": from_step,
                "was": taken.manifest["status"],
                "facts": dict(facts),
            },
        ]
        taken.update(status=RUNNING, ended=None, resumes=resumes, **identity())
    taken.truncate_after(from_step or -1)  # the evaluation of step 0 is made again too
    return taken


def stale_runs(root: str | Path, say: Callable[[str], None] | None = None) -> list[RunDir]:
    """Runs marked RUNNING whose process on this machine is gone; say names unreadable ones."""
    found = all_runs(root, say=say)
    return [run for run in found if run.manifest["status"] == RUNNING and not is_alive(run)]


def is_alive(run: RunDir) -> bool:
    """Whether a RUNNING run's process may still exist."""
    return run.manifest["status"] == RUNNING and may_be_alive(run.manifest)


def differing_keys(
    old: Mapping, new: Mapping, *, ignore: Iterable[str]
) -> dict[str, tuple[object, object]]:
    """Dotted keys whose values differ, with both; a key that one side lacks has "(absent)"."""
    before, after = flatten(plain(old)), flatten(plain(new))
    keys = sorted(before.keys() | after.keys())
    absent = "(absent)"
    ignored = [each.removesuffix(".") for each in ignore]
    return {
        key: (before.get(key, absent), after.get(key, absent))
        for key in keys
        if before.get(key, absent) != after.get(key, absent)
        and not any(key == each or key.startswith(f"{each}.") for each in ignored)
    }


def flatten(config: Mapping, prefix: str = "") -> dict[str, object]:
    """A nested mapping as one of dotted keys; lists and empty mappings stay values."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _by_path(
    resume: str, config: Mapping, fingerprints: Mapping[str, str], ignore: tuple[str, ...]
) -> tuple[RunDir, str]:
    path = Path(resume)
    found = load_run(path.parent.parent if path.parent.name == "checkpoints" else path)
    if found.manifest["status"] == "FINISHED":
        raise UsageError(
            f"resume={resume}: that run is FINISHED; init_from= starts from its weights"
        )
    differing = _differing(found, config, fingerprints, ignore)
    if differing:
        raise UsageError(f"resume={resume}: that run differs: {_list(differing)}")
    _refuse_alive(found)
    return found, f"going on with {found.path} ({found.manifest['status']})"


def _refuse_lost(
    root: str | Path, run: str, phase: str, config: Mapping, ignore: tuple[str, ...]
) -> None:
    """Raise UsageError when training of this very config would be left behind unseen.

    A manifest that cannot be read hides its run; config.yaml beside it tells whose it was.
    """
    for saved in sorted(Path(root).glob(f"{run}/{phase}/*/config.yaml")):
        path = saved.parent
        try:
            load_run(path)
        except UsageError as error:
            if any(path.glob("checkpoints/*")) and _is_saved_config(saved, config, ignore):
                raise UsageError(
                    f"{error}; that run has this config and a checkpoint: put its manifest back, "
                    "init_from=CHECKPOINT takes its weights, resume=none starts a new run"
                ) from error


def _is_saved_config(saved: Path, config: Mapping, ignore: tuple[str, ...]) -> bool:
    try:
        return not differing_keys(asdict(load_saved(saved)), config, ignore=ignore)
    except UsageError:
        return False


def _differing(
    run: RunDir, config: Mapping, fingerprints: Mapping[str, str], ignore: tuple[str, ...]
) -> dict[str, tuple[object, object]]:
    differing = differing_keys(run.manifest.get("config", {}), config, ignore=ignore)
    recorded = run.manifest.get("fingerprints", {})
    for name, digest in fingerprints.items():
        if name in recorded and recorded[name] != digest:
            differing[f"{name} fingerprint"] = (recorded[name][:12], digest[:12])
    return differing


def _list(differing: Mapping[str, tuple[object, object]]) -> str:
    return ", ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in differing.items())


def _refuse_alive(run: RunDir) -> None:
    if is_alive(run):
        owner = f"process {run.manifest.get('pid')} on {run.manifest.get('host')}"
        raise UsageError(f"{run.path} is RUNNING in {owner}; wait for it, or stop it first")


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
