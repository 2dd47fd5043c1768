"""AdamW's moments in fp32, bf16 and int8: loss curves of whole runs, and the speed of the kernels.

    python -m benchmarks.optimizer.state_compression [--data FILE] [--pretrained DIRECTORY] [--steps N]
        [--results DIR]

Four copies of a model train in one process, taking turns step by step: moments in fp32; the same with one
weight nudged by 2^-20 of itself at the start; in bf16; in int8 (`optim.state`). Seeds, batches, AdamW,
clipping and learning rates (warm-up, then cosine) are the same. Rounding and the nudge both grow, since
training amplifies any change: a format is as good as fp32 as far as its difference is that of the nudge.
Weights and gradients are fp32, so nothing else differs.

One run is a Llama from random weights on `--data` (without it, the source text of Python's standard library);
the other goes on with the model in `--pretrained`, which is skipped without it. Losses are compared step by
step, as means of the last 50 steps, and on sequences that were held out of training.

The kernels update one large range, taking turns, with masters in bf16 and 16 bits and gradients in bf16.

Files `<date>-state-compression-cpu` in benchmarks/results, or `--results`: `.json` is the last line of
stdout; `-scratch` and `-pretrained` have every step as `.csv`, and the curves as `.svg`. `--quick` writes
only with `--results`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.report import emit, hardware, spread
from benchmarks.training.loss_curve import RESULTS, library_sources, schedule
from benchmarks.training.loss_plot import (
    CURVES,
    DIFFERENCE,
    GREY,
    HEIGHT,
    LEFT,
    RIGHT,
    WIDTH,
    axes,
    legend,
    line,
    nice_range,
    text,
)
from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.data.loader import PackedLoader
from megatrain.data.tokenizer import end_of_document, load_tokenizer, train_tokenizer
from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
from megatrain.optim.pool import WorkerPool, worker_threads
from megatrain.optim.updates import rounding_key
from tests.data.documents import join_documents, read_texts, tokenize
from tests.reference import attach_plainly

RUNS = ("fp32", "nudged", "bf16", "int8")
COLOURS = {"fp32": "#103a70", "nudged": "#999999", "bf16": "#f0a030", "int8": "#c02050"}
BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
HELD_OUT, TAIL, SMOOTH = 64, 50, 20
"""Sequences held out; steps of the final mean; steps of the moving mean in the lower panel."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, and how it is trained."""

    name: str
    rows: int
    seq_len: int
    lr: float
    steps: int


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--data", type=Path, help="a text file (default: Python's standard library)")
    parser.add_argument("--pretrained", type=Path, help="a model directory to go on with")
    parser.add_argument("--steps", type=int, default=400, help="of each run (default: 400)")
    parser.add_argument("--threads", type=int, help="of torch (default: all cores)")
    parser.add_argument("--numel", type=int, default=1 << 24, help="parameters that the kernels update")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="in the files' names")
    parser.add_argument("--results", type=Path, help="directory for the files")
    parser.add_argument("--quick", action="store_true", help="12 steps of a tiny model: checks the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.numel = 12, 1 << 16
    torch.set_num_threads(arguments.threads or (1 if arguments.quick else worker_threads()))
    folder = arguments.results or (None if arguments.quick else RESULTS)
    stem = f"{arguments.date}-state-compression-cpu"
    began = time.perf_counter()
    result: dict[str, Any] = {"benchmark": "state_compression", "kernels": time_kernels(arguments.numel)}
    result["scratch"] = run(scratch_task(arguments), arguments, folder, stem)
    result["pretrained"] = None
    if arguments.pretrained is None or not arguments.pretrained.is_dir():
        print(f"no pretrained model: --pretrained is {arguments.pretrained}; that run is skipped", flush=True)
    else:
        task = Task(name="pretrained", rows=2, seq_len=128, lr=5e-4, steps=arguments.steps)
        result["pretrained"] = run(task, arguments, folder, stem)
    result |= {"hardware": hardware(), "seconds": time.perf_counter() - began}
    result["config"] = {
        "betas": BETAS,
        "eps": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "schedule": "cosine",
        "threads": torch.get_num_threads(),
        "quick": arguments.quick,
    }
    emit(result, None if folder is None else str(folder / f"{stem}.json"))


# -- training ------------------------------------------------------------------------------------------------


def scratch_task(arguments: argparse.Namespace) -> Task:
    """Return the run from random weights."""
    rows, seq_len = (2, 32) if arguments.quick else (2, 128)
    return Task(name="scratch", rows=rows, seq_len=seq_len, lr=1e-3, steps=arguments.steps)


def run(task: Task, arguments: argparse.Namespace, folder: Path | None, stem: str) -> dict[str, Any]:
    """Train all copies, write the table and the plot, and return what they come to."""
    models, batches, held_out, data = prepare(task, arguments)
    losses, found = train(task, models, batches, held_out)
    found |= {"data": data, "rows": task.rows, "seq_len": task.seq_len, "lr": task.lr, "steps": task.steps}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write(task, losses, found, folder / f"{stem}-{task.name}")
    return found


def prepare(
    task: Task, arguments: argparse.Namespace
) -> tuple[dict[str, PreTrainedModel], list[dict[str, Tensor]], list[dict[str, Tensor]], str]:
    """Return equal models, the batches of all steps, held-out batches, and the data's name."""
    if arguments.data is None:
        texts, name = list(library_sources(2_000_000)), "source text of Python's standard library"
    else:
        texts, name = [document.text for document in read_texts([str(arguments.data)])], arguments.data.name
    if task.name == "scratch":
        tokenizer = train_tokenizer(texts, 512 if arguments.quick else 2048)
    else:
        tokenizer = load_tokenizer(str(arguments.pretrained))
    documents = tokenize(texts, tokenizer, end_id=end_of_document(tokenizer))
    windows = join_documents(documents, task.seq_len)
    assert len(windows) > 2 * HELD_OUT, f"{name} has {len(windows)} sequences; use a longer text"
    loader = PackedLoader(windows[:-HELD_OUT], micro_batch_size=task.rows, num_micro_batches=1, seed=0)
    batches = [micro_batches[0] for _, micro_batches in zip(range(task.steps), loader, strict=False)]
    last = PackedLoader(windows[-HELD_OUT:], micro_batch_size=HELD_OUT // 4, num_micro_batches=1, seed=0)
    held_out = [micro_batches[0] for _, micro_batches in zip(range(4), last, strict=False)]
    models = {name: build(task, arguments) for name in RUNS}
    with torch.no_grad():
        norm = [parameter for parameter in models["nudged"].parameters() if parameter.dim() == 1][-1]
        norm[:1] *= 1 + 2**-20
    return models, batches, held_out, name


def build(task: Task, arguments: argparse.Namespace) -> PreTrainedModel:
    """Return the model in training mode: always the same weights."""
    if task.name == "pretrained":
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            arguments.pretrained, dtype=torch.float32
        )
        return loaded.train()
    sizes = (64, 128, 2, 512) if arguments.quick else (192, 512, 6, 2048)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes[0],
            intermediate_size=sizes[1],
            num_hidden_layers=sizes[2],
            vocab_size=sizes[3],
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=task.seq_len,
            tie_word_embeddings=False,
            use_cache=False,
        )
    ).train()


def train(
    task: Task,
    models: dict[str, PreTrainedModel],
    batches: Sequence[dict[str, Tensor]],
    held_out: Sequence[dict[str, Tensor]],
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Train the copies in turn; returns their losses and what they come to."""
    engines, optimizers, schedulers = {}, {}, {}
    for name, model in models.items():
        state = name if name in DTYPES else "fp32"
        engine = attach_plainly(model, precision="fp32", activations="keep", optimizer_state=state)
        engines[name] = engine
        optimizers[name] = engine.adamw(
            lr=task.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
            updates="serial",  # an update ends within `step`, so it can be timed
        )
        schedulers[name] = schedule(optimizers[name], task.steps)
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for step, batch in enumerate(batches, start=1):
        for name, engine in engines.items():
            losses[name].append(engine.forward_backward([batch]).item())
            began = time.perf_counter()
            assert not optimizers[name].step().skipped
            seconds[name].append(time.perf_counter() - began)
            schedulers[name].step()
        if step % max(1, task.steps // 10) == 0:
            now = ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items())
            print(f"{task.name} step {step}: {now}", flush=True)
    found = summarise(losses, {name: evaluate(model, held_out) for name, model in models.items()})
    found["update_s"] = {name: spread(values[1:]) for name, values in seconds.items()}
    found["host_bytes"] = {name: engine.host_bytes for name, engine in engines.items()}
    found["num_parameters"] = sum(parameter.numel() for parameter in models["fp32"].parameters())
    for engine in engines.values():
        engine.detach()
    return losses, found


def evaluate(model: PreTrainedModel, held_out: Sequence[dict[str, Tensor]]) -> float:
    """Return the mean loss on held-out sequences."""
    with torch.no_grad():
        return statistics.fmean(model(**batch).loss.item() for batch in held_out)


def summarise(losses: dict[str, list[float]], held_out: dict[str, float]) -> dict[str, Any]:
    """Return final losses, and differences from fp32."""
    final = {name: statistics.fmean(values[-TAIL:]) for name, values in losses.items()}
    assert all(final[name] < losses[name][0] for name in losses), f"the loss does not fall: {final}"
    others = [name for name in losses if name != "fp32"]
    apart = {name: [a - b for a, b in zip(losses[name], losses["fp32"], strict=True)] for name in others}
    return {
        "final_losses": final,
        "held_out_losses": held_out,
        "final_minus_fp32": {name: final[name] - final["fp32"] for name in others},
        "held_out_minus_fp32": {name: held_out[name] - held_out["fp32"] for name in others},
        "mean_abs_difference": {name: statistics.fmean(map(abs, apart[name])) for name in others},
        "max_abs_smoothed_difference": {name: max(map(abs, smooth(apart[name]))) for name in others},
    }


def smooth(values: Sequence[float]) -> list[float]:
    """Return means over the last `SMOOTH` steps, fewer at the beginning."""
    return [statistics.fmean(values[max(0, end - SMOOTH) : end]) for end in range(1, len(values) + 1)]


def write(task: Task, losses: dict[str, list[float]], found: dict[str, Any], stem: Path) -> None:
    """Write every step as CSV, and the plot."""
    with stem.with_name(stem.name + ".csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *losses])
        for step, row in enumerate(zip(*losses.values(), strict=True), start=1):
            table.writerow([step, *(f"{loss:.9g}" for loss in row)])
    size = f"{found['num_parameters'] / 1e6:.2f}M parameters"
    title = f"Training loss with AdamW's moments in fp32, bf16 and int8: {size}"
    kind = "from random weights" if task.name == "scratch" else "a pretrained model, fine-tuned"
    subtitle = (
        f"{kind}; {task.rows} x {task.seq_len} tokens per step, cosine from {task.lr:g}; {found['data']}"
    )
    stem.with_name(stem.name + ".svg").write_text(draw(losses, title, subtitle))


def draw(losses: dict[str, list[float]], title: str, subtitle: str) -> str:
    """Return the SVG: the curves, and below them smoothed differences from fp32."""
    apart = {
        name: smooth([a - b for a, b in zip(values, losses["fp32"], strict=True)])
        for name, values in losses.items()
        if name != "fp32"
    }
    everything = [loss for values in losses.values() for loss in values]
    low, high = nice_range(min(everything), max(everything))
    bound = nice_range(0, max(abs(value) for values in apart.values() for value in values))[1]
    count = len(losses["fp32"])
    caption = (
        f"difference from fp32, mean of {SMOOTH} steps; nudged: fp32, one weight off by 2^-20 at the start"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, size=16),
        text(LEFT, 44, subtitle, colour=GREY),
        *axes(CURVES, low, high, count),
        *axes(DIFFERENCE, -bound, bound, count),
    ]
    for place, (name, values) in enumerate(losses.items()):
        width = 3.5 if name == "fp32" else 1.0
        parts.append(line(values, CURVES, low, high, COLOURS[name], width))
        parts += legend(name, COLOURS[name], width, CURVES[0] + 22 + 20 * place)
    for name, values in apart.items():
        parts.append(line(values, DIFFERENCE, -bound, bound, COLOURS[name], 1.4))
    parts += [
        text(LEFT, DIFFERENCE[0] - 10, caption),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "step", anchor="middle"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# -- kernels -------------------------------------------------------------------------------------------------


def time_kernels(numel: int, rounds: int = 15) -> dict[str, Any]:
    """Update one range in each format in turn; returns seconds, and speed over the fp32 kernel's."""
    pool = WorkerPool(worker_threads())
    planes = {state: make_planes(state, numel) for state in DTYPES}
    seconds: dict[str, list[float]] = {state: [] for state in DTYPES}
    for step in range(1, rounds + 3):
        noise = (*rounding_key(0, "weight", step), 0)
        hyper = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step, noise=noise)
        for state, ranges in planes.items():
            began = time.perf_counter()
            update_many(pool, [(hyper, ranges)])
            if step > 2:
                seconds[state].append(time.perf_counter() - began)
    pool.close()
    speeds = {
        state: spread([a / b for a, b in zip(seconds["fp32"], values, strict=True)])
        for state, values in seconds.items()
        if state != "fp32"
    }
    for state, values in speeds.items():
        print(f"kernel {state}: {values['median']:.2f} of fp32's speed", flush=True)
    return {
        "numel": numel,
        "threads": pool.num_threads,
        "seconds": {state: spread(values) for state, values in seconds.items()},
        "speed_over_fp32": speeds,
    }


def make_planes(state: str, numel: int) -> Planes:
    """Return planes as of an early step."""
    generator = torch.Generator().manual_seed(0)
    working = torch.randn(numel, generator=generator).mul_(0.02).bfloat16()
    gradient = torch.randn(numel, generator=generator).mul_(1e-3).bfloat16()
    scales = {}
    if state == "int8":
        count = -(-numel // SCALE_NUMEL)
        scales = {"exp_avg_scale": torch.zeros(count), "exp_avg_sq_scale": torch.zeros(count)}
    return Planes(
        working=working,
        remainder=torch.zeros(numel, dtype=torch.int16),
        exp_avg=torch.zeros(numel, dtype=DTYPES[state]),
        exp_avg_sq=torch.zeros(numel, dtype=DTYPES[state]),
        gradient=gradient,
        **scales,
    )


if __name__ == "__main__":
    main()
