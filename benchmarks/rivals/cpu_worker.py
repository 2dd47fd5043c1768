"""One side of `cpu.py`: a process that trains one step per line on stdin, and waits in between.

The first line on stdout says that it is ready, or why it cannot run; then one JSON line answers each line of
stdin. Only the streamed side imports megatrain, so that another side may run in an environment without it.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HYPER: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0

Step = Callable[[float | None], tuple[float, float]]
"""Trains one step; takes the norm to clip by (None: its own), returns its loss and its own norm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What every side gets alike."""

    hidden_size: int = 512
    intermediate_size: int = 1408
    num_layers: int = 8
    num_heads: int = 8
    vocab_size: int = 8192
    micro_batches: int = 8
    """Micro-batches of a step."""
    rows: int = 2
    """Sequences of a micro-batch."""
    seq_len: int = 128
    precision: str = "fp32"
    threads: int = 1
    is_bound: bool = False
    """Bind the process to as many CPUs as it has threads."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batches * self.rows * self.seq_len


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=list(SIDES))
    parser.add_argument("setting", help="JSON")
    arguments = parser.parse_args()
    setting = Setting(**json.loads(arguments.setting))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    if setting.is_bound:  # before any library counts the CPUs
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: setting.threads])
    try:
        step, about = SIDES[arguments.side](setting)
    except Exception as error:
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        sys.exit(1)
    import torch

    answer(torch=torch.__version__, threads=torch.get_num_threads(), **about)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "step":
            began = time.perf_counter()
            loss, norm = step(command["clip_by"])
            answer(seconds=time.perf_counter() - began, loss=loss, grad_norm=norm)
        elif command["do"] == "peak":
            answer(peak_rss_bytes=memory("VmHWM"))
            Path("/proc/self/clear_refs").write_text("5")  # from here on, another peak


def streamed(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """megatrain: every decoder layer passes through two slots."""
    import megatrain
    from megatrain.config.choice import Choice

    model, batches = prepare(setting)
    engine = megatrain.attach(
        model,
        device="cpu",
        precision=setting.precision,
        choice=Choice(lockstep=setting.micro_batches).with_defaults(model.config.num_hidden_layers),
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=MAX_GRAD_NORM)

    def step(_: float | None) -> tuple[float, float]:
        loss = engine.forward_backward(batches)
        stats = optimizer.step()
        assert not stats.skipped
        return loss.item(), stats.grad_norm

    return step, {"lockstep": setting.micro_batches}


def resident(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """Plain torch, everything in memory; in bf16 with fp32 masters, which add up the gradients."""
    import torch
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    model, batches = prepare(setting)
    checkpoint_layers(model)
    is_mixed = setting.precision == "bf16"
    weights = list(model.parameters())
    masters = weights
    if is_mixed:
        masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizer = torch.optim.AdamW(decay_groups(masters), **HYPER, fused=True)
    extra = {} if len(batches) == 1 else {"num_items_in_batch": torch.tensor(num_targets(setting))}

    def step(clip_by: float | None) -> tuple[float, float]:
        losses = []
        for batch in batches:
            loss = model(**batch, **extra).loss
            loss.backward()
            losses.append(loss.detach())
            if is_mixed:
                for weight, master in zip(weights, masters, strict=True):
                    assert weight.grad is not None
                    if master.grad is None:
                        master.grad = weight.grad.float()
                    else:
                        master.grad += weight.grad
                    weight.grad = None
        # What clip_grad_norm_ does, with the norm open to the caller.
        norm = get_total_norm([master.grad for master in masters if master.grad is not None])
        clip_grads_with_norm_(masters, MAX_GRAD_NORM, norm if clip_by is None else torch.tensor(clip_by))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if is_mixed:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        return functools.reduce(torch.add, losses).item(), norm.item()

    return step, {}


def fsdp2(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """Torch's fully_shard with CPU offload, one process, gloo, each layer a unit of its own."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, batches = prepare(setting, dtype=torch.float32)
    checkpoint_layers(model)
    is_mixed = setting.precision == "bf16"
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (1,)),
        # Page-locked memory needs an accelerator: "Cannot access accelerator device when none is available".
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    if is_mixed:
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, **arguments, reshard_after_forward=True)
    fully_shard(model, **arguments)  # embedding and head stay until backward, as the streamed side's do
    optimizer = torch.optim.AdamW(decay_groups(model.parameters()), **HYPER, fused=True)

    def step(_: float | None) -> tuple[float, float]:
        losses = []
        for batch in batches:
            loss = model(**batch).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        full = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return functools.reduce(torch.add, losses).item(), full.item()

    return step, {"policy": "CPUOffloadPolicy(pin_memory=False)", "mesh": "cpu, gloo, world size 1"}


def deepspeed(setting: Setting) -> tuple[Step, dict[str, Any]]:
    """DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the CPU, one process, gloo."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0")
    import deepspeed as library
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, batches = prepare(setting, dtype=torch.float32)
    checkpoint_layers(model)
    offload = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": setting.rows,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": setting.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": HYPER},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "offload_optimizer": offload,
            "offload_param": offload,
            "reduce_bucket_size": 4e8,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
        },
    }
    engine, *_ = library.initialize(
        model=model, model_parameters=decay_groups(model.parameters()), config=config
    )

    def step(_: float | None) -> tuple[float, float]:
        losses = []
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        norm = engine.get_global_grad_norm()
        assert norm is not None
        return (functools.reduce(torch.add, losses) / len(losses)).item(), float(norm)

    optimizer = type(engine.optimizer.optimizer).__name__
    return step, {"version": library.__version__, "optimizer": optimizer, "config": config}


SIDES: dict[str, Callable[[Setting], tuple[Step, dict[str, Any]]]] = {
    "streamed": streamed,
    "resident": resident,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
}


def prepare(setting: Setting, dtype: Any = None) -> tuple[Any, list[dict[str, Any]]]:
    """Return the model with the weights, and the micro-batches, that every side has.

    Args:
        setting: What to build.
        dtype: Of the weights; None: the precision's. Sides that keep fp32 weights themselves ask for them.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(setting.threads)
    config = LlamaConfig(
        hidden_size=setting.hidden_size,
        intermediate_size=setting.intermediate_size,
        num_hidden_layers=setting.num_layers,
        num_attention_heads=setting.num_heads,
        num_key_value_heads=setting.num_heads,
        vocab_size=setting.vocab_size,
        max_position_embeddings=setting.seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float().train()
    # torch's fused kernel rounds the last few elements of other sizes differently
    assert all(parameter.numel() % 64 == 0 for parameter in model.parameters())
    if dtype is None and setting.precision == "bf16":
        model = model.to(torch.bfloat16)
    elif setting.precision == "bf16":  # the same weights: rounded once, then kept in fp32
        model = model.to(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(setting.micro_batches):
        ids = torch.randint(0, setting.vocab_size, (setting.rows, setting.seq_len), generator=generator)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return model, batches


def num_targets(setting: Setting) -> int:
    """Return how many tokens of a step are predicted: the first of a sequence is not."""
    return setting.micro_batches * setting.rows * (setting.seq_len - 1)


def checkpoint_layers(model: Any) -> None:
    """Recompute every layer in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def decay_groups(parameters: Any) -> list[dict[str, Any]]:
    """Split parameters as `engine.adamw` does: norms do not decay."""
    listed = list(parameters)
    return [
        {"params": [p for p in listed if p.ndim >= 2], "weight_decay": HYPER["weight_decay"]},
        {"params": [p for p in listed if p.ndim < 2], "weight_decay": 0.0},
    ]


def memory(name: str) -> int:
    """Return a value of this process in bytes, as Linux counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


if __name__ == "__main__":
    main()
