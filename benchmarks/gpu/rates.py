"""What the machine can do: copies each way, the matmul and attention rates, AdamW on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.gpu.run import Record, best_s, device_of, matmul_flops, synchronize

ADAMW_BYTES = 26
"""Of host memory per parameter: a split master with bf16 gradient reads 14 and writes 12."""


def environment(record: Record, is_dry: bool) -> None:
    """Record the machine, and that the device computes at all."""
    import torch

    from benchmarks.report import hardware
    from megatrain.hardware import host_memory

    record.add(
        hardware=hardware(),
        cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        host_available_bytes=host_memory().available_bytes,
        host_limit_source=host_memory().source,
    )
    device = device_of(is_dry)
    assert (torch.ones(8, 8, device=device) @ torch.ones(8, 8, device=device)).sum().item() == 512
    if not is_dry:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        record.add(
            free_bytes=free,
            total_bytes=total,
            capability=[properties.major, properties.minor],
            num_copy_engines=getattr(properties, "async_engine_count", None),
        )


def rates(record: Record, is_dry: bool) -> None:
    """Measure the matmul peak, copies, attention, and the host's AdamW."""
    record.add(matmul_flops=matmul_flops(is_dry))
    record.add(**copies(record, is_dry))
    print(json.dumps({"rates": record.values}), flush=True)
    for row in attention_rates(is_dry):
        record.append("attention", row)
    for row in adamw_rates(is_dry):
        record.append("adamw", row)
    if not is_dry:  # last: a refusal may leave the device unusable for this process
        record.add(copy_across_locked_pieces=copy_across_pieces())


def copies(record: Record, is_dry: bool) -> dict[str, Any]:
    """Measure copies each way from each kind of host memory, and both ways at once, in bytes/s."""
    import torch

    from megatrain.hardware.accelerators import vendor_of
    from megatrain.store.arena import Arena

    device = device_of(is_dry)
    nbytes = 1 << 22 if is_dry else 1 << 30
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    arena = Arena(nbytes)
    plain, locked = torch.ones(nbytes, dtype=torch.uint8), arena.view(torch.uint8, 0, nbytes).fill_(1)
    kinds = {"pageable": plain}
    if not is_dry:
        record.add(arena_locks=arena.lock(vendor_of(device)))
        kinds |= {"locked_arena": locked, "torch_pinned": torch.ones(nbytes, dtype=torch.uint8).pin_memory()}
    found = {}
    for kind, host in kinds.items():
        found[f"h2d_{kind}"] = nbytes / best_s(device, lambda: on_device.copy_(host, non_blocking=True))  # noqa: B023
        found[f"d2h_{kind}"] = nbytes / best_s(device, lambda: host.copy_(on_device, non_blocking=True))  # noqa: B023
    result: dict[str, Any] = {"copy_bytes_per_s": found}
    other = torch.zeros_like(on_device)
    both = both_ways(device, (on_device, locked), (kinds.get("torch_pinned", plain), other))
    result["both_ways_bytes_per_s"] = 2 * nbytes / best_s(device, both)
    arena.unlock()
    return result


def both_ways(device: Any, up: tuple[Any, Any], down: tuple[Any, Any]) -> Callable[[], None]:
    """Return a function that copies to the device and from it at the same time; pairs of target, source."""
    import torch

    streams = [torch.cuda.Stream(), torch.cuda.Stream()] if device.type == "cuda" else [None, None]
    synchronize(device)

    def both() -> None:
        for stream, (target, source) in zip(streams, (up, down), strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return both


def attention_rates(
    is_dry: bool,
    num_heads: int = 32,
    head_dim: int = 128,
    tokens: int | None = None,
    lengths: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Measure causal attention forward and backward, in FLOP/s at half, by backend and sequence length.

    Args:
        is_dry: Whether shapes are tiny.
        num_heads: The number of heads.
        head_dim: The numbers of a head.
        tokens: The tokens of all rows; None: as many as the suite takes.
        lengths: The lengths of rows; None: those of the suite.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device = device_of(is_dry)
    usual, usual_lengths = (256, (64, 128)) if is_dry else (32768, (1024, 8192))
    tokens, lengths = tokens or usual, lengths or usual_lengths
    backends = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    if is_dry:
        backends, num_heads = {"math": SDPBackend.MATH}, 2
    rows = []
    for length in lengths:
        shape = (tokens // length, num_heads, length, head_dim)
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)]
        query, key, value, upstream = inputs
        flops = 4 * shape[0] * num_heads * length**2 * head_dim / 2
        for name, backend in backends.items():
            row: dict[str, Any] = {"backend": name, "seq_len": length, "tokens": tokens}
            try:
                leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]

                def forward(leaves: list[Any] = leaves, backend: Any = backend) -> Any:
                    with sdpa_kernel(backend):
                        query, key, value = leaves
                        return scaled_dot_product_attention(query, key, value, is_causal=True)

                def whole(
                    leaves: list[Any] = leaves, upstream: Any = upstream, forward: Any = forward
                ) -> None:
                    torch.autograd.grad(forward(), leaves, upstream)

                row["forward_flops_per_s"] = flops / best_s(device, forward)
                # the backward makes five products of the forward's two
                row["flops_per_s"] = 3.5 * flops / best_s(device, whole)
            except RuntimeError as error:  # a build without this backend
                row["error"] = str(error)[:200]
            rows.append(row)
    return rows


def adamw_rates(is_dry: bool) -> list[dict[str, Any]]:
    """Measure the update of split masters by threads, in parameters/s and bytes/s of host memory."""
    import torch

    from megatrain.optim.adamw.host import AdamWStep, Planes, update_many
    from megatrain.optim.pool import WorkerPool
    from megatrain.optim.threads import worker_threads
    from megatrain.store.arena import Arena

    numel = 1 << 18 if is_dry else 1 << 28

    def plane(dtype: torch.dtype, value: float) -> Any:
        return Arena(numel * dtype.itemsize).view(dtype, 0, numel).fill_(value)

    planes = Planes(
        working=plane(torch.bfloat16, 0.02),
        remainder=plane(torch.int16, 0),
        exp_avg=plane(torch.float32, 0.0),
        exp_avg_sq=plane(torch.float32, 0.0),
        gradient=plane(torch.bfloat16, 1e-3),
    )
    hyper = AdamWStep(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    rows = []
    for threads in (1, 2) if is_dry else (4, 8, 12, 16):
        pool = WorkerPool(threads)
        seconds = best_s(torch.device("cpu"), lambda: update_many(pool, [(hyper, planes)]), repeats=3)  # noqa: B023
        pool.close()
        rows.append(
            {
                "threads": threads,
                "cores": worker_threads(),
                "parameters_per_s": numel / seconds,
                "bytes_per_s": ADAMW_BYTES * numel / seconds,
            }
        )
    return rows


def copy_across_pieces() -> str:
    """Say whether one copy may cross the border of two ranges that were locked one after the other."""
    import torch

    from megatrain.store.arena import Arena

    piece, cudart = 64 << 20, torch.cuda.cudart()
    arena = Arena(2 * piece)
    flat = arena.view(torch.uint8, 0, arena.nbytes)
    flat.copy_(torch.arange(arena.nbytes, dtype=torch.int64).to(torch.uint8))
    addresses = [flat.data_ptr(), flat.data_ptr() + piece]
    codes = [int(cudart.cudaHostRegister(address, piece, 0)) for address in addresses]
    if any(codes):
        return f"the driver refuses to lock: {codes}"
    part = flat[piece - 4096 : piece + 4096]
    try:
        back = part.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        return "equal" if torch.equal(back.cpu(), part) else "WRONG BYTES"
    except RuntimeError as error:
        return f"refused: {error}"[:300]
    finally:
        for address in addresses:
            cudart.cudaHostUnregister(address)
