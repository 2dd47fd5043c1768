"""One row of 1,048,576 tokens, trained on the CPU in tiles, and its memory beside what is planned.

    python -m benchmarks.training.million_tokens [--tokens 1048576] [--hidden 16] [--head-dim 16] [--layers 1]
        [--activations keep_attention] [--head-chunk-tokens 4096] [--out FILE]

A random llama of one head takes one step of one row in fp32 with one thread. Rows of more than 131,072
tokens pass in tiles by default, and attention is kept, so that it runs once in each direction; its time grows
with the square of the row. Beside the plan's bytes stands by how much the process has grown at its peak, from
before it made the model; a step of a short row comes before, which loads what is loaded once. The C library
gives freed memory back at once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed.long_rows import MALLOC, memory
from benchmarks.report import emit, hardware

VOCABULARY = 256
SHORT = 256
"""Tokens of the row that loads what is loaded once, in tiles of half of it."""


def main() -> None:
    """Train the row in a process of its own, and say what it took."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--activations", default="keep_attention")
    parser.add_argument("--head-chunk-tokens", type=int, default=4096)
    parser.add_argument("--only", action="store_true", help="train in this process")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    given = {name: value for name, value in vars(arguments).items() if name not in ("only", "out")}
    if arguments.only:
        print(json.dumps(measured(given)))
        return
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "benchmarks.training.million_tokens", "--only", *options]
    done = subprocess.run(
        command, env={**os.environ, **MALLOC}, check=True, stdout=subprocess.PIPE, text=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    grown, planned = found["grown_bytes"], found["planned_bytes"]
    print(
        f"a row of {arguments.tokens:,} tokens, tiles of {found['tile_tokens']:,}: loss {found['loss']:.7f}, "
        f"norm {found['norm']:.7f}; {found['cpu_s']:,.0f} s of CPU time in {found['step_s']:,.0f} s"
    )
    print(
        f"grown by {grown / 2**20:,.1f} MiB, planned {planned / 2**20:,.1f} MiB ({grown / planned - 1:+.1%})"
    )
    emit({"benchmark": "million_tokens", **found, "config": given, "hardware": hardware()}, arguments.out)


def measured(given: dict[str, Any]) -> dict[str, Any]:
    """Train a short row and then the long one, and return what the long one took."""
    torch.set_num_threads(1)
    step({**given, "tokens": SHORT}, tile_tokens=SHORT // 2)
    base = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    found = step(given)
    return {**found, "grown_bytes": memory("VmHWM") - base}


def step(given: dict[str, Any], *, tile_tokens: int | None = None) -> dict[str, Any]:
    """Take one step on one row; tiles are as by default, or so long."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import megatrain
    from megatrain.config.choice import Choice, StepBatch
    from megatrain.config.tiles import tile_of
    from megatrain.model.profile.count import count_anatomy
    from megatrain.plan.search.planner import plan_of
    from megatrain.plan.search.request import Request
    from megatrain.stream.lanes.devices import make_lanes
    from megatrain.stream.machine import machine_of

    tokens = given["tokens"]
    tile = tile_of(tokens, tile_tokens)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=given["hidden"],
        intermediate_size=3 * given["hidden"],
        num_hidden_layers=given["layers"],
        num_attention_heads=1,
        head_dim=given["head_dim"],
        max_position_embeddings=tokens,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    activations = (given["activations"],) * given["layers"]
    choice = Choice(lockstep=1, activations=activations, head_chunk_tokens=given["head_chunk_tokens"])
    choice = choice.with_defaults(num_layers=given["layers"])
    batch = StepBatch(micro_batch_size=1, seq_len=tokens, num_micro_batches=1, tile_tokens=tile_tokens)
    counted = count_anatomy(
        config,
        micro_batch_size=1,
        seq_len=tokens,
        precision="fp32",
        device_type="cpu",
        tile=tile,
        head_chunk_tokens=given["head_chunk_tokens"],
    )
    machine = machine_of(make_lanes("cpu"), "fp32")
    plan = plan_of(Request(spec=machine, anatomy=counted, batch=batch, choice=choice), choice)
    engine = megatrain.attach(model, choice, batch=batch, compile="off")
    optimizer = engine.adamw(1e-3, max_grad_norm=1.0)
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))
    before_s, before_cpu_s = time.perf_counter(), time.process_time()
    loss = float(engine.forward_backward([{"input_ids": ids, "labels": ids}]))
    norm = optimizer.step().grad_norm
    engine.sync()
    return {
        "loss": loss,
        "norm": norm,
        "step_s": time.perf_counter() - before_s,
        "cpu_s": time.process_time() - before_cpu_s,
        "tile_tokens": tile,
        "planned_bytes": plan.tier_bytes("ram"),
        "planned_pools": {pool.name: pool.nbytes for pool in plan.pools},
    }


if __name__ == "__main__":
    main()
