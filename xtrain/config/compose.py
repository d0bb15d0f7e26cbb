"""From YAML files and overrides to one frozen RunConfig.

    compose(["run=v9", "train.max_tokens=1000000"]) -> DictConfig -> load_run -> RunConfig

Nothing beyond this package sees an OmegaConf object. Whatever a user can get wrong is a UsageError.
"""

import copy
import dataclasses
import io
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from hydra import version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers.oc import env
from yaml import YAMLError

from xtrain.config.files import conf_dir
from xtrain.config.messages import usage_error
from xtrain.config.plugins import CheckedLoader
from xtrain.config.rules import check_run
from xtrain.config.schema import RunConfig
from xtrain.errors import UsageError

CONFIG_NAME = "config"
# Facts of the run's and the phase's file, on which verdicts rest: no override may touch them.
_FIXED = ("name", "parent", "axes", "gate")


def compose(
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    conf: Path | None = None,
) -> DictConfig:
    """The composed tree, unchecked. config_dir: a further directory of groups, as --config-dir.

    conf: the directory that holds config.yaml, by default conf_dir(). Raises UsageError for
    anything that does not compose, and for an override of a gate.
    """
    with hydra_app(config_dir, conf) as app:
        return compose_with(app, overrides)


def compose_with(app: Hydra, overrides: Sequence[str]) -> DictConfig:
    """compose, within an open hydra_app."""
    refuse_fixed(overrides)
    with hydra_answers():
        cfg = app.compose_config(CONFIG_NAME, list(overrides), RunMode.RUN)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg


def load_run(cfg: DictConfig) -> RunConfig:
    """Check every key, type and rule, and freeze. Raises UsageError of one line."""
    with one_line_errors(), environment_unread():
        plain = OmegaConf.to_container(cfg, resolve=True)
        # Merged anew into the bare schema: a key appended with + has no place there.
        run = OmegaConf.to_object(OmegaConf.merge(schema_of(RunConfig), plain))
    check_run(run)
    return run


def load_saved(path: str | Path) -> RunConfig:
    """The run of a config.yaml that resolved_yaml wrote. Raises UsageError when it is not one."""
    try:
        return load_run(OmegaConf.create(read_tree(path)))
    except UsageError as error:
        raise UsageError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from error


def resolved_yaml(run: RunConfig) -> str:
    """The run as YAML text with every key, the contents of config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(run)))


def read_tree(path: str | Path) -> dict:
    """A YAML file as nested dictionaries. Raises UsageError when it is not one."""
    return copy.deepcopy(_parsed(path, _content(path)))


def read_part(kind: type, path: Path, key: str | None = None):
    """What stands under a key of a file, or all of it, as a frozen dataclass. Raises UsageError."""
    return _part(kind, path, _content(path), key)


def refuse_fixed(overrides: Sequence[str]) -> None:
    """Refuse overrides of what a verdict rests on: a bar is not changed on the command line.

    Raises UsageError, also for what is no override at all and for deletions.
    """
    for override in overrides:
        if override.startswith("~"):
            raise UsageError(f"{override}: every key has a value; give another one instead")
        if not re.match("[^=]+=", override):
            raise UsageError(f"{override!r} is not KEY=VALUE; xtrain --help shows common keys")
        key = override.lstrip("+~").partition("=")[0].strip()
        value = override.partition("=")[2].strip()
        head = re.split(r"[.@\[:]", key)[0]
        redirected = re.split(r"[.:]", key.partition("@")[2])[0]
        fixed = head in _FIXED or (head == "phase" and (key != "phase" or value.startswith("{")))
        if fixed or redirected in (*_FIXED, "phase"):
            kind = "phase" if "phase" in (head, redirected) else "run"
            raise UsageError(f"{key} stands in the {kind}'s file and is not changed by an override")


@cache
def schema_of(kind: type) -> DictConfig:
    """A dataclass as a typed tree, nested ones included, open to merging; merge copies it.

    OmegaConf makes a frozen dataclass read-only and leaves a nested one without default missing.
    """
    node = OmegaConf.structured(kind)
    OmegaConf.set_readonly(node, None)
    for name, annotation in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(annotation):
            node[name] = schema_of(annotation)
    return node


@contextmanager
def hydra_app(config_dir: str | None = None, conf: Path | None = None) -> Iterator[Hydra]:
    """Hydra with our schema and search path, and its global state put back afterwards."""
    version.setbase("1.3")
    ConfigStore.instance().store(name="xtrain_schema", node=schema_of(RunConfig))
    search_path = create_automatic_config_search_path(None, None, str(conf or conf_dir()))
    if config_dir is not None:
        directory = Path(config_dir).absolute()
        if not directory.is_dir():
            raise UsageError(f"--config-dir {config_dir}: no such directory")
        search_path.prepend("command-line", f"file://{directory}", SearchPathQuery("schema", None))
    shared = GlobalHydra.instance()
    outer, shared.hydra = shared.hydra, None
    try:
        app = Hydra("xtrain", CheckedLoader(config_search_path=search_path))
        shared.initialize(app)
        with environment_unread():
            yield app
    finally:
        shared.hydra = outer


def sweep_jobs(app: Hydra, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides of each combination of swept values, `seed=0,1,2`, in order."""
    with one_line_errors():
        parsed = OverridesParser.create(app.config_loader).parse_overrides(list(overrides))
        batches = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return [list(job) for batch in batches for job in batch]


def is_plain_sweep(app: Hydra, overrides: Sequence[str]) -> bool:
    """Whether neither a launcher nor a sweeper plugin was chosen."""
    with hydra_answers():
        cfg = app.compose_config(CONFIG_NAME, list(overrides), RunMode.MULTIRUN)
    targets = (cfg.hydra.launcher._target_, cfg.hydra.sweeper._target_)
    return all(target.startswith("hydra._internal.core_plugins.basic_") for target in targets)


@contextmanager
def hydra_answers() -> Iterator[None]:
    """Turn whatever a call of Hydra raises into a UsageError: it also answers with ValueError."""
    try:
        yield
    except Exception as error:
        raise usage_error(error) from error


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what Hydra, OmegaConf and YAML raise into a UsageError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise usage_error(error) from error


@contextmanager
def environment_unread() -> Iterator[None]:
    """Refuse `${oc.env:NAME}`: every value of a run is written to config.yaml, sent to MLflow."""

    def refuse(name: str = "NAME", default: str | None = None):
        raise UsageError(
            f"${{oc.env:{name}}}: a configuration does not read the environment, because its "
            f'values are recorded; let the shell put it in, KEY="${name}"'
        )

    OmegaConf.register_new_resolver("oc.env", refuse, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", env, replace=True)


def _content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


@cache
def _parsed(path: str | Path, content: bytes) -> dict:
    """The tree of a file of this content: a listing of all gates asks for each file many times."""
    try:
        text = io.StringIO(content.decode("utf-8"))
        tree = OmegaConf.to_container(OmegaConf.load(text), resolve=False)
    except (OSError, YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not readable YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: not a mapping of keys")
    return tree


@cache
def _part(kind: type, path: Path, content: bytes, key: str | None):
    tree = _parsed(path, content)
    tree = tree if key is None else tree.get(key, {})
    with one_line_errors(), environment_unread():
        return OmegaConf.to_object(OmegaConf.merge(schema_of(kind), tree))
