"""Anatomies in closed form, for tests of the planner: a Llama-like model, dense or of experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatrain.config.optimizers.optimizer import num_scales
from megatrain.config.policies import POLICIES
from megatrain.hardware import Drives, HardwareSpec, MemoryNode
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, Fragment, Layer
from megatrain.model.profile.cost import Cost

_ALIGNED = 64


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a Llama-like model; `num_experts` makes its mlp so many, of which `num_active` take a token."""

    num_layers: int = 4
    hidden: int = 256
    inner: int = 768
    vocab: int = 1024
    num_experts: int = 1
    num_active: int = 1


def llama_like(
    shape: Shape = Shape(),
    *,
    micro_batch_size: int = 1,
    seq_len: int = 1024,
    precision: str = "bf16",
) -> Anatomy:
    """Return the anatomy that arithmetic gives, with attention that makes no square matrix."""
    tokens, hidden, inner = micro_batch_size * seq_len, shape.hidden, shape.inner
    wide = 2 if precision == "bf16" else 4
    attention = _fragment("attention", 4 * hidden * hidden + hidden, wide, precision)
    mlp_params = 3 * hidden * inner * shape.num_experts + hidden
    mlp = _fragment("experts" if shape.num_experts > 1 else "mlp", mlp_params, wide, precision)
    active = 4 * hidden * hidden + 3 * hidden * inner * shape.num_active + 2 * hidden
    forward = Cost(
        matmul_flops=2.0 * tokens * active,
        attention_flops=2.0 * tokens * seq_len * hidden,
        moved_bytes=16.0 * tokens * hidden * wide,
        num_operations=20,
    )
    backward = Cost(
        matmul_flops=2 * forward.matmul_flops,
        attention_flops=2.5 * forward.attention_flops,
        moved_bytes=2 * forward.moved_bytes,
        num_operations=40,
    )
    boundary = tokens * hidden * wide
    kept = tokens * (10 * hidden + 3 * inner * shape.num_active) * wide
    cheap = tokens * (5 * hidden + 2 * inner * shape.num_active) * wide
    gradients = wide * (attention.num_params + mlp.num_params)
    most = wide * max(attention.num_params, mlp.num_params)
    attended = boundary + tokens * hidden * wide  # the input, and what attention returns
    remade = {
        "keep": 0,
        "offload": kept,
        "recompute_cheap": kept - cheap,
        "keep_attention": kept - attended,
    }
    working = {policy: 4 * boundary + remade.get(policy, kept) for policy in POLICIES}
    saved = {
        "keep": kept,
        "offload": kept,
        "recompute_cheap": cheap,
        "keep_attention": attended,
        "recompute": boundary,
        "drop_boundary": 0,
    }
    layers = tuple(
        Layer(
            fragments=(
                _renamed(attention, f"model.layers.{number}.self_attn"),
                _renamed(mlp, f"model.layers.{number}.mlp"),
            ),
            forward=forward,
            backward=backward,
            boundary_bytes=boundary,
            saved_bytes=saved,
            forward_peak_bytes=dict.fromkeys(POLICIES, 3 * boundary),
            backward_peak_bytes={policy: gradients + nbytes for policy, nbytes in working.items()},
            fragment_peak_bytes={policy: most + nbytes for policy, nbytes in working.items()},
            holds_input=dict.fromkeys(POLICIES, True),
            rerun_peak_bytes=3 * boundary,
            collect_bytes={
                policy: tuple(
                    2 * boundary + saved[policy] + wide * params
                    for params in (
                        attention.num_params,
                        mlp.num_params,
                        attention.num_params + mlp.num_params,
                    )
                )
                for policy in POLICIES
            },
            offload_copied_bytes=kept,
            largest_run=attention.largest_run + mlp.largest_run,
            made_bytes=(gradients + 2 * kept, most + 2 * kept),
        )
        for number in range(shape.num_layers)
    )
    outer = (
        _renamed(_fragment("embedding", shape.vocab * hidden, wide, precision), "model.embed_tokens"),
        _renamed(_fragment("other", hidden, wide, precision), "model.norm"),
        _renamed(_fragment("head", shape.vocab * hidden, wide, precision), "lm_head"),
    )
    fragments = [fragment for layer in layers for fragment in layer.fragments] + list(outer)
    num_params = sum(fragment.num_params for fragment in fragments)
    num_active = shape.num_layers * active + 2 * shape.vocab * hidden + hidden
    head_flops = 2.0 * tokens * shape.vocab * hidden
    flops = 3 * (
        shape.num_layers * (forward.matmul_flops + forward.attention_flops) + head_flops
    )  # of a micro-batch
    chunk = min(tokens, 4096)
    return Anatomy(
        model_type="llama",
        precision=precision,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        layers=layers,
        outer=outer,
        num_params=num_params,
        num_active_params=num_active,
        num_trained=num_params,
        model_flops_per_token=flops / tokens,
        head_forward=Cost(matmul_flops=head_flops, moved_bytes=8.0 * tokens * shape.vocab, num_operations=4),
        head_backward=Cost(
            matmul_flops=2 * head_flops, moved_bytes=16.0 * tokens * shape.vocab, num_operations=8
        ),
        head_has_kernel=False,
        constant_bytes=tokens * 64,
        checkpoint_bytes=12 * num_params,
        pass_bytes=tokens * 48,
        graph_bytes=tokens * 48,
        head_forward_peak_bytes=chunk * shape.vocab * 4,
        head_backward_peak_bytes=chunk * shape.vocab * 8,
        head_gradient_bytes=boundary,
        embedding_peak_bytes=boundary,
    )


def _fragment(kind: str, num_params: int, wide: int, precision: str) -> Fragment:
    padded = -(-num_params // _ALIGNED) * _ALIGNED
    return Fragment(
        name="",
        kind=kind,
        num_params=num_params,
        sizes=BlockBytes(
            working_bytes=padded * wide,
            num_split=padded if precision == "bf16" else 0,
            num_state=padded,
            num_scales=num_scales(padded),
        ),
    )


def _renamed(fragment: Fragment, name: str) -> Fragment:
    return replace(fragment, name=name)


def machine(
    *,
    device_bytes: int | None = 1 << 30,
    host_bytes: int = 64 << 30,
    flops: float = 1e12,
    link: float = 1e9,
    update_rate: float = 1e8,
    both_share: float = 1.0,
    device: str = "imagined",
    drives: Drives | None = None,
    launch_s: float = 0.0,
    host_rate: float = 1e15,
) -> HardwareSpec:
    """Return a machine whose rates are easy to reckon with."""
    return HardwareSpec(
        name="imagined",
        device=device,
        device_bytes=device_bytes,
        matmul_flops_per_s={"bf16": flops, "fp32": flops / 4},
        attention_flops_per_s={"bf16": flops / 2, "fp32": flops / 8},
        device_bytes_per_s=flops / 100,
        h2d_bytes_per_s=link,
        d2h_bytes_per_s=link,
        both_share=both_share,
        memory=(MemoryNode(nbytes=host_bytes, bytes_per_s=host_rate),),
        update_params_per_s={1: update_rate},
        num_cores=4,
        drives=drives,
        device_watts=400.0,
        host_watts=100.0,
        launch_s=launch_s,
    )
