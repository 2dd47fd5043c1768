"""The attention that a run takes when it is told nothing, in bf16 with heads of 128: cuDNN or flash on CUDA.

The step `parity` runs with math attention, so that it can ask for equal bits. Here the kernels are those of a
run: two streamed steps from the same state are compared with each other, and with the resident model. They
must be within `TOLERANCES`; where `deterministic` is asked for, the two streamed steps must be equal bit for
bit. By default they need not be: flash adds up the gradient of its queries in the order in which blocks end.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from benchmarks.gpu.correctness import HYPER, TOLERANCES, difference
from benchmarks.gpu.run import Record, device_of

SEQ_LENS = (1024, 8192)
DRY_SEQ_LENS = (32, 48)
HEAD_DIM = 128


def attention(record: Record, is_dry: bool) -> None:
    """Compare the default attention and the deterministic one, at each length."""
    failures = []
    for seq_len, is_deterministic in itertools.product(DRY_SEQ_LENS if is_dry else SEQ_LENS, (False, True)):
        row = compare_attention(
            device_of(is_dry),
            seq_len=seq_len,
            is_deterministic=is_deterministic,
            num_heads=2 if is_dry else 4,
        )
        record.append("cases", row)
        failures += [] if row["is_ok"] else [row]
    assert not failures, f"{len(failures)} cases of attention differ, the first: {failures[0]}"


def compare_attention(
    device: Any, *, seq_len: int, is_deterministic: bool, num_heads: int = 4
) -> dict[str, Any]:
    """Train a step of two layers twice streamed and once resident; returns the kernel and what differs.

    Args:
        device: Where.
        seq_len: Tokens of a row; there are two micro-batches of one row.
        is_deterministic: As in `attach`.
        num_heads: Of queries; half as many of keys.
    """
    from megatrain.stream.forward.attention import chosen_kernels
    from tests.reference import Resident, make_batches

    batches = make_batches(2, rows=1, tokens=seq_len)
    model = model_of(seq_len, num_heads)
    reference = Resident(model, precision="bf16", **HYPER)
    once, again = (streamed(copy.deepcopy(model), device, batches, is_deterministic) for _ in range(2))
    reference.to(device)
    there = [{key: value.to(device) for key, value in batch.items()} for batch in batches]
    with chosen_kernels(reference.model, device, repeats=is_deterministic):
        kernel = kernel_of(device, seq_len, num_heads)
        loss = reference.forward_backward(there)
    resident = {"loss": loss.cpu(), **{name: value.cpu() for name, value in reference.sums.items()}}
    assert once.keys() == again.keys() == resident.keys()
    repeated = max(difference(again[name], value) for name, value in once.items())
    apart = max(difference(value, resident[name]) for name, value in once.items())
    return {
        "seq_len": seq_len,
        "head_dim": HEAD_DIM,
        "is_deterministic": is_deterministic,
        "kernel": kernel,
        "is_repeated": repeated == 0.0,
        "largest_difference_when_repeated": repeated,
        "is_bitwise": apart == 0.0,
        "largest_difference_to_resident": apart,
        "is_ok": max(apart, repeated) <= TOLERANCES["bf16"] and (repeated == 0.0 or not is_deterministic),
    }


def model_of(seq_len: int, num_heads: int) -> Any:
    """Make the model."""
    import torch
    from transformers import LlamaConfig

    from tests.families import VOCAB_SIZE
    from tests.reference import make_model

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=num_heads * HEAD_DIM,
        intermediate_size=num_heads * HEAD_DIM,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=seq_len,
        tie_word_embeddings=False,
    )
    return make_model(config, dtype=torch.bfloat16)


def streamed(model: Any, device: Any, batches: Any, is_deterministic: bool) -> dict[str, Any]:
    """Return the loss and the gradients of a streamed step."""
    from tests.reference import attach_plainly

    engine = attach_plainly(
        model,
        device=device,
        precision="bf16",
        activations="recompute",
        num_micro_batches=len(batches),
        compile="off",
        deterministic=is_deterministic,
    )
    loss = engine.forward_backward(batches).cpu()
    found = {"loss": loss, **{name: value.clone() for name, value in engine.named_gradients()}}
    engine.detach()
    return found


def kernel_of(device: Any, seq_len: int, num_heads: int) -> str:
    """Return the name of the kernel that torch takes for the model's attention."""
    import torch
    from torch.nn.attention import SDPBackend

    query, key, value = (
        torch.empty(1, heads, seq_len, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (num_heads, num_heads // 2, num_heads // 2)
    )
    try:
        number = torch._fused_sdp_choice(query, key, value, is_causal=True, enable_gqa=True)
    except RuntimeError:  # a kind of device of which torch cannot tell
        return "not told"
    return str(SDPBackend(number).name)
