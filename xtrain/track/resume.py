"""Which run to go on with: unfinished runs, what must match, and who owns a run now.

`resume=auto` goes on with the latest unfinished run of the same run, phase and config, unless a
later one with that config has FINISHED; `resume=PATH` with that run (its directory or a checkpoint
in it); `resume=none` starts afresh. What differs is named key by key.

A run is alive while a process holds its directory (`xtrain.track.ownership`), wherever that is.
"""

import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from xtrain.config.compose import load_saved
from xtrain.config.identity import flatten_tree
from xtrain.errors import UsageError
from xtrain.track.machine import identity, may_be_alive
from xtrain.track.ownership import is_held
from xtrain.track.run_dir import RUNNING, RunDir, all_runs, now, plain, read_run


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
    unknown = ""
    for found in reversed(all_runs(root, run, phase)):
        differing = _differing(found, config, fingerprints or {}, tuple(ignore))
        if found.manifest["status"] == "FINISHED":
            if not differing:
                return None, ""
        elif not is_alive(found):
            if not differing:
                return found, f"going on with {found.path} ({found.manifest['status']})"
            nearest = nearest or (found, differing)
        elif not differing and _is_out_of_sight(found):
            unknown = unknown or f"a new run: {_out_of_sight(found)}; if not, resume={found.path}"
    if nearest is None or unknown:
        return None, unknown
    found, differing = nearest
    if typed:
        raise UsageError(
            f"resume=auto: {found.path} is unfinished but differs: {_list(differing)}; "
            "put the values back, or resume=none for a new run"
        )
    return None, f"a new run, because the unfinished {found.path} differs: {_list(differing)}"


def take_over(run: RunDir) -> RunDir:
    """The run as it is on the disk now, held by this process.

    Raises UsageError when another process has it, or has finished it meanwhile.
    """
    if not _is_out_of_sight(run):
        _refuse_alive(run)
    try:
        run.own()
    except OSError as error:
        raise UsageError(f"{run.path} cannot be gone on with: {error.strerror}") from error
    run.manifest = read_run(run.path).manifest
    if run.manifest["status"] == "FINISHED":
        run.release()
        raise UsageError(f"{run.path}: another process has just FINISHED it")
    return run


def continue_run(run: RunDir, *, from_step: int, facts: Mapping[str, object]) -> RunDir:
    """Mark a run that was taken over RUNNING, with one more entry in `resumes`.

    Drops every record after `from_step`, the step of the checkpoint that is loaded; from step 0,
    which has no checkpoint, all of them.
    """
    resumes = [
        *run.manifest.get("resumes", []),
        {
            "time": now(),
            "from_step": from_step,
            "was": run.manifest["status"],
            "facts": dict(facts),
        },
    ]
    run.update(status=RUNNING, ended=None, resumes=resumes, **identity())
    run.sweep()
    run.truncate_after(from_step or -1)  # the evaluation of step 0 is made again too
    return run


def stale_runs(root: str | Path, say: Callable[[str], None] | None = None) -> list[RunDir]:
    """Runs marked RUNNING whose process is gone; say names unreadable ones."""
    found = all_runs(root, say=say)
    return [run for run in found if run.manifest["status"] == RUNNING and not is_alive(run)]


def mark_killed(run: RunDir) -> bool:
    """Mark a stale run KILLED; False when another process has just gone on with it."""
    try:
        run = take_over(run)
    except UsageError:
        return False
    run.set_status("KILLED")
    run.sweep()
    return True


def is_alive(run: RunDir) -> bool:
    """Whether a process has the run; without locks, whether the one it names may still exist."""
    held = is_held(run.path)
    if held is None:
        return run.manifest["status"] == RUNNING and may_be_alive(run.manifest)
    return held


def differing_keys(
    old: Mapping, new: Mapping, *, ignore: Iterable[str]
) -> dict[str, tuple[object, object]]:
    """Dotted keys whose values differ, with both; a key that one side lacks has "(absent)"."""
    before, after = flatten_tree(plain(old)), flatten_tree(plain(new))
    keys = sorted(before.keys() | after.keys())
    absent = "(absent)"
    ignored = [each.removesuffix(".") for each in ignore]
    return {
        key: (before.get(key, absent), after.get(key, absent))
        for key in keys
        if before.get(key, absent) != after.get(key, absent)
        and not any(key == each or key.startswith(f"{each}.") for each in ignored)
    }


def _by_path(
    resume: str, config: Mapping, fingerprints: Mapping[str, str], ignore: tuple[str, ...]
) -> tuple[RunDir, str]:
    path = Path(resume)
    found = read_run(path.parent.parent if path.parent.name == "checkpoints" else path)
    if found.manifest["status"] == "FINISHED":
        raise UsageError(
            f"resume={resume}: that run is FINISHED; init_from= starts from its weights"
        )
    differing = _differing(found, config, fingerprints, ignore)
    if differing:
        raise UsageError(f"resume={resume}: that run differs: {_list(differing)}")
    if _is_out_of_sight(found):
        return found, f"going on with {found.path}, although {_out_of_sight(found)}"
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
            read_run(path)
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


def _is_out_of_sight(run: RunDir) -> bool:
    """Whether nothing tells if a run is alive: no locks, and its process is of another host."""
    elsewhere = run.manifest.get("host") != socket.gethostname()
    return run.manifest["status"] == RUNNING and elsewhere and is_held(run.path) is None


def _out_of_sight(run: RunDir) -> str:
    return (
        f"this file system has no locks that would tell whether process {run.manifest.get('pid')} "
        f"on {run.manifest.get('host')} still has {run.path}"
    )
