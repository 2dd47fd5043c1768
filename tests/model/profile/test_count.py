"""A model's anatomy: what is counted equals what a real run does, for published configurations too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from megatrain.errors import ConfigError, ModelError
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy
from megatrain.model.text_config import build_language_model
from tests.families import FAMILIES
from tests.reference import make_model

SHARED = Path(__file__).parents[4] / "shared/data"
COUNTED = re.compile(r"^- (\S+) \| \w+ \| ([0-9.]+) \| ")
GIB = 2**30


def published() -> dict[str, float]:
    """Read the published configurations' names and their parameters in billions, counted elsewhere."""
    if not (SHARED / "configs").is_dir():
        pytest.skip("needs configs and SOURCES.md in shared/data next to the repository")
    lines = (SHARED / "SOURCES.md").read_text().splitlines()
    return {found[1]: float(found[2]) for line in lines if (found := COUNTED.match(line))}


def read(name: str) -> PretrainedConfig:
    return AutoConfig.from_pretrained(SHARED / "configs" / name)


def small_llama(**changes: int) -> LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, **changes}, tie_word_embeddings=False)


def test_published_configurations_have_their_parameters() -> None:
    names = published()
    assert len(names) == 27
    for name, billions in names.items():
        built = build_language_model(read(name), dtype=torch.bfloat16)
        assert round(built.num_params / 1e9, 3) == pytest.approx(billions, abs=0.0011), name
        assert bool(built.part) == (name in ("gemma-3-27b-it", "Qwen2.5-VL-7B")), name


@pytest.mark.parity
def test_every_published_configuration_is_counted() -> None:
    for name, billions in published().items():
        anatomy = count_anatomy(read(name), micro_batch_size=1, seq_len=4096, precision="bf16")
        check_is_sound(anatomy)
        assert anatomy.num_params == pytest.approx(billions * 1e9, rel=0.006), name


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-VL-7B", "Qwen3-30B-A3B"])
def test_a_published_configuration_is_counted(name: str) -> None:
    published()
    anatomy = count_anatomy(read(name), micro_batch_size=1, seq_len=4096, precision="bf16")
    check_is_sound(anatomy)
    assert (anatomy.part == "language tower (text_config)") == ("VL" in name)
    if name == "Qwen3-30B-A3B":
        assert 3.2e9 < anatomy.num_active_params < 3.5e9


def check_is_sound(anatomy: Anatomy) -> None:
    """Check what holds for every model."""
    own = sum(layer.num_params for layer in anatomy.layers) + sum(f.num_params for f in anatomy.outer)
    assert own == anatomy.num_params or anatomy.part
    assert anatomy.num_trained == own
    assert anatomy.num_active_params <= anatomy.num_params
    assert 10 * own * 0.999 <= anatomy.checkpoint_bytes - 2 * own <= 10 * own * 1.01
    for layer in anatomy.layers:
        saved = layer.saved_bytes
        assert saved["keep"] > saved["recompute_cheap"] > saved["recompute"] > saved["drop_boundary"] == 0
        assert 0 <= saved["recompute"] - layer.boundary_bytes < 256
        assert layer.boundary_bytes % (2 * anatomy.tokens) == 0
        assert layer.forward.matmul_flops > 0
        assert layer.backward.matmul_flops == pytest.approx(2 * layer.forward.matmul_flops)
        assert sum(f.forward.num_operations for f in layer.fragments) == layer.forward.num_operations
        for policy in saved:
            assert layer.fragment_peak_bytes[policy] <= layer.backward_peak_bytes[policy]


def test_flops_are_those_of_a_real_run() -> None:
    config = small_llama()
    anatomy = count_anatomy(config, micro_batch_size=2, seq_len=32, precision="fp32", device_type="cpu")
    model = make_model(config)
    ids = torch.zeros((2, 32), dtype=torch.int64)
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    head = anatomy.head_forward.matmul_flops
    assert sum(layer.forward.matmul_flops for layer in anatomy.layers) + head == forward.get_total_flops()
    counted = sum(layer.backward.matmul_flops for layer in anatomy.layers) + 2 * head
    assert counted == backward.get_total_flops()
    attention = 2 * 4 * 32 * 32 * 64 / 2  # rows; 2 products of 2 FLOPs; queries; keys; width; causal
    assert anatomy.layers[0].forward.attention_flops == attention
    assert anatomy.layers[0].backward.attention_flops == 2.5 * attention


def test_a_long_row_takes_no_square_of_its_length() -> None:
    short, long = (
        count_anatomy(
            small_llama(max_position_embeddings=1 << 19, vocab_size=32_000),
            micro_batch_size=1,
            seq_len=length,
            precision="bf16",
        )
        for length in (1 << 14, 1 << 19)
    )
    for policy in ("keep", "recompute_cheap", "recompute"):
        assert long.layers[0].saved_bytes[policy] == pytest.approx(
            32 * short.layers[0].saved_bytes[policy], rel=1e-3
        )
    assert (
        long.layers[0].backward_peak_bytes["recompute"]
        < 40 * short.layers[0].backward_peak_bytes["recompute"]
    )
    assert long.head_saved_bytes < GIB, "the head is computed in chunks"
    assert long.head_forward.matmul_flops == pytest.approx(32 * short.head_forward.matmul_flops)


def test_whole_attention_matrices_are_counted_where_the_model_makes_them() -> None:
    counted = {
        implementation: count_anatomy(
            small_llama(),
            micro_batch_size=1,
            seq_len=512,
            precision="fp32",
            attn_implementation=implementation,
        )
        for implementation in ("sdpa", "eager")
    }
    matrix = 4 * 512 * 512 * 4
    saved = {name: anatomy.layers[0].saved_bytes["keep"] for name, anatomy in counted.items()}
    assert saved["eager"] - saved["sdpa"] > matrix
    assert counted["eager"].constant_bytes - counted["sdpa"].constant_bytes == 512 * 512 * 4  # the mask


def test_layers_of_other_kinds_are_counted_apart() -> None:
    config = FAMILIES["qwen3_moe"]()
    config.output_router_logits = False
    anatomy = count_anatomy(config, micro_batch_size=1, seq_len=64, precision="fp32")
    dense, routed = anatomy.layers[1], anatomy.layers[0]
    assert anatomy.layers[2].saved_bytes == routed.saved_bytes
    assert dense.saved_bytes["keep"] != routed.saved_bytes["keep"]
    assert routed.forward.num_operations > dense.forward.num_operations


def test_dropout_is_no_reason_for_whole_matrices_on_an_accelerator() -> None:
    config = FAMILIES["gpt2"]()
    config.attn_pdrop = 0.1
    config.n_positions = 1024
    saved = {
        device: count_anatomy(config, micro_batch_size=1, seq_len=1024, precision="fp32", device_type=device)
        .layers[0]
        .saved_bytes["keep"]
        for device in ("cpu", "cuda")
    }
    assert saved["cpu"] > saved["cuda"] + 4 * 1024 * 1024 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 0}, "both must be 1 or more"),
        ({"micro_batch_size": -1}, "both must be 1 or more"),
        ({"precision": "fp16"}, "use fp32 or bf16"),
    ],
)
def test_a_shape_that_there_is_not_is_refused(changes: dict[str, object], words: str) -> None:
    settings: dict[str, object] = {"micro_batch_size": 1, "seq_len": 8, "precision": "fp32", **changes}
    with pytest.raises(ConfigError, match=words):
        count_anatomy(small_llama(), **settings)  # type: ignore[arg-type]


def test_a_model_that_decides_by_values_is_refused() -> None:
    config = FAMILIES["qwen3_moe"]()
    config._experts_implementation = "eager"  # a loop over the experts that tokens have chosen
    with pytest.raises(ModelError, match="cannot be counted"):
        count_anatomy(config, micro_batch_size=1, seq_len=16, precision="fp32")
