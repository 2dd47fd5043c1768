"""A whole run on real text, streamed and resident, and how far apart their losses are.

    python -m benchmarks.training.loss_curve [--data FILE_OR_DIRECTORY] [--steps N] [--results DIR] [--quick]
    python -m benchmarks.training.loss_curve --device cuda --shape 1b --precision bf16

Two copies of one random Llama train in one process, taking turns: one streamed by megatrain, every layer
recomputed, one by plain torch. They have the same seeds, batches, AdamW, clipping to norm 1.0 and learning
rates (warm-up, then cosine). The text is cut into sequences of tokens of a byte-level BPE that is trained on
it; without `--data` it is the source text of Python's standard library.

Files `<date>-loss-curve-<device>` in benchmarks/results, or `--results`: `.csv` has every step, `.svg` both
curves and their difference, `.json` the last line of stdout. `--quick` writes only with `--results`. In fp32
on the CPU all losses must be equal bit for bit, and so must the trained weights, else the script fails after
writing. A run cannot be resumed.

`clip_grad_norm_` adds up squares in fp32, megatrain in fp64, and clipping would carry that rounding into the
weights. So the resident side clips by the norm of the streamed side; `max_norm_error` is the largest relative
difference from one that it computes in fp64.

In bf16 the resident side has bf16 weights, and fp32 masters that AdamW updates; it rounds masters to weights
as megatrain does (half up). On a GPU it computes with all weights on the device, layers checkpointed, while
`--masters host` (the default) leaves the masters to torch's fused AdamW on the host, the kernel that
megatrain's equals bit for bit; with `--masters device` AdamW is torch's CUDA kernel, which rounds otherwise.
Both sides then use deterministic kernels. This has never run on a GPU.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from benchmarks.report import emit, hardware
from benchmarks.training.loss_plot import draw
from megatrain.data.loader import PackedLoader
from megatrain.data.tokenizer import end_of_document, train_tokenizer
from megatrain.optim.pool import worker_threads
from tests.data.documents import join_documents, read_texts, tokenize
from tests.reference import attach_plainly

Batch = dict[str, Tensor]

RESULTS = Path(__file__).parents[1] / "results"
BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 0
COLUMNS = ("step", "streamed_loss", "resident_loss", "difference", "grad_norm")
TEXT_FILES = {".txt", ".jsonl", ".json", ".parquet"}
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model, the size of its steps, and its learning rate."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    rows: int
    seq_len: int
    steps: int = 1000
    lr: float
    corpus_bytes: int
    """How much of the standard library is read."""


SHAPES = {
    "10m": Shape(
        hidden_size=256, intermediate_size=768, num_layers=10, num_heads=4, num_kv_heads=2, vocab_size=4096,
        rows=2, seq_len=128, lr=1e-3, corpus_bytes=4_000_000,
    ),
    "1b": Shape(
        hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, num_kv_heads=8,
        vocab_size=32000, rows=8, seq_len=1024, lr=3e-4, corpus_bytes=40_000_000,
    ),
    "tiny": Shape(
        hidden_size=64, intermediate_size=128, num_layers=3, num_heads=4, num_kv_heads=2, vocab_size=512,
        rows=2, seq_len=32, steps=20, lr=3e-3, corpus_bytes=200_000,
    ),
}  # fmt: skip


def main() -> None:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--data", type=Path, help="a text file, or a directory of them")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--shape", choices=list(SHAPES), default="10m")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--masters", choices=["host", "device"], default="host", help="of the resident side")
    parser.add_argument("--steps", type=int, help="also the length of the schedule (default: 1,000)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no step after this time")
    parser.add_argument("--threads", type=int, help="of torch (default: all cores)")
    parser.add_argument("--date", default=datetime.date.today().isoformat(), help="in the files' names")
    parser.add_argument("--results", type=Path, help="directory for the files")
    parser.add_argument("--quick", action="store_true", help="20 steps of a tiny model: checks the script")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shape = "tiny"
    shape = SHAPES[arguments.shape]
    num_steps = arguments.steps or shape.steps
    folder = arguments.results or (None if arguments.quick else RESULTS)
    torch.set_num_threads(arguments.threads or (1 if arguments.quick else worker_threads()))
    if arguments.device == "cuda":
        be_deterministic()
    began = time.perf_counter()
    loader, data = read_data(arguments.data, shape)
    rows, found = train_both(shape, loader, num_steps, arguments, began + arguments.seconds)
    result = {
        "benchmark": "loss_curve",
        **found,
        "config": {
            **asdict(shape),
            "steps": num_steps,
            "betas": BETAS,
            "eps": EPS,
            "weight_decay": WEIGHT_DECAY,
            "max_grad_norm": MAX_GRAD_NORM,
            "warmup_steps": warmup(num_steps),
            "schedule": "cosine",
            "seed": SEED,
            "device": arguments.device,
            "precision": arguments.precision,
            "resident_masters": arguments.masters,
            "threads": torch.get_num_threads(),
            "quick": arguments.quick,
        },
        "data": data,
        "hardware": hardware(),
        "seconds": time.perf_counter() - began,
    }
    out = None
    if folder is not None:
        suffix = {"10m": "", "tiny": "-quick"}.get(arguments.shape, f"-{arguments.shape}")
        out = folder / f"{arguments.date}-loss-curve-{arguments.device}{suffix}.json"
        write(rows, result, out)
    emit(result, None if out is None else str(out))
    if arguments.device == "cpu" and arguments.precision == "fp32":
        assert found["max_abs_difference"] == 0, "streamed and resident losses differ"
        assert found["max_weight_difference"] == 0, "streamed and resident weights differ"


def train_both(
    shape: Shape, loader: PackedLoader, num_steps: int, arguments: argparse.Namespace, stop: float
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Train both models, a step of one and then of the other; returns the rows and what they come to."""
    model = build(shape, torch.float32 if arguments.precision == "fp32" else torch.bfloat16)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    resident = Resident(model, shape, num_steps, arguments)
    engine = attach_plainly(
        model,
        device=arguments.device,
        precision=arguments.precision,
        num_slots=2,
        activations="recompute",
        head_chunk_tokens=shape.rows * shape.seq_len,  # one chunk: the model's own loss
    )
    optimizer = engine.adamw(
        lr=shape.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM
    )
    scheduler = schedule(optimizer, num_steps)
    rows: list[dict[str, float]] = []
    norm_error = 0.0
    print(f"Llama, {num_parameters / 1e6:.1f} M parameters, {num_steps} steps", flush=True)
    for step, micro_batches in zip(range(1, num_steps + 1), loader, strict=False):
        if time.perf_counter() > stop:
            break
        mine = engine.forward_backward(micro_batches).item()
        stats = optimizer.step()
        assert not stats.skipped
        assert stats.grad_norm > 0
        scheduler.step()
        theirs, norm = resident.step(micro_batches[0], stats.grad_norm)
        norm_error = max(norm_error, abs(stats.grad_norm / norm - 1))
        values = (step, mine, theirs, mine - theirs, stats.grad_norm)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
        if step % max(1, num_steps // 20) == 0:
            print(f"step {step}: streamed {mine:.6f}, resident {theirs:.6f}", flush=True)
    weight_difference = max(
        (master - resident.master(name)).abs().max().item() for name, master in engine.named_masters()
    )
    engine.detach()
    both = ("streamed", "resident")
    tail = max(1, len(rows) // 20)
    ends = {
        where: {side: statistics.fmean(row[f"{side}_loss"] for row in part) for side in both}
        for where, part in (("first", rows[:tail]), ("last", rows[-tail:]))
    }
    assert ends["last"]["streamed"] < ends["first"]["streamed"], f"the loss does not fall: {ends}"
    found = {
        "final_losses": {side: rows[-1][f"{side}_loss"] for side in both},
        "max_abs_difference": max(abs(row["difference"]) for row in rows),
        "bitwise_equal_steps": sum(row["difference"] == 0 for row in rows),
        "max_weight_difference": weight_difference,
        "max_norm_error": norm_error,
        "steps": len(rows),
        "tokens": len(rows) * shape.rows * shape.seq_len,
        "mean_losses": {"steps": tail, **ends},
        "num_parameters": num_parameters,
    }
    return rows, found


class Resident:
    """Plain torch: everything on the device, but for masters that `--masters` leaves on the host."""

    def __init__(
        self, model: LlamaForCausalLM, shape: Shape, num_steps: int, arguments: argparse.Namespace
    ) -> None:
        """Copy the model's weights."""
        self.model = LlamaForCausalLM(model.config).to(model.dtype).train()
        self.model.load_state_dict(model.state_dict())
        self.model.to(arguments.device)
        if arguments.device == "cuda":
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.weights = dict(self.model.named_parameters())
        # torch's fused kernel on the CPU rounds the last few elements of other sizes differently
        assert all(weight.numel() % 64 == 0 for weight in self.weights.values())
        self.is_plain = arguments.precision == "fp32" and arguments.device == "cpu"
        self.masters = self.weights
        if not self.is_plain:
            where = "cpu" if arguments.masters == "host" else arguments.device
            self.masters = {
                name: torch.nn.Parameter(weight.detach().to(where, torch.float32, copy=True))
                for name, weight in self.weights.items()
            }
        masters = list(self.masters.values())
        groups = [
            {"params": [p for p in masters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=shape.lr, betas=BETAS, eps=EPS, fused=True)
        self.scheduler = schedule(self.optimizer, num_steps)

    def step(self, batch: Batch, clip_by: float) -> tuple[float, float]:
        """Train one step; returns its loss and its own norm."""
        device = next(iter(self.weights.values())).device
        loss = self.model(**{key: value.to(device) for key, value in batch.items()}).loss
        loss.backward()
        if not self.is_plain:
            for name, weight in self.weights.items():
                assert weight.grad is not None
                master = self.masters[name]
                master.grad = weight.grad.to(master.device, torch.float32)
                weight.grad = None
        masters = list(self.masters.values())
        norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in masters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        clip_grads_with_norm_(masters, MAX_GRAD_NORM, torch.tensor(clip_by))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        if not self.is_plain:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    master = self.masters[name].detach()
                    weight.copy_(master if weight.dtype == torch.float32 else round_half_up(master))
        return loss.item(), norm.item()

    def master(self, name: str) -> Tensor:
        """Return a parameter's fp32 value, on the host."""
        return self.masters[name].detach().cpu()


def build(shape: Shape, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model with random weights, in training mode."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config).to(dtype).train()


def schedule(optimizer: torch.optim.Optimizer, num_steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm up, then follow a cosine to 0."""
    made: torch.optim.lr_scheduler.LRScheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=warmup(num_steps), num_training_steps=num_steps
    )
    return made


def warmup(num_steps: int) -> int:
    """Return the steps of the warm-up."""
    return num_steps // 20


def read_data(path: Path | None, shape: Shape) -> tuple[PackedLoader, dict[str, Any]]:
    """Tokenize the text; returns its batches and what it is."""
    if path is None:
        texts = list(library_sources(shape.corpus_bytes))
        name = f"source text of the standard library of Python {platform.python_version()}"
    else:
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix in TEXT_FILES)
        texts = [document.text for document in read_texts([str(file) for file in files])]
        name = ", ".join(file.name for file in files)
    tokenizer = train_tokenizer(texts, shape.vocab_size)
    documents = list(tokenize(texts, tokenizer, end_id=end_of_document(tokenizer)))
    rows = join_documents(documents, shape.seq_len)
    data = {
        "name": name,
        "bytes": sum(len(text.encode()) for text in texts),
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "tokenizer_size": len(tokenizer),
    }
    print(f"data: {name}: {len(rows):,} sequences of {shape.seq_len:,}", flush=True)
    return PackedLoader(rows, micro_batch_size=shape.rows, num_micro_batches=1, seed=SEED), data


def library_sources(limit: int) -> Iterator[str]:
    """Yield at most `limit` bytes of the standard library's source text, in the order of the files' names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(library.rglob("*.py"))
    wanted = (f for f in files if not SKIPPED_FOLDERS.intersection(f.relative_to(library).parts))
    size = 0
    for file in wanted:
        text = file.read_bytes().decode("utf-8", errors="replace")
        size += len(text.encode())
        if size > limit:
            return
        if text.strip():
            yield text


def round_half_up(master: Tensor) -> Tensor:
    """Round fp32 to bf16 as megatrain's split masters do: half a bf16 ulp up in magnitude, then truncate."""
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def write(rows: Sequence[dict[str, float]], result: dict[str, Any], out: Path) -> None:
    """Write the table and the plot beside the JSON file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:  # nine digits name an fp32 value
            table.writerow([row["step"], *(f"{row[column]:.9g}" for column in COLUMNS[1:])])
    config = result["config"]
    title = f"Training loss, streamed and resident: {result['num_parameters'] / 1e6:.1f}M parameters"
    subtitle = (
        f"{config['precision']}, {config['device']}, {config['rows']} x {config['seq_len']} tokens per step, "
        f"cosine from {config['lr']:g}; {result['data']['name']}"
    )
    curves = ([row[f"{side}_loss"] for row in rows] for side in ("streamed", "resident"))
    out.with_suffix(".svg").write_text(draw(*curves, title, subtitle))


def be_deterministic() -> None:
    """Choose kernels whose result does not depend on timing, and full fp32 products."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the library starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_math_sdp(True)


if __name__ == "__main__":
    main()
