"""A model's anatomy: what is counted equals what a real run does, for published configurations too."""

from __future__ import annotations

import re
import types
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from megatrain.config.attention import VARLEN
from megatrain.errors import ConfigError, ModelError
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.count import count_anatomy, count_model
from megatrain.model.profile.counter import LossKind
from megatrain.model.weights.skeleton import build_skeleton, num_parameters
from tests.families import FAMILIES
from tests.kinds import tiny_config
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


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.parity)])
def test_published_configurations_have_their_parameters(each: int) -> None:
    names = published()
    assert len(names) == 27
    del names["Qwen2.5-VL-7B"]  # refused
    for name, billions in list(names.items())[::each]:
        model = build_skeleton(read(name), dtype=torch.bfloat16)
        assert round(num_parameters(model) / 1e9, 3) == pytest.approx(billions, abs=0.0011), name


@pytest.mark.parity
def test_every_published_configuration_is_counted() -> None:
    names = published()
    del names["Qwen2.5-VL-7B"]  # refused
    for name, billions in names.items():
        anatomy = count_anatomy(read(name), micro_batch_size=1, seq_len=4096, precision="bf16")
        check_is_sound(anatomy)
        assert anatomy.num_params == pytest.approx(billions * 1e9, rel=0.006), name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gemma-3-27b-it", "Qwen3-30B-A3B"])
def test_a_published_configuration_is_counted(name: str) -> None:
    published()
    anatomy = count_anatomy(read(name), micro_batch_size=1, seq_len=4096, precision="bf16")
    check_is_sound(anatomy)
    tower = 423_060_336 if name == "gemma-3-27b-it" else 0
    assert anatomy.num_trained == anatomy.num_params - tower
    if name == "Qwen3-30B-A3B":
        assert 3.2e9 < anatomy.num_active_params < 3.5e9
        assert {layer.route_bytes for layer in anatomy.layers} == {4 * 8 * 4096}, "of eight experts"


def check_is_sound(anatomy: Anatomy) -> None:
    """Check what holds for every model."""
    own = sum(layer.num_params for layer in anatomy.layers) + sum(f.num_params for f in anatomy.outer)
    assert own == anatomy.num_params
    trained = anatomy.num_trained
    assert anatomy.num_active_params <= anatomy.num_params
    assert 10 * trained * 0.999 <= anatomy.checkpoint_bytes - 2 * own <= 10 * trained * 1.01
    for layer in anatomy.layers:
        saved = layer.saved_bytes
        assert saved["keep"] > saved["recompute_cheap"] > saved["recompute"] > saved["drop_boundary"]
        assert saved["drop_boundary"] == layer.route_bytes
        assert saved["recompute_cheap"] > saved["keep_attention"] >= saved["recompute"]
        assert 0 <= saved["recompute"] - layer.boundary_bytes - layer.route_bytes < 256
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
    head = anatomy.head_backward.matmul_flops
    counted = sum(layer.backward.matmul_flops for layer in anatomy.layers) + head
    assert counted == backward.get_total_flops()
    attention = 2 * 4 * 32 * 32 * 64 / 2  # rows; 2 products of 2 FLOPs; queries; keys; width; causal
    assert anatomy.layers[0].forward.attention_flops == attention
    assert anatomy.layers[0].backward.attention_flops == 2.5 * attention


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("window", "seen"), [(None, 16), (4, 8), (16, 16)])
def test_attention_within_documents_is_counted_by_their_length(window: int | None, seen: int) -> None:
    """A mask is computed over all of a row, and takes memory that is not there without one."""
    config = small_llama() if window is None else MistralConfig(**small_llama().to_dict())
    config.sliding_window = window
    given: dict[str, Any] = {"micro_batch_size": 3, "seq_len": 32, "precision": "bf16", "is_packed": True}
    named = {**given, "attn_implementation": VARLEN}
    apart, rows = count_anatomy(config, **named, document_len=16), count_anatomy(config, **named)
    masked = count_anatomy(config, **given)
    of_masks = 3 * 4 * 32 * 32 * 64  # rows; 2 products of 2 FLOPs; queries; keys; width
    assert masked.layers[0].forward.attention_flops == of_masks
    assert apart.layers[0].forward.attention_flops == of_masks * seen / 32 / 2
    assert apart.layers[0].backward.attention_flops == 2.5 * of_masks * seen / 32 / 2
    assert (
        rows.layers[0].forward.attention_flops == of_masks * (32 if window is None else 2 * window) / 32 / 2
    )
    assert masked.constant_bytes - apart.constant_bytes >= 3 * 32 * 32  # a bool for each pair
    counted = apart.layers[0].saved_bytes["keep_attention"] - apart.layers[0].saved_bytes["recompute"]
    # the output in bf16, a float for each head and token, and the two numbers of the kernel's random state
    assert counted == 2 * 3 * 32 * 64 + 4 * 4 * 3 * 32 + 16
    assert apart.layers[0].forward.matmul_flops == masked.layers[0].forward.matmul_flops


def test_kept_attention_is_its_outputs_and_their_log_sum_exp() -> None:
    anatomy = count_anatomy(
        small_llama(), micro_batch_size=2, seq_len=32, precision="bf16", device_type="cpu"
    )
    saved = anatomy.layers[0].saved_bytes
    tokens, heads = 2 * 32, 4
    assert saved["keep_attention"] - saved["recompute"] == tokens * (64 * 2 + heads * 4)


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
    for policy in ("keep", "recompute_cheap", "keep_attention", "recompute"):
        assert long.layers[0].saved_bytes[policy] == pytest.approx(
            32 * short.layers[0].saved_bytes[policy], rel=1e-3
        )
    assert (
        long.layers[0].backward_peak_bytes["recompute"]
        < 40 * short.layers[0].backward_peak_bytes["recompute"]
    )
    assert long.head_saved_bytes < GIB, "the head is computed in chunks"
    assert long.head_forward.matmul_flops == pytest.approx(32 * short.head_forward.matmul_flops)


def test_a_head_in_chunks_makes_three_products_or_four() -> None:
    """Where each row has a sum, chunks run again. A loss that somebody scales holds gradients in fp32."""
    vocab, tokens = 4096, 12 * 256
    kinds: list[tuple[int, LossKind]] = [(256, "rows"), (256, "given"), (256, "plain"), (tokens, "plain")]
    again, eager, plain, whole = (
        count_anatomy(
            small_llama(vocab_size=vocab),
            micro_batch_size=3,
            seq_len=tokens // 3,
            precision="bf16",
            head_chunk_tokens=chunk,
            loss=loss,
        )
        for chunk, loss in kinds
    )
    product = 2 * tokens * vocab * 64
    for anatomy, products in ((again, 3), (eager, 2), (plain, 2), (whole, 2)):
        assert anatomy.head_forward.matmul_flops == product
        assert anatomy.head_backward.matmul_flops == products * product
    # hidden states wait where chunks run again, and their gradients where those are made at once
    assert plain.head_saved_bytes == again.head_saved_bytes
    assert eager.head_saved_bytes - plain.head_saved_bytes == 4 * vocab * 64
    assert plain.head_backward.moved_bytes < eager.head_backward.moved_bytes < again.head_backward.moved_bytes


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
        for device in ("cpu", "accelerator")
    }
    assert saved["cpu"] > saved["accelerator"] + 4 * 1024 * 1024 * 4


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


# -- models that exist ---------------------------------------------------------------------------------------


def count_live(model: PreTrainedModel, precision: Literal["fp32", "bf16"] = "fp32") -> Anatomy:
    return count_model(model, micro_batch_size=2, seq_len=16, precision=precision, device_type="cpu")


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        *(pytest.param(f, marks=pytest.mark.parity) for f in ("llama_tied", "mamba2", "gpt2", "gemma2")),
    ],
)
def test_a_model_that_exists_costs_what_its_configuration_says(family: str) -> None:
    config = FAMILIES[family]()
    shape: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 16, "precision": "fp32"}
    count_anatomy(config, **shape)  # the first of a process may hold 8 bytes more, of what is imported late
    counted = count_anatomy(config, **shape, device_type="cpu")
    live = count_live(make_model(config))
    assert {field.name: getattr(live, field.name) for field in fields(live)} == {
        field.name: getattr(counted, field.name) for field in fields(counted)
    }


def test_counting_a_model_neither_runs_nor_changes_it() -> None:
    model = make_model(FAMILIES["mixtral"]())
    model.eval()
    for module in (model, model.model, model.model.layers[0], model.model.layers[0].self_attn):
        module.register_forward_pre_hook(lambda *_: pytest.fail("a module of the model ran"))
    before = {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()}
    settings, routes = dict(vars(model.config)), model.config.output_router_logits
    objects = {id(parameter) for parameter in model.parameters()}
    torch.manual_seed(3)
    draws = torch.get_rng_state()
    count_live(model)
    assert torch.equal(torch.get_rng_state(), draws)
    assert not any(module.training for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    assert vars(model.config) == settings
    assert model.config.output_router_logits == routes
    assert {id(parameter) for parameter in model.parameters()} == objects
    for name, value in model.state_dict().items():
        assert value.data_ptr() == before[name][0], name
        assert torch.equal(value, before[name][1]), name


def test_frozen_parameters_of_a_model_that_exists_have_no_state() -> None:
    model = make_model(small_llama())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = model.model.layers[1].mlp.up_proj.weight.requires_grad_()
    anatomy = count_live(model, "bf16")
    assert anatomy.num_trained == trained.numel()
    assert [layer.fragments[1].sizes.num_state for layer in anatomy.layers] == [0, trained.numel()]
    assert anatomy.num_params == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks the old way
def test_a_forward_that_leads_back_to_the_model_is_counted_as_its_class_s() -> None:
    """TRL puts one on the model before PEFT wraps it: a copy of the model must not run the model itself."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = make_model(small_llama())
    wrapped = peft.get_peft_model(model, config)
    before = count_live(wrapped)
    original = model.forward
    model.forward = types.MethodType(lambda _, *args, **kwargs: original(*args, **kwargs), model)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model ran"))
    model.model.register_forward_pre_hook(lambda *_: pytest.fail("a module of the model ran"))
    assert len(before.layers) == 2
    assert vars(count_live(wrapped)) == vars(before)
    assert "forward" in vars(model)


@cache
def counted_plainly() -> Anatomy:
    return count_live(make_model(small_llama()))


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_adapters_are_counted(is_wrapped: bool) -> None:
    peft = pytest.importorskip("peft")
    model, plain = make_model(small_llama()), counted_plainly()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config)
    adapted = count_live(wrapped if is_wrapped else model)
    added = 2 * (4 * (64 + 64) + 4 * (64 + 32))  # layers; ranks; widths of q and of v
    assert adapted.num_trained == added
    assert adapted.num_params == plain.num_params + added
    assert adapted.checkpoint_bytes == 3 * 4 * added, "of adapters, without the base"
    assert plain.checkpoint_bytes == 3 * 4 * plain.num_params
    for before, after in zip(plain.layers, adapted.layers, strict=True):
        assert after.forward.matmul_flops > before.forward.matmul_flops
        assert after.saved_bytes["keep"] < before.saved_bytes["keep"], (
            "no inputs for gradients of frozen weights"
        )
        assert after.backward.matmul_flops < 2 * after.forward.matmul_flops, "frozen weights have no gradient"


def test_a_model_that_fails_without_its_weights_is_refused() -> None:
    model = make_model(small_llama())
    layer = model.model.layers[1]

    class Broken(type(layer)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs) * hidden_states.numpy().max()

    layer.__class__ = Broken
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot be counted: "):
        count_live(model)


def test_keys_that_layers_leave_for_later_ones_are_counted() -> None:
    """Gemma 4's layers leave keys and values in a dictionary, and have heads of sizes of their own."""
    config = Gemma4TextConfig(
        **{"vocab_size": 128, "vocab_size_per_layer_input": 128, "hidden_size": 32, "intermediate_size": 48},
        **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8},
        **{
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
        },
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    anatomy = count_anatomy(config, micro_batch_size=1, seq_len=16, precision="fp32", device_type="cpu")
    assert len(anatomy.layers) == 6


def test_a_class_that_does_not_run_on_text_alone_is_refused_with_its_words() -> None:
    config = tiny_config("idefics")
    said = "IdeficsForVisionText2Text of transformers .* does not run on rows of text alone"
    with pytest.raises(ModelError, match=said) as refused:
        count_anatomy(config, micro_batch_size=1, seq_len=16, precision="fp32")
    assert "pixel_values" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["llama4_text", "kosmos-2.5", "nemotron_h_omni"])
def test_more_tokens_than_pass_the_head_for_the_count_are_counted(name: str) -> None:
    """Llama 4's decoder goes by another name, and those of the others make the loss themselves."""
    shape: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 32, "precision": "fp32", "device_type": "cpu"}
    chunks, whole = (
        count_anatomy(tiny_config(name), **shape, head_chunk_tokens=tokens) for tokens in (8, 64)
    )
    made = chunks.head_forward.matmul_flops + chunks.head_backward.matmul_flops
    assert made == whole.head_forward.matmul_flops + whole.head_backward.matmul_flops
    if name == "llama4_text":
        assert chunks.head_backward_peak_bytes < whole.head_backward_peak_bytes / 2
    else:
        assert [getattr(chunks, each.name) for each in fields(chunks)] == [
            getattr(whole, each.name) for each in fields(whole)
        ]
