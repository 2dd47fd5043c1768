"""What tiles of a long row cost in CPU time, and what they save of a layer's memory, seen from outside.

    python -m benchmarks.training.tiles_over_whole [--tokens 8192] [--tile 4096] [--hidden 256] [--layers 2]
        [--pairs 8] [--memory-tokens 16384 32768] [--memory-hidden 512] [--out FILE]

Time: a step of the engine on a small llama in fp32 on the CPU with one thread, once with rows in tiles and
once with whole rows, from the same weights on the same batches; steps alternate in one process, and the time
is that of all its threads. The result is the median of the ratios within pairs.

Memory: one decoder layer of Llama-8B's proportions, in fp32, runs forward and, again, backward in a process
of its own: under `recompute` with its input in memory, and under `keep_attention` with its input, and what
its attention returned, in a file. The most resident bytes of it, above those before, are set beside what
`megatrain plan` counts for such a layer: its input, what its backward takes, the gradient that it is given,
and those of its weights. So is what norm, head and loss of such a model take, from the last layer's output to
its gradient.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain
from benchmarks.report import emit, hardware, spread
from megatrain.config.choice import Choice, StepBatch
from megatrain.model.head.head import Head
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.tiles.kept import Store
from megatrain.model.tiles.position_wise import tile

CHUNK = 256
"""Tokens of a chunk of the head, where memory is measured."""


def main() -> None:
    """Measure both."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tile", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=8, help="of steps")
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each that are not counted")
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=[16_384, 32_768])
    parser.add_argument("--memory-hidden", type=int, default=512)
    parser.add_argument("--only-layer", type=int, help="measure a layer on so many tokens in this process")
    parser.add_argument("--only-late-layer", type=int, help="the same of one whose input waits in a file")
    parser.add_argument("--only-head", type=int, help="measure norm, head and loss on so many tokens in it")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only_layer:
        print(json.dumps(measure_layer(arguments, arguments.only_layer)))
        return
    if arguments.only_late_layer:
        print(json.dumps(measure_late_layer(arguments, arguments.only_late_layer)))
        return
    if arguments.only_head:
        print(json.dumps(measure_head(arguments, arguments.only_head)))
        return
    memory = [apart(arguments, "layer", tokens) for tokens in arguments.memory_tokens]
    late = [apart(arguments, "late-layer", tokens) for tokens in arguments.memory_tokens]
    of_head = [apart(arguments, "head", tokens) for tokens in arguments.memory_tokens]
    sides = {"tiles": engine_of(arguments, arguments.tile), "whole": engine_of(arguments, 0)}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(arguments.warm_up + arguments.pairs):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(3, 128, (1, arguments.tokens), generator=generator)
        losses = {}
        for name, step in sides.items():
            start_s = time.process_time()
            losses[name] = step(ids)
            seconds[name].append(time.process_time() - start_s)
        if number == 0 and losses["tiles"] != losses["whole"]:
            sys.exit(f"the first losses are not the same: {losses}")
    timed = {name: values[arguments.warm_up :] for name, values in seconds.items()}
    ratios = [a / b for a, b in zip(timed["tiles"], timed["whole"], strict=True)]
    emit(
        {
            "benchmark": "tiles_over_whole",
            "cpu_time_ratio": spread(ratios),
            "tiles_cpu_s": statistics.median(timed["tiles"]),
            "whole_cpu_s": statistics.median(timed["whole"]),
            "layer_memory": memory,
            "late_layer_memory": late,
            "head_memory": of_head,
            "config": {key: value for key, value in vars(arguments).items() if key != "out"},
            "hardware": hardware(),
        },
        arguments.out,
    )


def llama(hidden: int, layers: int, tokens: int) -> LlamaConfig:
    """Return a small llama of Llama-8B's proportions: four heads of queries to one of keys."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=7 * hidden // 2,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=tokens,
        use_cache=False,
    )


def engine_of(arguments: argparse.Namespace, tile_tokens: int) -> Any:
    """Attach a model, and return a function that takes a step on a row and returns its loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama(arguments.hidden, arguments.layers, arguments.tokens)).train()
    choice = Choice(lockstep=1, activations=("recompute",) * arguments.layers)
    batch = StepBatch(
        micro_batch_size=1, seq_len=arguments.tokens, num_micro_batches=1, tile_tokens=tile_tokens
    )
    engine = megatrain.attach(
        model, choice.with_defaults(num_layers=arguments.layers), batch=batch, compile="off"
    )
    optimizer = engine.adamw(1e-3, max_grad_norm=1.0)

    def step(ids: Tensor) -> float:
        loss = engine.forward_backward([{"input_ids": ids, "labels": ids}])
        optimizer.step()
        engine.sync()
        return float(loss)

    return step


# -- memory ------------------------------------------------------------------------------------------------


def apart(arguments: argparse.Namespace, part: str, tokens: int) -> dict[str, Any]:
    """Measure a part in a process of its own, whose large allocations are given back at once."""
    options = [f"--tile={arguments.tile}", f"--memory-hidden={arguments.memory_hidden}"]
    command = [sys.executable, "-m", "benchmarks.training.tiles_over_whole", f"--only-{part}={tokens}"]
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run([*command, *options], env=surroundings, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_layer(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run a layer forward and backward, and return the most bytes that it took, beside what is counted."""
    run, hidden, gradient = layer_of(arguments, tokens)
    before = begin()
    torch.autograd.backward(_Seed.apply(checkpoint(run, hidden, use_reentrant=False), gradient))
    taken = resident_bytes(most=True) - before
    counted = count(llama(arguments.memory_hidden, 1, tokens), tokens, arguments.tile).layers[0]
    # the count has the gradient that the layer is given; here it was there before
    planned = max(
        counted.backward_peak_bytes["recompute"] - hidden.nbytes, counted.forward_peak_bytes["recompute"]
    )
    return report(tokens, taken, planned, arguments.memory_hidden)


def measure_late_layer(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run a layer whose input, and what its attention returned, wait in a file; see `measure_layer`."""
    run, hidden, gradient = layer_of(arguments, tokens)
    leaving: list[InFile] = []

    def save(tensor: Tensor) -> InFile:
        leaving.append(InFile(tensor))
        return leaving[-1]

    def settle() -> None:
        for each in leaving:
            each.leave()

    store = Store(keeps_attention=True, save=save, settle=settle)
    source = InFile(hidden)
    source.leave()
    # no leaf of autograd, which would be there until the end
    first, row = [_Last.apply(hidden)], hidden.nbytes
    del hidden

    def run_on(_: Tensor) -> Tensor:
        given = first.pop() if first else source.load().requires_grad_()
        store.has_input(given, source)
        return run(given)

    def contexts() -> tuple[Any, Any]:
        return store.running(), store.running(is_last=True)

    before = begin() - row  # the input was there, and goes in the course of it
    torch.autograd.backward(
        _Seed.apply(checkpoint(run_on, torch.empty(0), use_reentrant=False, context_fn=contexts), gradient)
    )
    taken = resident_bytes(most=True) - before
    late = count(llama(arguments.memory_hidden, 1, tokens), tokens, arguments.tile).layers[0].late
    counted = late["keep_attention"]
    planned = max(counted.backward_peak_bytes - row, counted.forward_peak_bytes)
    return report(tokens, taken, planned, arguments.memory_hidden)


class InFile:
    """A tensor of one row that waits in a file."""

    def __init__(self, tensor: Tensor) -> None:
        """Write it; it is in memory too until it leaves."""
        self.shape, self.dtype, self._stride = tensor.shape, tensor.dtype, tensor.stride()
        self._tensor: Tensor | None = tensor.detach()
        self._file = io.FileIO(os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_RDWR), "r+")
        for part in _flat(tensor.detach()).split(1 << 20):
            self._file.write(part.numpy().tobytes())

    def leave(self) -> None:
        """Be in the file alone."""
        self._tensor = None

    def load(self) -> Tensor:
        """Read it as a whole."""
        if self._tensor is not None:
            return self._tensor
        found = torch.empty_strided(self.shape, self._stride, dtype=self.dtype)
        self._read(_flat(found), 0)
        return found

    def rows(self, tile: slice) -> Tensor:
        """Read some tokens."""
        if self._tensor is not None:
            return self._tensor[:, tile]
        found = torch.empty((1, tile.stop - tile.start, *self.shape[2:]), dtype=self.dtype)
        self._read(found.view(-1), tile.start * found[0, 0].nbytes)
        return found

    def _read(self, flat: Tensor, offset: int) -> None:
        self._file.seek(offset)
        view = memoryview(flat.numpy().data).cast("B")
        while view:
            view = view[self._file.readinto(view) :]


def _flat(tensor: Tensor) -> Tensor:
    """View the elements of a tensor in the order in which they are in memory."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def layer_of(arguments: argparse.Namespace, tokens: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """Make a layer in tiles, and return what runs it, its input, and the gradient that comes back."""
    config = llama(arguments.memory_hidden, 1, tokens)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    layer = model.model.layers[0]
    tile(model, [layer], arguments.tile)
    positions = torch.arange(tokens)[None]
    hidden = torch.zeros(1, tokens, config.hidden_size).normal_().requires_grad_()
    gradient = torch.zeros_like(hidden).normal_()
    angles = model.model.rotary_emb(hidden, positions)

    def run(given: Tensor) -> Tensor:
        output: Tensor = layer(given, position_embeddings=angles, position_ids=positions)
        return output

    few = slice(0, 2 * arguments.tile)  # what libraries take once is there before anything is measured
    cut = [angle[:, few] for angle in angles]
    layer(hidden[:, few].detach(), position_embeddings=cut, position_ids=positions[:, few]).sum().backward()
    layer.zero_grad(set_to_none=True)
    return run, hidden, gradient


def measure_head(arguments: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Run norm, head and loss behind a layer that does nothing, forward and backward; see `measure_layer`."""
    config = llama(arguments.memory_hidden, 1, tokens)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    tile(model, [*model.model.layers], arguments.tile)
    model.model.layers[0].forward = lambda hidden, **_: _Last.apply(hidden)
    head = Head(model, CHUNK, lambda: _Weights(model), is_fused=False)
    ids = torch.randint(3, 128, (1, tokens))
    inner = type(model).forward.__get__(model)
    named: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False, "return_dict": True}
    head.call(
        inner, {key: value[:, : 2 * CHUNK] if key[-1:] == "s" else value for key, value in named.items()}
    )

    before = begin()
    head.call(inner, named).loss.backward()
    taken = resident_bytes(most=True) - before
    anatomy = count(config, tokens, arguments.tile)
    planned = max(anatomy.head_forward_peak_bytes, anatomy.head_backward_peak_bytes)
    return report(tokens, taken, planned, arguments.memory_hidden)


def count(config: LlamaConfig, tokens: int, tile: int) -> Anatomy:
    """Count what is measured."""
    return count_anatomy(
        config,
        micro_batch_size=1,
        seq_len=tokens,
        precision="fp32",
        head_chunk_tokens=CHUNK,
        device_type="cpu",
        tile=tile,
    )


def begin() -> int:
    """Return the bytes of this process in memory, and let the most so far begin anew."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    return before


def report(tokens: int, taken: int, planned: int, hidden: int) -> dict[str, Any]:
    """Return what was measured; per token at Llama-8B's width in bf16, which takes half of fp32's bytes."""
    return {
        "tokens": tokens,
        "taken_bytes": taken,
        "planned_bytes": planned,
        "taken_over_planned": taken / planned,
        "taken_kib_per_token_in_bf16_at_4096_wide": taken / (1024 * tokens * hidden / 4096 * 2),
    }


class _Last(torch.autograd.Function):
    """Stands for the last layer: new hidden states, whose gradient ends here."""

    @staticmethod
    def forward(_: Any, hidden: Tensor) -> Tensor:
        """Return others of the same size."""
        return hidden * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        """Return one number, which takes no memory, for each."""
        return gradient.new_zeros(()).expand_as(gradient)


class _Weights:
    """The weights of a resident model's head, whose gradients leave with the backward."""

    is_followed = True

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.tensors = [model.lm_head.weight]

    def begin_backward(self) -> None:
        """They are there."""

    @contextmanager
    def sums(self) -> Iterator[list[Tensor | None]]:
        """No sums of a step."""
        yield [None]

    @contextmanager
    def leaves(self) -> Iterator[list[Tensor]]:
        """The weight is a leaf."""
        yield self.tensors


class _Seed(torch.autograd.Function):
    """Hands a gradient to an output that nobody holds any more, as the layer behind does."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, gradient: Tensor) -> Tensor:
        """Let go of the output."""
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        """Return the gradient."""
        return ctx.gradient, None


def resident_bytes(*, most: bool = False) -> int:
    """Return the bytes of this process in memory, or the most since the mark was cleared."""
    name = "VmHWM:" if most else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
