"""Continue texts with a trained model: `xtrain run=v0 phase=decode prompt="Once upon a time"`.

The continuation goes to stdout as it is made, without the prompt, and all else to stderr. Without a
prompt every line of stdin is one; a terminal is asked, line by line, until end of file.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from gates.judging.ledger import Ledger
from gates.judging.promote import granted_by
from xtrain.assemble.estimate import asking_memory_bytes
from xtrain.assemble.learner import Learner, build
from xtrain.assemble.origin import Origin, adopt, find_origin, load_origin
from xtrain.command.streams import is_lost, shown
from xtrain.config.schema import RunConfig
from xtrain.data.tokenizers.imported import end_ids, load_tokenizer
from xtrain.errors import UsageError
from xtrain.infer.generate import stream
from xtrain.track.registry import register_owed
from xtrain.track.room import Room, room
from xtrain.track.store_address import check_store, sqlite_path, store_uri

UNFINISHED = "\ufffd"  # what bytes decode to that are the beginning of a character


def decode(run: RunConfig, typed: Sequence[str], say: Callable[[str], None]) -> int:
    """Stream the continuation of each prompt; returns 0.

    Raises UsageError when there is no such model, and for a prompt that does not fit it; on a
    terminal the next prompt is asked for instead.
    """
    origin = trained_model(run)
    run = fitted(run, origin, typed)
    check_room_to_ask(run, room() if run.device == "cpu" else None)
    learner = trained_learner(run, origin)
    tokenizer = load_tokenizer(run.data.tokenizer)
    stops = {tokenizer.eot} if origin.is_checkpoint else {tokenizer.eot, *end_ids(origin.path)}
    say(f"model {origin.path}")
    for prompt in prompts(run.prompt):
        ids = tokenizer.encode_ordinary(prompt) or [tokenizer.eot]
        try:
            tokens = stream(
                learner.model,
                ids,
                max_new_tokens=run.decode.max_new_tokens,
                temperature=run.decode.temperature,
                top_k=run.decode.top_k,
                top_p=run.decode.top_p,
                seed=run.seed,
            )
        except UsageError as error:
            if run.prompt is not None or not sys.stdin.isatty():
                raise
            say(str(error))
            continue
        for text in pieces(tokenizer, until(stops, tokens)):
            tell(text)
            if is_lost(sys.stdout):
                return 0  # nobody reads on
        print(flush=True)
    return 0


def tell(text: str) -> None:
    """Print what the model says: as it is into a file or pipe, harmless on a terminal."""
    print(shown(text) if sys.stdout.isatty() else text, end="", flush=True)


def trained_model(run: RunConfig) -> Origin:
    """What `init_from=` names, by default the promoted model of the run.

    Raises UsageError naming the command that makes one when there is none.
    """
    if run.init_from is not None:
        return find_origin(run.init_from)
    uri = f"models:/xtrain-{run.name}@promoted"
    advice = f"make one with `xtrain run={run.name}`, or name another with init_from=PATH"
    check_store(store_uri())
    register_owed(run.out, granted_by(Ledger.of(run.out)))
    database = sqlite_path(store_uri())
    if database is not None and not database.exists():
        # Asking MLflow would make the database, and a usage error writes nothing.
        raise UsageError(f"there is no promoted model {uri}: {advice}")
    try:
        return find_origin(uri)
    except UsageError as error:
        raise UsageError(f"there is no promoted model: {error}: {advice}") from error


def fitted(run: RunConfig, origin: Origin, typed: Sequence[str]) -> RunConfig:
    """The run with the model's architecture, in windows that the model has positions for.

    A window that was typed and is too long is a UsageError, as any model key that differs.
    """
    if origin.model is not None and not any(each.startswith("train.seq_len=") for each in typed):
        seq_len = min(run.train.seq_len, origin.model.max_position_embeddings)
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, seq_len=seq_len))
    return adopt(run, origin, typed)


def check_room_to_ask(run: RunConfig, bound: Room | None) -> None:
    """Raise UsageError when a trained model on a CPU needs more than this process may hold."""
    if bound is None:
        return
    needed = asking_memory_bytes(run, run.device)
    if needed.largest > bound.bytes:
        remedy = "; a smaller train.batch_size or train.seq_len takes less"
        raise UsageError(
            f"run={run.name} needs {needed.largest / 1e9:.3g} GB for {needed.fullest}, "
            f"{bound.bound} leaves {bound.bytes / 1e9:.3g} GB"
            f"{remedy if run.phase.name == 'eval' else ''}"
        )


def trained_learner(run: RunConfig, origin: Origin) -> Learner:
    """The model of a fitted run with its weights."""
    learner = build(run, initialize=False, training=False)
    load_origin(origin, learner)
    return learner


def prompts(given: str | None) -> Iterator[str]:
    """The prompt, or lines of stdin, or answers on a terminal until end of file."""
    if given is not None:
        yield given
    elif not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.rstrip("\n")
    else:
        while True:
            # Not input(PROMPT): that would write to stdout, where only the model speaks.
            print("prompt> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if not line:
                print(file=sys.stderr)
                return
            yield line.rstrip("\n")


def until(stops: Iterable[int], tokens: Iterator[int]) -> Iterator[int]:
    """The tokens before the first that ends a text."""
    for token in tokens:
        if token in stops:
            return
        yield token


def pieces(tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens in pieces as soon as they are certain: a character may take several."""
    pending: list[int] = []
    shown = ""
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        if text.endswith(UNFINISHED):
            continue
        yield text[len(shown) :]
        pending, shown = ([], "") if text.endswith("\n") else (pending, text)
    rest = tokenizer.decode(pending)[len(shown) :] if pending else ""
    if rest:
        yield rest
