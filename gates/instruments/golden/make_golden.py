"""Make the reference values in this folder with torch and transformers; see README.

    python -m gates.instruments.golden.make_golden

Everything is fp32 with eager attention. Weights are rounded to bf16 so that they take two bytes and
are still exact; gains are away from one and matrices wide enough that attention is far from
uniform, or a wrong head order would hardly show.
"""

import importlib.metadata
import logging
import platform
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import transformers

from gates.instruments.golden.reference import (
    FOLDER,
    GREEDY_PROMPTS,
    MODELS,
    OPTIM,
    TRAJECTORY,
    TRAJECTORY_FILE,
    GoldenModel,
)
from xtrain.models.config import Qwen3Config
from xtrain.train.optimizer import learning_rate


def main() -> None:
    """Write every file of the folder and print the versions that made them."""
    versions = " ".join(f"{name}={version}" for name, version in sorted(_versions().items()))
    print(versions)
    torch.set_num_threads(1)  # sums in one order
    for golden in MODELS:
        _save(golden.file, {**model_values(golden), "versions": np.array(versions)})
    _save(TRAJECTORY_FILE, {**adamw_trajectories(), "versions": np.array(versions)})


def _versions() -> dict[str, str]:
    names = ("numpy", "torch", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    return {**found, "python": platform.python_version()}


def _save(file: str, arrays: dict) -> None:
    path = FOLDER / file
    np.savez_compressed(path, **arrays)
    print(f"{path.name}: {path.stat().st_size:,} bytes")


def model_values(golden: GoldenModel) -> dict:
    """Weights, tokens, logits, loss, gradients, ten steps' losses and greedy tokens of a model."""
    generator = torch.Generator().manual_seed(golden.seed)
    model = reference_model(golden.config)
    tokens = torch.randint(golden.config.vocab_size, (10, 3, 14), generator=generator)
    ignored = torch.rand((10, 3, 13), generator=generator) < 0.2
    stored = {}
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.copy_((0.25 * drawn if p.ndim == 2 else 1 + 0.25 * drawn).bfloat16())
            stored[f"weight/{name}"] = p.bfloat16().view(torch.uint16).numpy().copy()
    stored["tokens"] = tokens.numpy().astype(np.uint16)
    stored["ignored"] = ignored.numpy()
    stored["greedy"] = np.array(
        [greedy(model, prompt, new_tokens=64) for prompt in GREEDY_PROMPTS], np.uint16
    )
    targets = torch.where(ignored, -100, tokens[:, :, 1:])
    logits = model(tokens[0, :, :-1]).logits
    loss = cross_entropy(logits, targets[0])
    loss.backward()
    stored["logits"], stored["loss"] = logits.detach().numpy(), np.array(loss.item())
    for name, p in model.named_parameters():
        stored[f"grad/{name}"] = p.grad.numpy().copy()
    stored["losses"] = np.array(ten_steps(model, tokens[:, :, :-1], targets))
    return stored


def reference_model(config: Qwen3Config):
    """transformers' model of this shape in fp32 with eager attention."""
    shape = transformers.Qwen3Config(
        **asdict(config), attn_implementation="eager", dtype="float32", eos_token_id=None
    )
    return transformers.Qwen3ForCausalLM(shape).float().eval()


def cross_entropy(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ten_steps(model, tokens, targets) -> list[float]:
    """Losses before each of ten updates: clipping, schedule, decay on matrices only."""
    groups = [
        [p for p in model.parameters() if (p.ndim == 2) == decayed] for decayed in (True, False)
    ]
    optimizer = torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": OPTIM.weight_decay},
            {"params": groups[1], "weight_decay": 0.0},
        ],
        betas=(OPTIM.beta1, OPTIM.beta2),
        eps=OPTIM.eps,
    )
    losses = []
    for step in range(10):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIM, step, 10)
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[step]).logits, targets[step])
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIM.clip_norm)
        optimizer.step()
    return losses


@torch.no_grad()
def greedy(model, prompt: list[int], *, new_tokens: int) -> list[int]:
    """What transformers' own generate continues a prompt with, never stopping early."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def adamw_trajectories() -> dict:
    """Parameters of torch.optim.AdamW every ten steps, for each eps, from fixed gradients.

    Only the first half is decayed. A quarter of the elements start at zero and have gradients of
    1e-6: with eps 1e-3 how far they move depends on where eps stands.
    """
    generator = torch.Generator().manual_seed(7)
    t = TRAJECTORY
    tiny = torch.arange(t.size) % 4 == 0
    start = torch.where(tiny, 0.0, torch.randn(t.size, generator=generator))
    gradients = torch.randn((t.steps, t.size), generator=generator)
    gradients *= torch.where(tiny, 1e-6, 0.1)
    stored = {"start": start.numpy(), "gradients": gradients.numpy(), "tiny": tiny.numpy()}
    for eps in t.eps:
        halves = [start[: t.decayed].clone(), start[t.decayed :].clone()]
        optimizer = torch.optim.AdamW(
            [
                {"params": [halves[0]], "weight_decay": t.weight_decay},
                {"params": [halves[1]], "weight_decay": 0.0},
            ],
            lr=t.lr,
            betas=(t.beta1, t.beta2),
            eps=eps,
        )
        path = []
        for step in range(t.steps):
            halves[0].grad, halves[1].grad = gradients[step].split(t.decayed)
            optimizer.step()
            if step == 0 or (step + 1) % 10 == 0:
                path.append(torch.cat(halves).numpy().copy())
        stored[f"path/{eps}"] = np.stack(path)
    return stored


@torch.no_grad()
def ask(directory: Path, prompts: list[list[int]], *, new_tokens: int) -> dict:
    """What transformers makes of an exported directory.

    logits: one (T, V) array a prompt.  greedy: the new tokens of each.  complaints: every warning
    that loading it gave, from Python's warnings and from the library's log.
    """
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append
    log = logging.getLogger("transformers")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = transformers.AutoModelForCausalLM.from_pretrained(
                directory, attn_implementation="eager", dtype="float32"
            ).eval()
            transformers.AutoTokenizer.from_pretrained(directory)
    finally:
        log.removeHandler(handler)
    return {
        "class": type(model).__name__,
        "logits": [model(torch.tensor([prompt])).logits[0].numpy() for prompt in prompts],
        "greedy": [greedy(model, prompt, new_tokens=new_tokens) for prompt in prompts],
        "complaints": [r.getMessage() for r in records] + [str(w.message) for w in caught],
    }


if __name__ == "__main__":
    main()
