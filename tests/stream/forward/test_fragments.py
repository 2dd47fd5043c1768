"""Layers that stream in parts: what is in which part, when gradients leave, and how small a device may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig, LlamaConfig, OlmoConfig, PreTrainedModel

from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.model.blocks import find_blocks
from megatrain.stream.engine import Engine
from megatrain.stream.execute.block_visit import BlockVisit
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.families import FAMILIES, VOCAB_SIZE
from tests.products import every_pair
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_round, assert_same_steps, check_parity, start


def trace(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record what happens in which order: (operation, block), visits when they begin."""
    events: list[tuple[str, int]] = []
    executor = engine.executor
    issue, opened = executor.issue, executor.open

    def record_issue(operation: Any) -> None:
        events.append((operation.label, operation.block))
        issue(operation)

    def record_open(visit: BlockVisit, *, is_backward: bool, is_again: bool) -> None:
        opened(visit, is_backward=is_backward, is_again=is_again)
        events.append((visit.operation.label, visit.block))

    monkeypatch.setattr(executor, "issue", record_issue)
    monkeypatch.setattr(executor, "open", record_open)
    return events


# -- the split -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_fragments_cover_every_parameter_once(family: str) -> None:
    """Each parameter has one owner; each place where a layer looks one up is one fragment's."""
    model = make_model(FAMILIES[family]())
    blocks = find_blocks(model, fragments=True)
    owned = [name for block in blocks for name in block.parameters]
    assert sorted(owned) == sorted(name for name, _ in model.named_parameters())
    whole = {block.name: block for block in find_blocks(model) if block.is_streamed}
    for layer in whole.values():
        parts = [block for block in blocks if block.module is layer.module]
        assert len(parts) == {"mamba2": 1, "opt": 3}.get(family, 2)
        names = [name for part in parts for name in part.parameters]
        assert sorted(names) == sorted(layer.parameters)
        places = [(id(site.module), site.leaf) for part in parts for site in (*part.sites, *part.borrowed)]
        assert len(set(places)) == len(places)
        assert set(places) == {(id(site.module), site.leaf) for site in (*layer.sites, *layer.borrowed)}
        for part in parts:
            inside = {id(module) for entry in part.entries for module in entry.modules()}
            assert not part.entries or all(id(site.module) in inside for site in part.sites)


def test_a_layer_that_calls_methods_of_its_parts_streams_as_a_whole() -> None:
    """Gemma 3n predicts and corrects by methods of `altup`, before attention and after the mlp."""
    config = Gemma3nTextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * 4,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 4,
    )
    _, reference, engine, optimizer = start(config=config, fragments=True)
    assert [len(layer.blocks) for layer in engine.arrangement.layers] == [1] * 4
    assert_same_steps(engine, optimizer, reference)


@pytest.mark.parametrize("activations", ["offload", "drop_boundary"])
def test_what_a_layer_computes_before_its_first_part_is_kept_for_its_backward(activations: str) -> None:
    """OLMo's norms have no weights, so they are in no part: their backward comes after the first one's."""
    config = OlmoConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        pad_token_id=0,
    )
    _, reference, engine, optimizer = start(
        config=config, fragments=True, activations=activations, boundaries="host", num_slots=3
    )
    engine.arrangement.offloaded._min_bytes = 1
    assert_same_steps(engine, optimizer, reference)
    assert not engine.arrangement.offloaded._visits


def test_small_parts_join_the_part_beside_which_they_run() -> None:
    blocks = find_blocks(make_model(FAMILIES["gemma2"]()), fragments=True)
    names = [{name.split(".")[3] for name in block.parameters} for block in blocks[:2]]
    assert names == [
        {"self_attn", "input_layernorm", "post_attention_layernorm"},
        {"mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"},
    ]


def test_parts_that_are_entered_in_another_order_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm beside the wrong part: the second part is entered, left, and entered again."""
    monkeypatch.setattr("megatrain.model.blocks._BEFORE_ATTENTION", ())
    blocks = find_blocks(make_model(FAMILIES["falcon"]()), fragments=True)
    assert any(".ln_mlp." in name for name in blocks[1].parameters)
    check_parity("falcon", activations="offload", fragments=True, num_micro_batches=2, lockstep=2)


# -- order ---------------------------------------------------------------------------------------------------


def test_gradients_leave_fragment_by_fragment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mlp's gradient is on its way home before the attention of its layer begins its backward."""
    _, _, engine, _ = start("llama", fragments=True)
    events = trace(engine, monkeypatch)
    engine.forward_backward(make_batches(1))
    streamed = [n for n, size in enumerate(engine.executor.spec.sizes) if size.is_streamed]
    assert len(streamed) == 8
    visits = [event for event in events if event[0] in ("forward", "backward")]
    assert visits[:8] == [("forward", block) for block in range(8)]
    assert visits[8:] == [
        event
        for mlp in (7, 5, 3, 1)
        for event in (("forward", mlp - 1), ("backward", mlp), ("backward", mlp - 1))
    ]
    offloads = [block for kind, block in events if kind == "offload" and block in streamed]
    assert offloads == [7, 6, 5, 4, 3, 2, 1, 0]
    for block in offloads:
        assert events.index(("offload", block)) > events.index(("backward", block))
        following = events.index(("backward", block - 1)) if block else len(events)
        assert events.index(("offload", block)) < following


def test_fragments_are_updated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With immediate updates, the mlp of the last layer is updated before its attention's backward."""
    _, _, engine, optimizer = start("llama", fragments=True, max_grad_norm=None, updates="immediate")
    events = trace(engine, monkeypatch)
    for _ in range(2):
        events.clear()
        engine.forward_backward(make_batches(1))
        assert events.index(("update", 7)) < events.index(("backward", 6))
        assert events.index(("update", 6)) < events.index(("backward", 5))
        optimizer.step()


# -- memory --------------------------------------------------------------------------------------------------


def balanced_config(num_layers: int) -> LlamaConfig:
    """Make layers whose attention and mlp are of about the same size."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=88,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


def sizes_of(model: PreTrainedModel) -> tuple[int, int, int]:
    """Return the fp32 bytes of a layer, of its largest fragment, and of what is outside of layers."""
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    fragment = max(
        sum(parameter.nbytes for parameter in block.parameters.values())
        for block in find_blocks(model, fragments=True)
        if block.is_streamed
    )
    total = sum(parameter.nbytes for parameter in model.parameters())
    return layer, fragment, total - len(model.model.layers) * layer


def test_a_device_too_small_for_two_layers_trains() -> None:
    """Two layers and their gradient do not fit, two fragments and theirs do; the bytes are as promised."""
    model = make_model(balanced_config(8))
    reference = Resident(model, **HYPER)
    layer, fragment, outer = sizes_of(model)
    budget = 3 * fragment + 2 * outer
    assert 3 * fragment < 2 * layer, "less than two layers, gradients and all"
    with pytest.raises(CapacityError, match=r"use memory.num_slots=1, memory.fragments=true, train.prec"):
        attach_plainly(model, device=EmulatedLanes(EmulatedMachine(device_bytes=budget)))
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=budget))
    engine = attach_plainly(model, device=lanes, fragments=True, num_slots=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference)
    assert engine.device_bytes_peak == budget
    engine.detach()


def test_a_frozen_model_trains_in_less_than_two_layers() -> None:
    """Adapters have small gradients: two fragments in slots are most of it."""
    model = make_model(balanced_config(8))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    reference = Resident(model, **HYPER)
    layer, fragment, outer = sizes_of(model)
    budget = 2 * layer - 1
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=budget))
    engine = attach_plainly(model, device=lanes, fragments=True, num_slots=2)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference)
    small = engine.device_bytes_peak - 2 * fragment - outer
    assert 0 < small < 0.05 * layer
    engine.detach()
    with pytest.raises(CapacityError, match="device memory"):
        attach_plainly(model, device=EmulatedLanes(EmulatedMachine(device_bytes=budget)))


@pytest.mark.parametrize("missing", [1, 200_000])
def test_a_budget_too_small_for_fragments_is_refused_before_anything_is_allocated(missing: int) -> None:
    model = make_model(balanced_config(4))
    _, fragment, outer = sizes_of(model)
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=3 * fragment + 2 * outer - missing))
    sentence = r"device memory: .*slots.*but the limit is .* GiB; use train.precision=bf16, or a larger"
    with pytest.raises(CapacityError, match=sentence):
        attach_plainly(model, device=lanes, fragments=True, num_slots=2)
    assert lanes.device_bytes == 0
    assert model.__dict__.get("_megatrain_host") is None
    assert not any("forward" in module.__dict__ for module in model.modules())
    lanes.close()


@pytest.mark.parametrize(
    ("family", "settings", "sentence"),
    [
        ("llama", {"num_slots": 1}, "num_slots is 1, but 2 fragments of a layer.*use num_slots=2 or more"),
        ("opt", {"num_slots": 2}, "num_slots is 2, but 3 fragments of a layer.*use num_slots=3 or more"),
        (
            "llama",
            {"num_gradient_buffers": 1, "lockstep": 2},
            "num_gradient_buffers is 1, but gradients of 2 fragments",
        ),
    ],
)
def test_too_few_slots_for_the_parts_of_a_layer_are_refused(
    family: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        attach_plainly(make_model(FAMILIES[family]()), fragments=True, **settings)


# -- use -----------------------------------------------------------------------------------------------------


def test_a_part_called_outside_its_layer_is_refused() -> None:
    model, reference, engine, _ = start("llama", fragments=True)
    sentence = r"model.layers.1.mlp was called outside its layer's forward; call the model, or attach it with"
    with pytest.raises(ModelError, match=sentence):
        model.model.layers[1].mlp(torch.zeros(1, 2, 32))
    assert_same_round(engine, reference, make_batches(2))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["llama_tied", "falcon", "jamba", "opt"])
def test_generate_with_fragments_equals_resident(family: str) -> None:
    model, reference, engine, optimizer = start(family, fragments=True)
    assert_same_steps(engine, optimizer, reference, steps=1)
    prompt = make_batches(1, tokens=5)[0]["input_ids"]
    arguments = {"max_new_tokens": 10, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = reference.model.eval().generate(prompt, **arguments)
    assert torch.equal(model.eval().generate(prompt, **arguments), expected)
    for net in (model, reference.model):
        net.train()
    assert_same_steps(engine, optimizer, reference, first=1)


TRAINED: dict[str, tuple[str, Callable[[str], bool]]] = {
    "attention": ("llama", lambda name: "self_attn" in name),
    "mlp": ("llama", lambda name: "mlp" in name),
    "the middle of three": ("opt", lambda name: ".fc1" in name),
    "embedding": ("llama", lambda name: "embed_tokens" in name),
    "outer layers": ("llama", lambda name: any(part in name for part in ("embed", "layers.0.", "layers.3."))),
    "parts of parts": ("opt", lambda name: name.endswith(("q_proj.weight", "fc2.bias"))),
}


@every_pair(activations=["recompute", "keep", "drop_boundary"], lockstep=[1, 2], which=list(TRAINED))
def test_training_some_fragments_equals_resident(which: str, activations: str, lockstep: int) -> None:
    """A fragment without trained parameters has no gradient, and leaves its slot all the same."""
    family, is_trained = TRAINED[which]

    def freeze(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))

    _, reference, engine, optimizer = start(
        family, prepare=freeze, fragments=True, activations=activations, lockstep=lockstep
    )
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    if activations == "recompute":
        assert not engine.arrangement.rounds._orders, "frozen parts are passed when the program says so"
    assert not engine.executor._pinned
    assert engine.executor.open_visit is None


@pytest.mark.parametrize(
    ("fragments", "is_trained"),
    [
        (False, lambda name: "embed_tokens" in name),
        (False, lambda name: ".layers.1." in name),
        (True, lambda name: ".mlp." in name),
    ],
)
@pytest.mark.parametrize(
    "settings", [{"activations": "offload"}, {"activations": "recompute", "boundaries": "host"}]
)
def test_saved_activations_of_frozen_parts_leave_the_host(
    settings: dict[str, Any], fragments: bool, is_trained: Callable[[str], bool]
) -> None:
    """Nobody is told that autograd has passed a frozen part; its host memory is used again all the same."""

    def freeze(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))

    _, reference, engine, _ = start(
        config=balanced_config(4), prepare=freeze, fragments=fragments, **settings
    )
    held = []
    for step in range(3):
        assert_same_round(engine, reference, make_batches(1, seed=step, rows=2, tokens=64))
        held.append(engine.arrangement.offloaded.host_bytes)
    assert held[0] > 0
    assert held[2] == held[0], "it grows with every step"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks the old way
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"], ["q_proj", "up_proj"]])
def test_lora_with_fragments_equals_resident(targets: list[str]) -> None:
    peft = pytest.importorskip("peft")
    model = make_model(FAMILIES["llama"]())
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    reference = Resident(model, **HYPER)
    assert {name.split(".")[-2] for name in reference.parameters} == {"default"}
    engine = attach_plainly(model, device="checked", fragments=True)
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    streamed = [size for size in engine.executor.spec.sizes if size.is_streamed]
    assert len(streamed) == 8
    assert sum(size.is_trained for size in streamed) == (
        8 if len(targets) == 2 and "up_proj" in targets else 4
    )
    assert sum(size.offload_bytes for size in streamed) < 0.2 * sum(size.fetch_bytes for size in streamed)


def test_hooks_on_parts_see_what_a_resident_model_shows() -> None:
    """Pre-hooks and hooks of attention and mlp fire once per forward, with the same values."""
    seen: dict[str, list[float]] = {"resident": [], "streamed": []}
    _, reference, engine, _ = start("llama", fragments=True, activations="keep")
    for which, model in (("resident", reference.model), ("streamed", engine.model)):
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(
                lambda _, __, output, which=which: seen[which].append(output.detach().sum().item())
            )
    assert_same_round(engine, reference, make_batches(2))
    assert len(seen["resident"]) == 8
    assert seen["streamed"] == seen["resident"]
