"""The runs of `same_bits.py` and `step_cpu_time.py`: plain data, in which no setting is left to a default.

`RUNS` attach an engine. `COMMANDS` are `megatrain train` on two ranks: what is decided there, and is not in
their settings, changes no bit.
"""

from __future__ import annotations

from typing import Any

Run = dict[str, Any]

_TOKENS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SHAPE = {**_TOKENS, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
          "max_position_embeddings": 128}  # fmt: skip
_GROUPED = {**_SHAPE, "num_key_value_heads": 2, "intermediate_size": 96}
_EXPERTS = {**_GROUPED, "output_router_logits": True, "router_aux_loss_coef": 0.05, "num_experts_per_tok": 2}

LLAMA = {"model_type": "llama", **_GROUPED, "tie_word_embeddings": True, "attention_bias": True}
QWEN2 = {"model_type": "qwen2", **_GROUPED, "use_sliding_window": True, "sliding_window": 16,
         "max_window_layers": 2}  # fmt: skip
GEMMA2 = {"model_type": "gemma2", **_GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16,
          "sliding_window": 16}  # fmt: skip
MIXTRAL = {"model_type": "mixtral", **_EXPERTS, "num_local_experts": 4, "sliding_window": 16}
QWEN3_MOE = {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 16, "moe_intermediate_size": 32,
             "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 128, "n_embd": 64, "n_layer": 4, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
NEOX = {"model_type": "gpt_neox", **_SHAPE, "intermediate_size": 96, "tie_word_embeddings": False}
MAMBA2 = {"model_type": "mamba2", **_TOKENS, "hidden_size": 64, "num_hidden_layers": 4, "state_size": 16,
          "num_heads": 8, "head_dim": 16, "expand": 2, "n_groups": 2, "chunk_size": 16}  # fmt: skip

_IN_RAM: Run = {"drives": 0, "ram": None, "tiers": [], "blocks_in_ram": 0, "weights_in_ram": 0}


def _on_drives(num_drives: int, ram: int, planes: list[str], *, blocks: int, weights: int) -> Run:
    """Spell out where state is: so many bytes of RAM give the numbers of blocks and of weights in RAM."""
    tiers = [[plane, "nvme"] for plane in planes]
    return {
        "drives": num_drives,
        "ram": ram,
        "tiers": tiers,
        "blocks_in_ram": blocks,
        "weights_in_ram": weights,
    }


def _run(
    config: dict[str, Any],
    precision: str,
    updates: str,
    activations: list[str],
    *,
    micro_batches: int = 1,
    lockstep: int = 1,
    slots: int = 2,
    gradient_buffers: int = 2,
    boundaries: str = "device",
    fragments: bool = False,
    expert_chunks: int = 1,
    resident_layers: int = 0,
    outer_resident: bool = False,
    gradients: str = "host",
    head_chunk_tokens: int | None = None,
    moments: str = "fp32",
    device: str = "cpu",
    max_grad_norm: float | None = 0.5,
    place: Run | None = None,
) -> Run:
    """Spell a run out: what has a default here is written into every run."""
    place = place or _IN_RAM
    return {
        "config": config,
        "steps": 3,
        "rows": 2,
        "tokens": 64,
        "drives": place["drives"],
        "ram": place["ram"],
        "attach": {
            "device": device,
            "precision": precision,
            "num_micro_batches": micro_batches,
            "micro_batch_size": None,
            "compile": "off",
            "host_limit": None,
            "device_limit": None,
            "optimizer_state": moments,
        },
        "choice": {
            "num_slots": slots,
            "num_gradient_buffers": gradient_buffers,
            "activations": activations,
            "boundaries": boundaries,
            "fragments": fragments,
            "expert_chunks": expert_chunks,
            "resident_layers": resident_layers,
            "outer_resident": outer_resident,
            "outer_streams": False,
            "mirror_resident": True,
            "lockstep": lockstep,
            "updates": updates,
            "gradients": gradients,
            "sums": "device",
            "tiers": place["tiers"],
            "blocks_in_ram": place["blocks_in_ram"],
            "weights_in_ram": place["weights_in_ram"],
            "head_chunk_tokens": head_chunk_tokens,
        },
        "adamw": {
            "lr": 1e-2,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
            "max_grad_norm": max_grad_norm,
            "no_decay": None,
            "updates": updates,
            "state": moments,
            "seed": 0,
        },
    }


RUNS: dict[str, Run] = {
    "llama fp32 deferred recompute": _run(LLAMA, "fp32", "deferred", ["recompute"] * 4),
    "mamba2 fp32 deferred, one slot": _run(MAMBA2, "fp32", "deferred", ["recompute"] * 4, slots=1),
    "gpt2 bf16 immediate keep, dropout": _run(
        GPT2, "bf16", "immediate", ["keep"] * 4, micro_batches=2, max_grad_norm=None
    ),
    "gemma2 fp32 serial offload, lockstep": _run(
        GEMMA2, "fp32", "serial", ["offload"] * 4, micro_batches=3, lockstep=3, boundaries="host"
    ),
    "llama bf16 deferred, a policy per layer, resident": _run(
        LLAMA,
        "bf16",
        "deferred",
        ["recompute", "drop_boundary", "offload", "keep"],
        micro_batches=2,
        boundaries="host",
        resident_layers=1,
        gradients="device",
    ),
    "qwen3_moe fp32 deferred cheap, fragments, rounds": _run(
        QWEN3_MOE,
        "fp32",
        "deferred",
        ["recompute_cheap"] * 4,
        micro_batches=4,
        lockstep=2,
        slots=4,
        gradient_buffers=4,
        fragments=True,
    ),
    "mixtral bf16 deferred, all resident": _run(
        MIXTRAL, "bf16", "deferred", ["recompute"] * 4, resident_layers=4, outer_resident=True
    ),
    "qwen3_moe bf16 deferred emulated, chunked head": _run(
        QWEN3_MOE,
        "bf16",
        "deferred",
        ["recompute"] * 4,
        micro_batches=2,
        lockstep=2,
        slots=3,
        gradient_buffers=3,
        boundaries="host",
        fragments=True,
        head_chunk_tokens=32,
        device="emulated",
    ),
    "llama bf16 deferred checked, int8 moments": _run(
        LLAMA, "bf16", "deferred", ["recompute"] * 4, moments="int8", device="checked"
    ),
    "qwen2 bf16 deferred, state on two drives": _run(
        {**QWEN2, "num_hidden_layers": 12},
        "bf16",
        "deferred",
        ["recompute"] * 12,
        place=_on_drives(2, 3_550_000, ["remainder", "moments"], blocks=3, weights=0),
    ),
    "llama fp32 immediate offload, all on a drive": _run(
        {**LLAMA, "num_hidden_layers": 12},
        "fp32",
        "immediate",
        ["offload"] * 12,
        boundaries="nvme",
        max_grad_norm=None,
        place=_on_drives(1, 2_320_000, ["remainder", "moments", "working"], blocks=0, weights=3),
    ),
    "gpt_neox bf16 serial, fragments, rounds, on a drive": _run(
        {**NEOX, "num_hidden_layers": 12},
        "bf16",
        "serial",
        ["recompute"] * 12,
        micro_batches=4,
        lockstep=2,
        slots=3,
        gradient_buffers=3,
        boundaries="nvme",
        fragments=True,
        place=_on_drives(1, 3_250_000, ["remainder", "moments", "working"], blocks=0, weights=13),
    ),
}


def _command(
    config: dict[str, Any],
    precision: str,
    *,
    micro_batches: int = 4,
    shards: int = 2,
    gather: str = "on",
    device: str = "cpu",
    moments: str = "fp32",
    max_grad_norm: float | None = 0.5,
    memory: Run | None = None,
    **sections: Run,
) -> Run:
    """Spell out a run of `megatrain train` on two ranks."""
    return {
        "config": {**config, "vocab_size": 260, "bos_token_id": 256, "eos_token_id": 257},
        "ranks": 2,
        "settings": {
            "model": {"path": "model", "init": "pretrained"},
            "data": {"path": "pairs.jsonl" if "preference" in sections else "text.txt", "seq_len": 64,
                     "cache": "cache", "val_size": 4},
            "train": {"steps": 3, "micro_batch_size": 2, "grad_accumulation": micro_batches, "device": device,
                      "precision": precision, "seed": 0, "compile": "off",
                      "loss": "dpo" if "preference" in sections else "sft"},
            "optim": {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "warmup_steps": 1,
                      "max_grad_norm": max_grad_norm, "state": moments,
                      "updates": "deferred" if max_grad_norm else "immediate"},
            "memory": {"num_slots": 2, "num_gradient_buffers": 2, "activations": "recompute",
                       "boundaries": "device", "fragments": False, "expert_chunks": 1,
                       "resident_blocks": 0, "lockstep": 1,
                       "gradients": "host", "sums": "device", **(memory or {})},
            "parallel": {"shards": shards, "gather": gather},
            "checkpoint": {"every": 2},
            "eval": {"every": 2},
            "log": {"progress": "none", "report": False},
            "out": "run",
            **sections,
        },
    }  # fmt: skip


_LARGE = {**QWEN2, "num_hidden_layers": 8, "use_sliding_window": False}
COMMANDS: dict[str, Run] = {
    "two ranks: llama bf16, moments in bf16, rounds": _command(
        LLAMA, "bf16", micro_batches=8, shards=4, moments="bf16", memory={"lockstep": 2}
    ),
    "two ranks: qwen3_moe fp32 offload, fragments, emulated": _command(
        QWEN3_MOE,
        "fp32",
        device="emulated",
        memory={"activations": "offload", "fragments": True, "num_slots": 3, "num_gradient_buffers": 3},
    ),
    "two ranks: qwen2 bf16, state on two drives": _command(
        _LARGE, "bf16", memory={"tiers": {"ram": 7_760_000, "nvme": ["drive0", "drive1"]}, "commit_every": 1}
    ),
    "two ranks: llama bf16, pairs (DPO)": _command(LLAMA, "bf16", preference={"beta": 0.1}),
    "two ranks: gpt2 bf16 immediate keep, dropout, int8": _command(
        GPT2, "bf16", gather="off", moments="int8", max_grad_norm=None, memory={"activations": "keep"}
    ),
    "two ranks: llama fp32, rows shared out, resident": _command(
        LLAMA, "fp32", shards=1, device="emulated", memory={"resident_blocks": 2}
    ),
}
COMMANDS["two ranks: llama fp32, rows shared out, resident"]["settings"]["parallel"]["sequence"] = 2
