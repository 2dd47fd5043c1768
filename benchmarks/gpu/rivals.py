"""The other sides: plain torch with everything on the device, DeepSpeed ZeRO-3 offload, FSDP2 offload.

All sides run the same Hugging Face model with the same bf16-exact weights, on the same tokens, with the same
AdamW on fp32 masters of every parameter and clipping at 1.0, in a process of their own. No side replaces
kernels of the model (no Liger), and each rival recomputes its layers, as its documentation advises.

They need packages that megatrain does not: DeepSpeed needs `deepspeed`, with `hjson`, `ninja`, `psutil`,
`py-cpuinfo`, `pydantic`, `msgpack`, `einops` and `nvidia-ml-py`, and a CUDA compiler for its CPU AdamW, which
it builds when it is first used. FSDP2 is a part of torch.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.cells import AUTO
from benchmarks.gpu.engine import Session, ours
from benchmarks.gpu.measure import (
    HYPER,
    MAX_GRAD_NORM,
    Step,
    Work,
    attempts_until_one_fits,
    config_of,
    measure,
    model_flops,
    num_parameters,
    random_model,
)
from benchmarks.gpu.run import Record, UnavailableError, release

ROWS = 8
"""Sequences of 1k of a rival's micro-batch: its logits in fp32 take 4 GB."""


# -- plain torch -------------------------------------------------------------------------------------------


def cell_resident(record: Record, session: Session) -> None:
    """8B shape, 32k tokens a step: plain torch, all state on the device, of as many layers as fit.

    Where that is not the whole model, `scaled_tokens_per_s` is what the whole would make at the same FLOPs,
    and megatrain is measured at the same depth.
    """
    whole = config_of("8b", session.is_dry)
    count = whole.num_hidden_layers
    depths = [max(1, count * eighths // 8) for eighths in (8, 7, 6, 5, 4)]
    work = Work(seq_len=1024, rows=4, num_micro_batches=8)
    shown: dict[str, Any] = {}

    def run(attempt: dict[str, Any]) -> dict[str, Any]:
        return resident(session, work, attempt["num_layers"])

    attempts = [{"num_layers": depth} for depth in dict.fromkeys(depths)]
    for row in attempts_until_one_fits(attempts, run, lambda: release(session.device)):
        shown = {"label": "plain torch", "shape": "8b", **row}
        if "num_layers" in row:
            shown["scaled_tokens_per_s"] = scaled(row, whole, work.sized(session.is_dry).seq_len)
        record.append("runs", shown)
    release(session.device)
    depth = shown["num_layers"]
    record.add(num_layers=depth, is_whole=depth == count, scaled_tokens_per_s=shown["scaled_tokens_per_s"])
    if depth < count or session.is_dry:
        same = Work(seq_len=1024, rows=32)
        label = f"megatrain, {depth} layers"
        row = ours(record, session, "8b", same, [AUTO], num_layers=depth, label=label)
        record.add(ours_over_plain=row["tokens_per_s"] / shown["tokens_per_s"])
        session.drop()


def scaled(row: dict[str, Any], whole: Any, seq_len: int) -> float:
    """Return the tokens/s of the whole model at the FLOP/s of a shallower one."""
    per_layer = (row["num_parameters"] - outer_parameters(whole)) / row["num_layers"]
    parameters = int(outer_parameters(whole) + per_layer * whole.num_hidden_layers)
    return float(row["model_flops_per_s"] / model_flops(whole, parameters, seq_len))


def outer_parameters(config: Any) -> int:
    """Count the parameters of embedding, head and last norm."""
    matrices = 1 if config.tie_word_embeddings else 2
    return int(config.hidden_size * (matrices * config.vocab_size + 1))


def resident(session: Session, work: Work, num_layers: int) -> dict[str, Any]:
    """Train in plain torch: bf16 weights and gradients, fp32 masters and moments, 16 bytes per parameter."""
    import torch

    work = work.sized(session.is_dry)
    config = config_of("8b", session.is_dry, num_layers)
    model = random_model(config, dtype=torch.bfloat16, device=session.device, small=session.is_dry)
    checkpoint_layers(model)
    weights = list(model.parameters())
    masters = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    optimizers = [torch.optim.AdamW([master], **HYPER, fused=True) for master in masters]
    batches = on_device(work.micro_batches(config.vocab_size), session.device)

    def step() -> tuple[float, float]:
        losses = []
        for batch in batches:
            loss = model(**batch).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        gradients = [weight.grad for weight in weights]
        norm = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).norm()
        scale = (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0)
        for weight, master, optimizer in zip(weights, masters, optimizers, strict=True):
            master.grad = weight.grad.float().mul_(scale)  # one fp32 gradient at a time
            weight.grad = None
            optimizer.step()
            master.grad = None
            with torch.no_grad():
                weight.copy_(master)
        return functools.reduce(torch.add, losses).item(), norm.item()

    measuring = session.measuring()
    row = measure(step, measuring, work=work, config=config, parameters=num_parameters(model))
    return {**row, "bytes_per_parameter": 16, "master_dtypes": dtypes(masters)}


# -- DeepSpeed ---------------------------------------------------------------------------------------------


def cell_3b_deepspeed(record: Record, session: Session) -> None:
    """3B, 8k and 32k tokens a step: DeepSpeed ZeRO-3, parameters and optimizer on the host.

    Raises:
        UnavailableError: DeepSpeed is not installed.
    """
    import torch

    if session.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        import deepspeed
    except ImportError as error:
        raise UnavailableError(f"not installed: {error}") from error

    begin_group(session)
    config = config_of("3b", session.is_dry)
    model = random_model(config, dtype=torch.bfloat16, small=session.is_dry)
    parameters = num_parameters(model)
    checkpoint_layers(model)
    settings = deepspeed_settings(1, is_dry=session.is_dry)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    masters = engine.optimizer.fp32_partitioned_groups_flat
    assert all(master.dtype == torch.float32 for master in masters), dtypes(masters)
    record.add(
        version=deepspeed.__version__,
        config=settings,
        master_dtypes=dtypes(masters),
        optimizer=type(engine.optimizer.optimizer).__name__,
        threads=torch.get_num_threads(),
    )

    def step_of(batches: Sequence[dict[str, Any]]) -> Step:
        engine.set_train_batch_size(ROWS * len(batches))  # that is, the number of micro-batches
        engine.micro_steps = 0  # by whose remainder it tells a step's last one

        def step() -> tuple[float, float]:
            losses = []
            for batch in batches:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return (functools.reduce(torch.add, losses) / len(losses)).item(), float(
                engine.get_global_grad_norm()
            )

        return step

    measure_rival(record, session, config, parameters, step_of)
    engine.destroy()
    end_group()


def deepspeed_settings(accumulation: int, *, is_dry: bool) -> dict[str, Any]:
    """Return the configuration that DeepSpeed's and LLaMA-Factory's examples of ZeRO-3 offload have."""
    offload = {"device": "cpu", "pin_memory": not is_dry}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": MAX_GRAD_NORM,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "sub_group_size": 1e9,
            "offload_optimizer": dict(offload),
            "offload_param": dict(offload),
            "reduce_bucket_size": 4e8,
            "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e5,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
        },
    }


# -- FSDP2 -------------------------------------------------------------------------------------------------


def cell_3b_fsdp2(record: Record, session: Session) -> None:
    """3B, 8k and 32k tokens a step: torch's fully_shard with CPU offload."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    begin_group(session)
    config = config_of("3b", session.is_dry)
    model = random_model(config, dtype=torch.float32, small=session.is_dry)
    parameters = num_parameters(model)
    checkpoint_layers(model)
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh(session.device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=not session.is_dry),
        "reshard_after_forward": True,
    }
    for layer in model.model.layers:
        fully_shard(layer, **arguments)
    fully_shard(model, **arguments)
    for module in model.modules():  # offloaded are parameters; tables of positions are not
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(session.device)
    masters = list(model.parameters())
    assert all(master.dtype == torch.float32 for master in masters), dtypes(masters)
    optimizer = torch.optim.AdamW(masters, **HYPER, fused=True)
    record.add(
        version=torch.__version__,
        config={"param_dtype": "bfloat16", "reduce_dtype": "float32", "pin_memory": not session.is_dry},
        master_dtypes=dtypes(masters),
        optimizer="torch.optim.AdamW(fused=True)",
        threads=torch.get_num_threads(),
    )

    def step_of(batches: Sequence[dict[str, Any]]) -> Step:
        def step() -> tuple[float, float]:
            losses = []
            for batch in batches:
                loss = model(**batch).loss / len(batches)
                loss.backward()
                losses.append(loss.detach())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad()
            full = norm.full_tensor() if isinstance(norm, DTensor) else norm
            return functools.reduce(torch.add, losses).item(), full.item()

        return step

    measure_rival(record, session, config, parameters, step_of)
    end_group()


# -- what they share ---------------------------------------------------------------------------------------


def measure_rival(record: Record, session: Session, config: Any, parameters: int, step_of: Any) -> None:
    """Measure a rival at the two sizes of a step, the small one first."""
    until = session.until
    for number in (1, 4):
        # the first may take half of the time that is left
        session.until = until if number == 4 else (until + time.monotonic()) / 2
        work = Work(seq_len=1024, rows=ROWS, num_micro_batches=number).sized(session.is_dry)
        batches = on_device(work.micro_batches(config.vocab_size), session.device)
        measuring = session.measuring(steps=10 if number == 1 else 6)
        row = measure(step_of(batches), measuring, work=work, config=config, parameters=parameters)
        record.append("runs", {"label": record.path.stem, "shape": "3b", **row})
        assert row["is_falling"], f"the loss does not fall: {row['losses']}"
    session.until = until


def begin_group(session: Session) -> None:
    """Begin a process group of this process alone, with threads for the whole machine."""
    import torch
    import torch.distributed as dist

    from megatrain.optim.threads import worker_threads

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    if session.device.type == "cuda":
        torch.cuda.set_device(session.device)
        torch.set_num_threads(worker_threads())
    backend = "cpu:gloo,cuda:nccl" if session.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def end_group() -> None:
    """End the process group."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def checkpoint_layers(model: Any) -> None:
    """Recompute every layer in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def on_device(batches: Sequence[dict[str, Any]], device: Any) -> list[dict[str, Any]]:
    """Move a step's batches to the device once."""
    return [{key: value.to(device) for key, value in batch.items()} for batch in batches]


def dtypes(tensors: Sequence[Any]) -> list[str]:
    """Name the dtypes that occur."""
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
