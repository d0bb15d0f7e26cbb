"""The command `xtrain`: compose a run, execute it, answer with one exit code.

    0 done   1 internal error   2 usage   3 refused   130, 143, 129 interrupted

A user's error is one line on stderr, and nothing is written. Of several runs (-m) each has its own
turn, whatever became of the others, and the exit code is that of the worst. Heavy imports wait
until a run starts, so that help, completion and refusals are quick.
"""

import re
import sys
from collections.abc import Sequence

from pipelines import PROGRAM
from xtrain.command.ending import guarded, run_command
from xtrain.command.streams import shown as spelled
from xtrain.errors import UsageError

# From best to worst: a bug hides a usage error, which hides a refused promotion.
_BEST_FIRST = (0, 3, 2, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (sys.argv by default) and return the exit code."""
    return run_command(PROGRAM, _main, list(sys.argv[1:] if argv is None else argv))


def _main(argv: list[str]) -> int:
    if {"-h", "--help"}.intersection(argv):
        return _print_help(argv)
    from xtrain.config.compose import hydra_app

    args = _parse(argv)
    with hydra_app(args.config_dir) as app:
        shown = _show(app, args)
        if shown:
            return 0
        if args.multirun or any(o.lower() == "hydra.mode=multirun" for o in args.overrides):
            return _run_many(app, args.overrides)
        run = _load(app, args.overrides)
    return _execute(run, args.overrides)


def _execute(run, typed: list[str]) -> int:
    if run.dry_run:
        from pipelines.ahead import look_ahead

        return look_ahead(run, typed)
    from pipelines.run import execute

    return execute(run, typed)


def _load(app, overrides: list[str]):
    from xtrain.config.compose import compose_with, load_run

    return load_run(compose_with(app, overrides))


def _run_many(app, overrides: list[str]) -> int:
    """Every combination of the swept values; all are checked before the first starts."""
    from xtrain.config.compose import is_plain_sweep, sweep_jobs

    if not is_plain_sweep(app, overrides):
        return _launch_elsewhere(app, overrides)
    jobs = sweep_jobs(app, overrides)
    runs = [_load(app, job) for job in jobs]
    codes = []
    for number, (job, run) in enumerate(zip(jobs, runs, strict=True), start=1):
        print(f"run {number} of {len(jobs)}: {spelled(' '.join(job))}", flush=True)
        codes.append(guarded(PROGRAM, _execute, run, job))
        if codes[-1] > max(_BEST_FIRST):
            return codes[-1]  # interrupted: the user wants all of it to stop
    return _worst(codes)


def _launch_elsewhere(app, overrides: list[str]) -> int:
    """The same through a Hydra launcher or sweeper plugin."""
    from xtrain.config.compose import CONFIG_NAME, one_line_errors

    with one_line_errors():
        batches = app.multirun(CONFIG_NAME, _launched, overrides) or []
    returned = [job.return_value for batch in batches for job in batch]
    return _worst([code for code in returned if isinstance(code, int)])


def _launched(cfg) -> int:
    from hydra.core.hydra_config import HydraConfig

    from xtrain.config.compose import load_run

    typed = list(HydraConfig.get().overrides.task)
    return guarded(PROGRAM, lambda: _execute(load_run(cfg), typed))


def _worst(codes: list[int]) -> int:
    return max(codes, key=lambda c: _BEST_FIRST.index(c) if c in _BEST_FIRST else c, default=0)


def _parse(argv: list[str]):
    """Hydra's own flags and our overrides, in any order."""
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()

    def refuse(message: str):
        raise UsageError(f"{message}; keys have no dashes, as in run=v0; xtrain --help lists all")

    parser.error = refuse
    args = parser.parse_intermixed_args(argv)
    if args.config_path or args.config_name or args.experimental_rerun:
        raise UsageError(
            "--config-path, --config-name and --experimental-rerun are not supported; "
            "--config-dir DIR adds your own files, XTRAIN_CONF=DIR replaces ours"
        )
    if args.resolve and not args.cfg:
        raise UsageError("--resolve goes with --cfg job")
    args.overrides = [_literal_prompt(each) for each in args.overrides]
    return args


def _literal_prompt(override: str) -> str:
    """A prompt is text as it was typed, whatever it would mean to Hydra: commas, brackets, null."""
    key, given, text = override.partition("=")
    if key != "prompt" or not given:
        return override
    from hydra.core.override_parser.types import Quote, QuotedString

    for _ in range(2):  # the tree is resolved when it is composed and when it is checked
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return f"{key}={QuotedString(text=text, quote=Quote.single).with_quotes()}"


def _show(app, args) -> bool:
    """Answer Hydra's flags that run nothing; False when there is none."""
    from xtrain.config.compose import CONFIG_NAME, compose_with, hydra_answers, refuse_fixed

    if args.shell_completion:
        with hydra_answers():
            app.shell_completion(CONFIG_NAME, args.overrides)
        return True
    refuse_fixed(args.overrides)
    with hydra_answers():
        if args.cfg:
            app.show_cfg(CONFIG_NAME, args.overrides, args.cfg, args.package, args.resolve)
        elif args.info:
            compose_with(app, args.overrides)  # refuses before half of the answer is printed
            app.show_info(args.info, CONFIG_NAME, args.overrides)
        elif args.hydra_help:
            app.hydra_help(CONFIG_NAME, _hydra_parser(), args)
        else:
            return False
    return True


def _hydra_parser():
    from hydra._internal.utils import get_args_parser

    return get_args_parser()


def _print_help(argv: list[str]) -> int:
    from pipelines.help import help_text

    at = argv.index("--config-dir") + 1 if "--config-dir" in argv else len(argv)
    print(help_text(argv[at] if at < len(argv) else None), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
