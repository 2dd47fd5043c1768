"""What compiled layers keep: the count against the tensors that compiled code hands to its backward."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy, count_sizes
from megatrain.model.profile.kept import anatomy_json, read_anatomy
from tests.families import FAMILIES
from tests.reference import make_model

ROWS, TOKENS = 2, 128


def config_of(family: str) -> PreTrainedConfig:
    """Make layers so wide that what is kept per token outweighs what is kept once."""
    config = FAMILIES[family]()
    config.hidden_size, config.intermediate_size, config.head_dim = 128, 256, 32
    return config


def count(family: str, **changes: Any) -> Anatomy:
    shape: dict[str, Any] = {
        "micro_batch_size": ROWS,
        "seq_len": TOKENS,
        "precision": "fp32",
        "compiles": True,
    }
    return count_anatomy(config_of(family), **shape | changes)


def really_kept(family: str, *, with_kernels: bool) -> int:
    """Return the bytes that a compiled first layer keeps, parameters and rotary tables left out.

    Without kernels, inductor does all up to the partitioning of the graph, and the parts run as they are.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch._inductor.compile_fx import compile_fx
    model = make_model(config_of(family)).train()
    layer: Any = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)[0]
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, TOKENS, 128, requires_grad=True)
    positions = torch.arange(TOKENS)[None]
    tables = model.model.rotary_emb(hidden, positions)
    options: dict[str, Any] = {} if with_kernels else {"inner_compile": lambda graph, *_, **__: graph}

    def lower(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, config_patches={"deterministic": True}, **options)

    def forward(hidden: Tensor) -> Any:
        return layer(hidden, position_embeddings=tables, attention_mask=None)

    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    run: Any = torch.compile(forward, backend=lower, dynamic=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(hidden)
    others = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), *tables)}
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(nbytes for place, nbytes in sizes.items() if place not in others)


@pytest.mark.parametrize(
    ("family", "with_kernels"),
    [
        ("llama", False),
        pytest.param("qwen3", False, marks=pytest.mark.parity),
        ("gemma2", False),
        *(pytest.param(family, True, marks=pytest.mark.parity) for family in ("llama", "qwen3", "gemma2")),
    ],
)
def test_count_is_what_compiled_code_keeps(family: str, with_kernels: bool) -> None:
    layer = count(family).layers[0]
    assert layer.compiled is not None
    assert really_kept(family, with_kernels=with_kernels) == pytest.approx(
        layer.compiled.saved_bytes, rel=0.03
    )
    assert layer.compiled.saved_bytes < 0.8 * layer.saved_bytes["keep"]
    assert layer.compiled.holds_input


def test_several_sizes_are_counted_at_once() -> None:
    together = count_sizes(
        config_of("llama"), sizes=(2, 4, 8), seq_len=TOKENS, precision="fp32", compiles=True
    )
    for size, anatomy in zip((2, 4, 8), together, strict=True):
        assert anatomy.layers[0].compiled == count("llama", micro_batch_size=size).layers[0].compiled


def test_layers_that_come_in_fragments_are_counted_as_before() -> None:
    """And what is taken off between the passes is still there while a layer's own backward runs."""
    anatomy = count("llama")
    assert anatomy.as_compiled is anatomy.as_compiled.as_compiled
    assert (
        anatomy.layers_of(fragments=False) == anatomy.layers == anatomy.as_compiled.layers_of(fragments=True)
    )
    before, after = anatomy.layers[0], anatomy.as_compiled.layers_of(fragments=False)[0]
    assert before.compiled is not None
    assert after.saved_bytes["keep"] == before.compiled.saved_bytes < before.saved_bytes["keep"]
    assert after.saved_bytes["recompute"] == before.saved_bytes["recompute"]
    for policy in ("keep", "offload"):
        alive = before.saved_bytes["keep"] + before.backward_peak_bytes[policy]
        assert after.saved_bytes["keep"] + after.backward_peak_bytes[policy] == alive
    assert after.backward_peak_bytes["recompute"] == before.backward_peak_bytes["recompute"]
    left = after.offload_left_bytes + after.offload_copied_bytes
    assert left == after.saved_bytes["keep"], "what does not leave stays"


def test_a_layer_that_would_keep_more_keeps_what_its_operations_do() -> None:
    layer = count("llama").layers[0]
    assert layer.compiled is not None
    more = replace(layer, compiled=replace(layer.compiled, saved_bytes=layer.saved_bytes["keep"] + 1))
    assert more.as_compiled() is more


def test_a_layer_that_cannot_be_traced_is_said() -> None:
    anatomy = count("mixtral")  # no grouped products in fp32 without tensors
    (warning,) = [warning for warning in anatomy.warnings if "compiled" in warning]
    assert warning.startswith("what compiled layers of MixtralDecoderLayer keep is not known (")
    assert all(layer.compiled is None for layer in anatomy.layers)
    assert count("mixtral", precision="bf16").layers[0].compiled is not None


def test_counts_on_disk_have_it() -> None:
    anatomy = count("llama")
    assert read_anatomy(anatomy_json(anatomy)).layers == anatomy.layers
