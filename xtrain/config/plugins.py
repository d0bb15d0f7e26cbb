"""What a configuration may ask of Hydra itself: a launcher and a sweeper that are known, no more.

Hydra builds whatever object a `_target_` names, takes any function for a log handler and imports a
package to search it, so a YAML file could run any code. `CheckedLoader` composes every
configuration, those of a sweep's jobs included, and refuses before anything is built: the node
`hydra` is as this package ships it but for the launcher and the sweeper, which may have the listed
keys with plain values. Left out of the lists on purpose: what names code, a command or a program.
"""

import re
from functools import cache
from importlib.resources import files

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xtrain.errors import UsageError

_BASIC = "hydra._internal.core_plugins.basic_"
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
_QUEUE = """timeout_min cpus_per_task gpus_per_node tasks_per_node mem_gb nodes name partition qos
stderr_to_stdout comment constraint exclude account gres cpus_per_gpu gpus_per_task mem_per_gpu
mem_per_cpu array_parallelism signal_delay_s max_num_timeout"""
LAUNCHERS = {
    f"{_BASIC}launcher.BasicLauncher": "",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher": (
        "n_jobs backend prefer require verbose timeout batch_size"
    ),
    f"{_SUBMITIT}LocalLauncher": _QUEUE,
    f"{_SUBMITIT}SlurmLauncher": _QUEUE,
}
SWEEPERS = {
    f"{_BASIC}sweeper.BasicSweeper": "max_batch_size params",
    "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper": (
        "sampler direction study_name n_trials n_jobs max_failure_rate params"
    ),
}
SAMPLER = r"optuna\.samplers\.(TPE|Random|Grid|QMC|NSGAII|BruteForce)Sampler"
# Other keys of these plugins keep the value that the plugin ships, or have none.
_SHIPPED = (None, "2*n_jobs", "r", "${hydra.sweep.dir}/.submitit/%j", {}, [])
# The rest of the node that anything is built, written or executed from, as conf/config.yaml has it.
_FIXED = {
    "callbacks": {},
    "searchpath": [],
    "output_subdir": None,
    "run": {"dir": "."},
    "sweep": {"dir": "${out}/multirun", "subdir": "."},
    "job.chdir": False,
    "job.env_set": {},
    "job.env_copy": [],
}
_LOGGING = {"hydra_logging": "default", "job_logging": "none"}


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader; what it returns asks Hydra for nothing but known launchers and sweepers."""

    def _load_configuration_impl(self, config_name, *arguments, **named) -> DictConfig:
        cfg = super()._load_configuration_impl(config_name, *arguments, **named)
        if config_name is not None:  # None: Hydra's own help, which builds nothing
            check_hydra(cfg)
        return cfg

    def _process_config_searchpath(self, config_name, parsed_overrides, repo) -> None:
        """Refuse further directories and packages before one is opened, or imported."""
        if any(each.get_key_element() == "hydra.searchpath" for each in parsed_overrides):
            _refuse("searchpath")
        if config_name is not None:
            primary = repo.load_config(config_path=config_name)
            if OmegaConf.select(primary.config, "hydra.searchpath") is not None:
                _refuse("searchpath")


def check_hydra(cfg: DictConfig) -> None:
    """Refuse a composed tree that asks Hydra for more than a known launcher and sweeper.

    Raises UsageError naming the key.
    """
    node = OmegaConf.to_container(cfg.hydra, resolve=False)
    for key, value in _FIXED.items():
        found = node
        for part in key.split("."):
            found = found.get(part)
        if found != value:
            _refuse(key)
    for key, shipped in _LOGGING.items():
        if node[key] != _shipped_logging(key, shipped):
            _refuse(key)
    for kind, known in (("launcher", LAUNCHERS), ("sweeper", SWEEPERS)):
        _check_plugin(kind, node[kind], _resolved(cfg, kind), known)


def _check_plugin(kind: str, raw: object, plugin: object, known: dict[str, str]) -> None:
    target = plugin.get("_target_") if isinstance(plugin, dict) else None
    if target not in known:
        names = ", ".join(name.rpartition(".")[2] for name in known)
        shown = str(target)[:80]
        raise UsageError(f"hydra.{kind}._target_={shown!r}: only {names} are built")
    for key, value in plugin.items():
        if key == "_target_":
            continue
        if key not in known[target].split():
            if raw[key] not in _SHIPPED:
                _refuse(f"{kind}.{key}")
        elif key == "sampler" and isinstance(value, dict):
            if not re.fullmatch(SAMPLER, str(value.pop("_target_", None))):
                raise UsageError(f"hydra.{kind}.sampler._target_: not a sampler that is built here")
            _require_plain(f"{kind}.{key}", list(value.values()))
        elif key == "params" and isinstance(value, dict):
            _require_plain(f"{kind}.{key}", [*value, *value.values()])
        else:
            _require_plain(f"{kind}.{key}", value if isinstance(value, list) else [value])


def _require_plain(key: str, values: list) -> None:
    """Numbers and short text: a line break in a job's script would begin a command."""
    for value in values:
        fine = value is None or isinstance(value, bool | int | float)
        if not fine and not (isinstance(value, str) and len(value) < 1000 and value.isprintable()):
            raise UsageError(f"hydra.{key}: a number or a line of text was expected")


def _resolved(cfg: DictConfig, kind: str) -> object:
    try:
        return OmegaConf.to_container(cfg.hydra[kind], resolve=True)
    except OmegaConfBaseException:
        _refuse(kind)


@cache
def _shipped_logging(key: str, name: str) -> object:
    path = files("hydra.conf") / "hydra" / key / f"{name}.yaml"
    return OmegaConf.to_container(OmegaConf.create(path.read_text()), resolve=False)


def _refuse(key: str):
    raise UsageError(
        f"hydra.{key}: a configuration may choose hydra/launcher and hydra/sweeper and their plain "
        "values, nothing else of Hydra"
    )
