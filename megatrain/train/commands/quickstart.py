"""`megatrain quickstart` does a whole run on text that every machine has, and checks it against PyTorch.

Nothing is staged: the model is trained by the same `train` that a user calls, streamed block by block, from
the source text of Python's own standard library. Then the run is repeated with resident PyTorch and AdamW,
resumed from an earlier checkpoint, and its export is opened with transformers.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.config import Config, build_config
from megatrain.errors import OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Say = Callable[[str], None]

_CORPUS_BYTES = 4_000_000
_STEPS = 80
_RESUMED_FROM = 60
_ROWS = 4
_SEQ_LEN = 128
_VOCAB = 4096
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3"}
_PROMPT = "def read("


def quickstart(out: Path | None, say: Say = lambda _: None) -> Path:
    """Train a small Llama from scratch, and check the run.

    Args:
        out: The directory, which must be new or empty; None means `runs/quickstart-N`.
        say: The function that is called with each line of the report.

    Returns:
        The directory.

    Raises:
        OutputError: `out` is not empty, or cannot be written.
        AssertionError: A check failed, so streaming was not exact.
    """
    import torch

    from megatrain.optim.pool import worker_threads
    from megatrain.train.loop import train

    started = time.monotonic()
    directory = _new_directory(out)
    if os.getloadavg()[0] > worker_threads() / 2:
        torch.set_num_threads(1)
        say("this machine is busy: one thread, since threads that wait for a core slow small steps down")
    num_files, num_bytes, num_skipped = _write_corpus(directory / "input" / "stdlib.jsonl")
    num_parameters = _write_model_config(directory / "input")
    say(
        f"model   Llama, {num_parameters / 1e6:.1f} M parameters, random weights; data: {num_files} files of "
        f"Python's standard library, {num_bytes / 1e6:.1f} MB ({num_skipped} undecodable files skipped)"
    )
    config = _config(directory, "run")
    say(f"1 train   {_STEPS} steps of {config.train.tokens_per_step} tokens, streamed through 2 slots ...")
    train(config)
    rows = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    means = [sum(row["loss"] for row in rows[start : start + 20]) / 20 for start in range(0, _STEPS, 20)]
    say(f"          loss {' -> '.join(f'{mean:.2f}' for mean in means)} (means of 20 steps)")
    assert means[-1] < means[0], "the loss did not fall"

    model = _open(directory / "run/hf")
    difference, norm_error = _compare_with_resident(config, rows, model)
    say(f"2 exact   all losses and weights against resident PyTorch + AdamW: max |diff| {difference:g}")
    say(f"          (both clipped by the run's norms, which are within {norm_error:.0e} of float64)")
    assert difference == 0, "streamed training differs from resident training"

    earlier = directory / "run/checkpoints" / f"step-{_RESUMED_FROM:08d}"
    train(_config(directory, "resumed"), resume=str(earlier))
    difference = _largest_difference(model, _open(directory / "resumed/hf"))
    say(f"3 resume  from step {_RESUMED_FROM}, against the uninterrupted run: max |diff| {difference:g}")
    assert difference == 0, "the resumed run differs from the uninterrupted one"

    say(f"4 export  {directory / 'run/hf'} opens with transformers; a sample:")
    for line in _sample(directory / "run").splitlines():
        say(f"          | {line}")
    say(f"done in {time.monotonic() - started:.0f} s. Next:")
    say(f"  megatrain sample {directory / 'run'} --prompt 'import '")
    say("  megatrain train --model PATH_OR_ID --data my.txt --steps 100 --out runs/mine")
    return directory


def _new_directory(out: Path | None) -> Path:
    if out is None:
        numbered = (Path("runs") / f"quickstart-{number}" for number in itertools.count(1))
        out = next(path for path in numbered if not path.exists())
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} is not an empty directory; give a new one with --out")
    try:
        (out / "input").mkdir(parents=True)
    except OSError as error:
        raise OutputError(
            f"{out} cannot be written: {error.strerror}; give another one with --out"
        ) from error
    return out


def _write_corpus(file: Path) -> tuple[int, int, int]:
    """Write sorted library sources, one per row; return the counts of files, bytes and undecodable files."""
    num_files = num_bytes = num_skipped = 0
    with file.open("w", encoding="utf-8") as rows:
        for source in _library_sources():
            try:
                text = source.read_bytes().decode("utf-8")
            except (UnicodeDecodeError, OSError):
                num_skipped += 1
                continue
            size = len(text.encode())
            if not text.strip():
                continue
            if num_bytes + size > _CORPUS_BYTES:
                break
            rows.write(json.dumps({"text": text}) + "\n")
            num_files, num_bytes = num_files + 1, num_bytes + size
    return num_files, num_bytes, num_skipped


def _library_sources() -> Iterator[Path]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for source in sorted(library.rglob("*.py")):
        if not _SKIPPED_FOLDERS.intersection(source.relative_to(library).parts):
            yield source


def _write_model_config(directory: Path) -> int:
    from transformers import LlamaConfig

    from megatrain.model.weights.skeleton import build_skeleton

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=_VOCAB,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    config.save_pretrained(directory)
    import torch

    return int(build_skeleton(config, dtype=torch.float32).num_parameters())


def _config(directory: Path, name: str) -> Config:
    return build_config(
        {
            "model": {"path": str(directory / "input"), "init": "random"},
            "data": {"path": str(directory / "input/stdlib.jsonl"), "seq_len": _SEQ_LEN},
            "train": {
                "steps": _STEPS,
                "micro_batch_size": _ROWS,
                "grad_accumulation": 1,
                "tokens_per_step": _ROWS * _SEQ_LEN,
                "precision": "fp32",
                "device": "cpu",
            },
            "optim": {"lr": 3e-3, "warmup_steps": 10},
            "checkpoint": {"every": _RESUMED_FROM},
            "log": {"progress": "bar" if sys.stderr.isatty() else "none"},
            "out": str(directory / name),
        }
    )


def _open(directory: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    was_shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory)
    finally:
        if was_shown:
            transformers_logging.enable_progress_bar()
    return model


def _compare_with_resident(
    config: Config, rows: list[dict[str, Any]], trained: PreTrainedModel
) -> tuple[float, float]:
    """Repeat the run with an ordinary model and `torch.optim.AdamW`.

    Returns:
        The largest difference of any loss or final weight, and the largest relative difference of the norms.
    """
    import torch
    from transformers import AutoModelForCausalLM, get_scheduler

    from megatrain.model.weights.initialise import initialise_weights
    from megatrain.model.weights.skeleton import read_config
    from megatrain.train.run_data import make_loader, read_data

    hf = Path(config.out) / "hf"
    loader = make_loader(read_data(config, read_config(config.model.path), checkpoint=hf), config)
    model = AutoModelForCausalLM.from_config(read_config(config.model.path))
    initialise_weights(model, seed=config.train.seed)
    model.train()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    exempt = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.optim.weight_decay},
        {"params": exempt, "weight_decay": 0.0},
    ]
    optim = config.optim
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    scheduler = get_scheduler(
        optim.schedule, optimizer, num_warmup_steps=optim.warmup_steps, num_training_steps=len(rows)
    )
    difference = norm_error = 0.0
    parameters = list(model.parameters())
    for row, micro_batches in zip(rows, loader, strict=False):
        loss = model(**micro_batches[0]).loss
        loss.backward()
        squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
        norm = float(torch.stack(squares).sum().sqrt())
        norm_error = max(norm_error, abs(norm - row["grad_norm"]) / norm)
        assert optim.max_grad_norm is not None
        torch.nn.utils.clip_grads_with_norm_(parameters, optim.max_grad_norm, torch.tensor(row["grad_norm"]))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        difference = max(difference, abs(float(loss.detach()) - row["loss"]))
    return max(difference, _largest_difference(model, trained)), norm_error


def _largest_difference(left: PreTrainedModel, right: PreTrainedModel) -> float:
    others = dict(right.named_parameters())
    return max(
        float((parameter.detach() - others[name].detach()).abs().max())
        for name, parameter in left.named_parameters()
    )


def _sample(run: Path) -> str:
    from megatrain.train.outputs.sample import sample

    level = logging.getLogger("transformers").level
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        return sample(str(run), _PROMPT, max_new_tokens=40, temperature=0.7)
    finally:
        logging.getLogger("transformers").setLevel(level)
