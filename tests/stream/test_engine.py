"""The engine as a user meets it: bf16, plain loss.backward, generate, adapters, freezing, errors, detach."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, XGLMConfig

import megatrain
from megatrain.config.choice import Choice
from megatrain.errors import CapacityError, ConfigError, DataError, ModelError
from megatrain.plan.program.step import step_program
from megatrain.stream import optimizer as optimizer_module
from megatrain.stream.engine import Engine
from megatrain.stream.optimizer import StreamedOptimizer
from tests.families import FAMILIES, VOCAB_SIZE
from tests.products import every_pair, every_value
from tests.reference import Batch, Resident, assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.runs import (
    HYPER,
    assert_same_gradients,
    assert_same_masters,
    assert_same_round,
    assert_same_steps,
    start,
)


def gradients_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the fp32 gradients that autograd left in a resident model."""
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}


# -- bf16 ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("steps", [5, pytest.param(20, marks=pytest.mark.parity)])
@pytest.mark.parametrize("num_micro_batches", [1, pytest.param(3, marks=pytest.mark.parity)])
@pytest.mark.parametrize("family", ["llama_tied", "mixtral", "gpt2", "deepseek_v3"])
def test_bf16_masters_equal_the_reference_loop_s(family: str, num_micro_batches: int, steps: int) -> None:
    """Bf16 weights in compute, fp32 AdamW on fp32 masters, bit for bit."""
    _, reference, engine, optimizer = start(family, precision="bf16")
    for step in range(steps):
        batches = make_batches(num_micro_batches, seed=step)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, f"loss of step {step}")
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
    assert_same_masters(engine, reference)
    for name, parameter in engine.model.named_parameters():
        # transformers keeps these in fp32 from 5.24 on
        assert parameter.dtype == torch.bfloat16 or name.endswith("gate.weight")
        assert_same_bits(parameter.detach(), reference.parameters[name].detach(), name)


def test_parameters_kept_in_fp32_stay_fp32_in_a_bf16_model() -> None:
    """A model that comes with bf16 weights and a few fp32 ones keeps both as they are."""

    def cast(model: PreTrainedModel) -> None:
        for name, parameter in model.named_parameters():
            if not name.endswith("A_log"):
                parameter.data = parameter.data.to(torch.bfloat16)

    model, _, engine, optimizer = start("mamba2", prepare=cast, precision="bf16")
    _, reference, _, _ = start("mamba2", prepare=cast, precision="bf16")
    before = {name: master.clone() for name, master in engine.named_masters()}
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        name for name in dtypes if name.endswith("A_log")
    }
    after = dict(engine.named_masters())
    moved = [name for name in dtypes if name.endswith("A_log") and not torch.equal(before[name], after[name])]
    assert len(moved) == 4


def test_parameters_that_a_class_makes_in_fp32_stay_so_when_an_fp32_model_is_attached_in_bf16() -> None:
    """Hunyuan's routers are in fp32 whatever the dtype of the model: as `from_config` in bf16 makes them."""
    config = CONFIG_MAPPING["hunyuan_v1_moe"](
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=2,
        moe_topk=1,
        pad_token_id=0,
    )
    model = make_model(config, dtype=torch.float32)
    engine = attach_plainly(model, device="checked", precision="bf16")
    built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in built.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"model.layers.{layer}.mlp.gate.wg.weight" for layer in range(2)
    }
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes
    assert engine.forward_backward(make_batches(1)).isfinite()


# -- loss.backward -------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@every_pair(precision=["fp32", "bf16"], activations=["recompute", "keep"], family=["llama_tied", "mixtral"])
def test_backward_of_several_losses_equals_resident(family: str, activations: str, precision: str) -> None:
    """Each call is a round of one micro-batch; bf16 gradients add up in fp32 and are rounded once."""
    model, reference, engine, optimizer = start(family, activations=activations, precision=precision)
    for step in range(3):
        sums: dict[str, Tensor] = {}
        for batch in make_batches(3, seed=step):
            reference.model.zero_grad()
            expected = reference.model(**batch).loss / 3
            expected.backward()
            for name, gradient in gradients_of(reference.model).items():
                sums[name] = sums[name] + gradient if name in sums else gradient.clone()
            loss = model(**batch).loss / 3
            loss.backward()
            assert_same_bits(loss.detach(), expected.detach(), "loss")
        dtypes = {name: parameter.dtype for name, parameter in reference.parameters.items()}
        reference.sums = {name: value.to(dtypes[name]).float() for name, value in sums.items()}
        assert_same_gradients(engine, reference.sums)
        stats = optimizer.step()
        reference.step(stats.grad_norm, 0.5)
        assert_same_masters(engine, reference)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_backward_equals_forward_backward(precision: str) -> None:
    """Two micro-batches with equally many tokens: half of each loss is what the step's average is."""
    model, _, engine, _ = start("llama", precision=precision)
    batches = make_batches(2)
    total = engine.forward_backward(batches)
    expected = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    engine.zero_grad()
    parts = []
    for batch in batches:
        loss = model(**batch, num_items_in_batch=torch.tensor(60)).loss
        loss.backward()
        parts.append(loss.detach())
    assert_same_bits(torch.stack(parts).sum(), total, "loss")
    assert_same_gradients(engine, expected)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_two_forwards_and_one_backward_equal_resident(activations: str) -> None:
    model, reference, engine, _ = start("llama", activations=activations)
    for step in range(2):
        first, second = make_batches(2, seed=step)
        (model(**first).loss + model(**second).loss).backward()
        reference.model.zero_grad()
        (reference.model(**first).loss + reference.model(**second).loss).backward()
        assert_same_gradients(engine, gradients_of(reference.model))
        engine.zero_grad()
    assert_same_round(engine, reference, make_batches(2))


def test_tied_weights_after_two_forwards_and_one_backward_agree_to_rounding() -> None:
    """A parameter used twice in each of two forwards: torch adds the four parts one by one."""
    model, reference, engine, _ = start("llama_tied")
    first, second = make_batches(2)
    (model(**first).loss + model(**second).loss).backward()
    (reference.model(**first).loss + reference.model(**second).loss).backward()
    expected = gradients_of(reference.model)
    for name, gradient in engine.named_gradients():
        if name == "model.embed_tokens.weight":
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        else:
            assert_same_bits(gradient, expected[name], name)


@pytest.mark.parametrize("num_later", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_reading_gradients_between_backwards_changes_nothing(precision: str, num_later: int) -> None:
    model, reference, engine, _ = start("llama", precision=precision)
    batches = make_batches(1 + num_later)
    for batch in batches:
        model(**batch).loss.backward()
        for _, gradient in engine.named_gradients():
            assert gradient.isfinite().all()
    sums: dict[str, Tensor] = {}
    for batch in batches:
        reference.model.zero_grad()
        reference.model(**batch).loss.backward()
        for name, gradient in gradients_of(reference.model).items():
            sums[name] = sums[name] + gradient if name in sums else gradient.clone()
    if precision == "fp32":
        assert_same_gradients(engine, sums)
    else:  # what was read had been rounded
        for name, gradient in engine.named_gradients():
            torch.testing.assert_close(gradient, sums[name], rtol=2e-2, atol=1e-3)


def test_an_evaluation_between_forward_and_backward_changes_nothing() -> None:
    model, reference, engine, _ = start()
    for mode in (torch.no_grad, torch.inference_mode):
        batch, other = make_batches(2)
        loss = model(**batch).loss
        with mode():
            evaluated = model(**other).loss
        loss.backward()
        assert_same_bits(evaluated.clone(), reference.model(**other).loss.detach(), "evaluated loss")
        expected = reference.forward_backward([batch])
        assert_same_bits(loss.detach(), expected, "loss")
        assert_same_gradients(engine, reference.sums)
        engine.zero_grad()
    assert_same_round(engine, reference, make_batches(2))


def test_inference_mode_before_the_first_step_changes_nothing() -> None:
    model, reference, engine, _ = start()
    with torch.inference_mode():
        model(**make_batches(1)[0])
    assert_same_round(engine, reference, make_batches(2))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_computes_with_weights_that_require_gradients_as_parameters_do(
    mode: Callable[[], Any],
) -> None:
    """torch.matmul of weights by several rows of tokens takes another kernel where they do, as in Jamba."""
    model = make_model(FAMILIES["jamba"]()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.lm_head.weight.requires_grad_(False)
    ids = torch.randint(3, VOCAB_SIZE, (2, 5), generator=generator)
    with mode():
        expected = model(input_ids=ids).logits.clone()
    engine = attach_plainly(model)
    with mode():
        assert_same_bits(model(input_ids=ids).logits.clone(), expected, "logits")
    engine.detach()


def test_second_backward_through_the_same_graph_is_refused() -> None:
    for activations in ("recompute", "keep"):
        model, reference, engine, _ = start(activations=activations)
        loss = model(**make_batches(1)[0]).loss
        loss.backward(retain_graph=True)
        with pytest.raises(ModelError, match="backward"):
            loss.backward()
        assert_same_round(engine, reference, make_batches(1))


# -- generate, hooks -----------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "family", ["llama_tied", "gemma3_text", "gpt2", "mixtral", "falcon", "qwen3_next", "mamba2"]
)
def test_generate_equals_resident_and_training_goes_on(family: str) -> None:
    """Greedy, with the KV cache, token for token; and nothing of it is left in the training."""
    model, reference, engine, optimizer = start(family)
    assert_same_steps(engine, optimizer, reference, steps=1)
    prompt = make_batches(1, tokens=5)[0]["input_ids"]
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = reference.model.eval().generate(prompt, **arguments)
    generated = model.eval().generate(prompt, **arguments)
    assert expected.shape[1] > 5
    assert torch.equal(generated, expected)
    model.train()
    reference.model.train()
    assert_same_steps(engine, optimizer, reference, first=1, num_micro_batches=2)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_hooks_of_model_and_blocks_fire_once(activations: str) -> None:
    calls: list[str] = []

    def watch(module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda *_: calls.append(f"{name} in"))
        module.register_forward_hook(lambda *_: calls.append(f"{name} out"))

    def prepare(model: PreTrainedModel) -> None:
        watch(model, "model")
        for number, layer in enumerate(model.model.layers):
            watch(layer, f"b{number}")

    _, _, engine, _ = start(prepare=prepare, activations=activations)
    calls.clear()
    engine.forward_backward(make_batches(1))
    blocks = [f"b{number} {end}" for number in range(4) for end in ("in", "out")]
    assert calls == ["model in", *blocks, "model out"]


# -- frozen, adapters, unused --------------------------------------------------------------------------------


def freeze_but(model: PreTrainedModel, is_trained: Callable[[str], bool]) -> None:
    """Freeze all parameters but some."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_trained(name))


def chosen_by_chance(seed: int) -> Callable[[str], bool]:
    """Choose about a third of the parameters."""
    return lambda name: random.Random(f"{seed} {name}").random() < 0.33


TRAINED: dict[str, Callable[[str], bool]] = {
    "q_proj": lambda name: "q_proj" in name,
    "last block": lambda name: ".layers.3." in name,
    "first block": lambda name: ".layers.0." in name,
    "embeddings": lambda name: "embed_tokens" in name,
    "head": lambda name: "lm_head" in name,
    "norm of one block": lambda name: name == "model.layers.2.input_layernorm.weight",
    **{f"chance {seed}": chosen_by_chance(seed) for seed in range(6)},
}


@every_value(activations=["recompute", "keep"], which=list(TRAINED))
def test_training_a_part_equals_resident(which: str, activations: str) -> None:
    """Frozen parameters keep every bit and have no moments."""
    is_trained = TRAINED[which]
    model, reference, engine, optimizer = start(
        "llama", prepare=lambda m: freeze_but(m, is_trained), activations=activations
    )
    before = {name: master for name, master in engine.named_masters() if not is_trained(name)}
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    after = dict(engine.named_masters())
    for name, master in before.items():
        assert_same_bits(after[name], master, name)
    trained = sum(-(-p.numel() // 64) * 64 for n, p in model.named_parameters() if is_trained(n))
    assert sum(state.planes["exp_avg"].numel() for state in engine.host.blocks if state.planes) == trained


@pytest.mark.parametrize("gradients", ["host", "device"])
@pytest.mark.parametrize("part", ["mlp", "layers.2"])
def test_freezing_after_attach_equals_resident(part: str, gradients: str) -> None:
    """Also of whole blocks, whose gradient of the step before is not loaded in the second round."""
    model, reference, engine, optimizer = start("llama", gradients=gradients, num_micro_batches=2)
    assert_same_steps(engine, optimizer, reference, steps=1, num_micro_batches=2)
    for frozen in (model, reference.model):
        freeze_but(frozen, lambda name: part in name)
    assert_same_steps(engine, optimizer, reference, first=1, num_micro_batches=2)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks the old way
def test_lora_before_attach_equals_resident() -> None:
    peft = pytest.importorskip("peft")
    model = make_model(FAMILIES["llama"]())
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked")
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    assert len(reference.masters) == 4 * 3 * 2
    loss = adapted(**make_batches(1)[0]).loss
    loss.backward()
    assert len(dict(engine.named_gradients())) == 4 * 3 * 2


def test_peft_model_attaches_trains_and_detaches() -> None:
    """The wrapper itself is attached: its loss is the step's, and detach leaves nothing behind."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(make_model(FAMILIES["llama"]()), config)
    inner = adapted.get_base_model()
    reference = Resident(adapted, **HYPER)
    for _ in range(2):
        engine = attach_plainly(adapted, device="checked")
        batches = make_batches(2, padded=True)
        assert_same_bits(engine.forward_backward(batches), reference.forward_backward(batches), "loss")
        for name, gradient in engine.named_gradients():
            assert_same_bits(gradient, reference.sums[name], name)
        engine.detach()
        assert "_loss_function" not in inner.__dict__
        assert "forward" not in inner.__dict__


def test_a_parameter_without_gradient_gets_no_update() -> None:
    """As in torch: no gradient, no moment, no decay, and no tick of its bias correction."""

    def add_unused(model: PreTrainedModel) -> None:
        model.model.layers[1].unused = nn.Parameter(torch.ones(7))
        model.unused = nn.Parameter(torch.ones(3, 5))

    _, reference, engine, optimizer = start("llama", prepare=add_unused)
    assert_same_steps(engine, optimizer, reference, steps=2, num_micro_batches=2)
    assert dict(engine.named_masters())["model.layers.1.unused"].tolist() == [1.0] * 7
    assert optimizer.steps["unused"] == optimizer.steps["model.layers.1.unused"] == 0
    assert optimizer.steps["lm_head.weight"] == 2


# -- skipping, clipping --------------------------------------------------------------------------------------


def all_state(engine: Engine) -> list[Tensor]:
    """Copy every master and moment."""
    state = [master for _, master in engine.named_masters()]
    for block in engine.host.blocks:
        state += [
            plane.clone()
            for name in ("exp_avg", "exp_avg_sq", "remainder")
            if (plane := block.find_plane(name)) is not None
        ]
    return state


@pytest.mark.sampled(2)
@every_pair(value=[float("nan"), float("inf")], precision=["fp32", "bf16"], max_grad_norm=[0.5, None])
def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing(
    value: float, precision: str, max_grad_norm: float | None
) -> None:
    model, reference, engine, optimizer = start(precision=precision, max_grad_norm=max_grad_norm)
    assert_same_steps(engine, optimizer, reference, steps=1, max_grad_norm=max_grad_norm)
    before = all_state(engine)
    loss = model(**make_batches(1)[0]).loss * value
    loss.backward()
    stats = optimizer.step()
    assert stats.skipped
    assert not torch.isfinite(torch.tensor(stats.grad_norm))
    assert optimizer.num_skipped == 1
    for tensor, expected in zip(all_state(engine), before, strict=True):
        assert torch.equal(tensor, expected)
    assert_same_steps(engine, optimizer, reference, first=1, max_grad_norm=max_grad_norm)
    assert optimizer.num_skipped == 1


def test_groups_and_schedules_are_torch_s() -> None:
    """Norms and biases do not decay by default; a torch scheduler sets the rate."""
    _, reference, engine, optimizer = start("llama_tied")
    groups = {group["weight_decay"]: set(group["names"]) for group in optimizer.param_groups}
    assert groups.keys() == {0.1, 0.0}
    assert "model.layers.0.self_attn.q_proj.bias" in groups[0.0]
    assert "model.norm.weight" in groups[0.0]
    assert "model.embed_tokens.weight" in groups[0.1]
    ours = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    theirs = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, lambda step: 0.5**step)
    for step in range(3):
        assert_same_steps(engine, optimizer, reference, first=step, steps=1)
        ours.step()
        theirs.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 8)


@pytest.mark.parametrize(("patterns", "decayed"), [([], 1.0), (["*"], 0.0), (["*norm*", "*embed*"], 0.5)])
def test_patterns_choose_what_does_not_decay(patterns: Iterable[str], decayed: float) -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()), device="checked")
    optimizer = engine.adamw(weight_decay=0.1, no_decay=patterns)
    names = [n for g in optimizer.param_groups if g["weight_decay"] for n in g["names"]]
    assert (len(names) == 39, not names) == (decayed == 1.0, decayed == 0.0)
    assert decayed != 0.5 or not any("norm" in name or "embed" in name for name in names)


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [lambda m: m.to(torch.float16), lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta")],
)
def test_moving_or_casting_an_attached_model_is_refused(change: Callable[[PreTrainedModel], Any]) -> None:
    model, reference, engine, _ = start()
    with pytest.raises(ModelError, match="attached to an engine, which owns its device and dtype"):
        change(model)
    assert_same_round(engine, reference, make_batches(1))


def test_casting_a_part_of_an_attached_model_is_refused() -> None:
    model, _, engine, _ = start()
    model.model.layers[1].to(torch.float64)
    with pytest.raises(ModelError, match="was moved or cast after the engine was attached"):
        engine.forward_backward(make_batches(1))


def test_a_second_engine_and_a_second_optimizer_are_refused() -> None:
    model, _, engine, _ = start()
    with pytest.raises(ModelError, match="attached to an engine already"):
        attach_plainly(model)
    with pytest.raises(ConfigError, match="has an optimizer already"):
        engine.adamw()


def test_unfreezing_after_attach_is_refused() -> None:
    model, _, engine, _ = start("llama", prepare=lambda m: freeze_but(m, lambda name: "mlp" in name))
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_()
    with pytest.raises(ModelError, match=r"q_proj.weight was frozen when the engine was attached"):
        engine.forward_backward(make_batches(1))


def test_a_gradient_from_outside_is_refused() -> None:
    model, reference, engine, optimizer = start("llama")
    engine.forward_backward(make_batches(1))
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    for read in (optimizer.step, lambda: dict(engine.named_gradients())):
        with pytest.raises(ModelError, match=r"lm_head.weight got a gradient outside the engine"):
            read()
    optimizer.zero_grad()
    assert_same_steps(engine, optimizer, reference)


def test_a_block_called_on_its_own_is_refused() -> None:
    model, _, _, _ = start("llama")
    with pytest.raises(ModelError, match=r"model.layers.0 was called outside the model's forward"):
        model.model.layers[0](torch.zeros(1, 2, 32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 0}, "num_slots is 0; use 1 or more"),
        ({"num_gradient_buffers": 0}, "num_gradient_buffers is 0; use 1 or more"),
        ({"head_chunk_tokens": 0}, "head_chunk_tokens is 0; use 1 or more"),
        ({"precision": "fp16"}, "precision is 'fp16'; use fp32 or bf16"),
        (
            {"activations": "drop"},
            "activations is 'drop'; use keep, offload, recompute_cheap, keep_attention, recompute",
        ),
        ({"activations": ["keep"]}, "activations names 1 policies for 4 layers"),
        ({"device": "gpu"}, "device is 'gpu', on which megatrain cannot run; use auto"),
        ({"num_slot": 2}, "there is no setting num_slot; did you mean num_slots?"),
        ({"num_slots": 2, "choice": Choice(num_slots=2)}, "num_slots is given twice"),
        ({"boundaries": "nvme"}, "boundaries is nvme, but there are no drives"),
        ({"micro_batch_size": 0}, "micro_batch_size is 0; use 1 or more"),
        ({"compile": "yes"}, "compile is 'yes'; use auto, on or off"),
        ({"host_limit": "64XB"}, "host_limit is '64XB'; use bytes or a size such as 24GiB"),
        ({"device_limit": -1}, "device_limit is -1; use bytes or a size such as 24GiB"),
    ],
)
def test_bad_settings_are_refused_and_leave_the_model_alone(settings: dict[str, Any], message: str) -> None:
    model = make_model(FAMILIES["llama"]())
    with pytest.raises(ConfigError, match=message):
        megatrain.attach(model, **settings)
    assert not any("forward" in module.__dict__ for module in model.modules())
    attach_plainly(model).forward_backward(make_batches(1))


def test_limits_may_be_written_as_sizes() -> None:
    model = make_model(FAMILIES["llama"]())
    with pytest.raises(CapacityError, match=r"but the limit is 1\.00 KiB"):
        megatrain.attach(model, host_limit="1KiB")
    assert megatrain.attach(model, host_limit="1GiB", device_limit="64MiB").lanes.device_limit == 64 << 20


@pytest.mark.parametrize(
    ("hyper", "field"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (-0.1, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": float("inf")}, "weight_decay"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
    ],
)
def test_bad_hyper_parameters_are_refused(hyper: dict[str, Any], field: str) -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    with pytest.raises(ConfigError, match=f"^{field} is "):
        engine.adamw(**hyper)
    engine.adamw()  # the refused one has left nothing behind


def test_bad_batches_are_refused() -> None:
    _, reference, engine, optimizer = start()
    ids = make_batches(1)[0]["input_ids"]
    with pytest.raises(ConfigError, match="no micro-batch"):
        engine.forward_backward([])
    with pytest.raises(DataError, match="no 'labels'"):
        engine.forward_backward([{"input_ids": ids}])
    with pytest.raises(DataError, match="every label is -100"):
        engine.forward_backward([{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
    with pytest.raises(ConfigError, match="got 1 seeds for 2 micro-batches"):
        engine.forward_backward(make_batches(2), seeds=[1])
    with pytest.raises(ConfigError, match="found no gradient"):
        optimizer.step()
    with pytest.raises(ConfigError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    assert_same_round(engine, reference, make_batches(2))


def test_a_micro_batch_without_targets_among_others_is_fine() -> None:
    """Normalised by real tokens over the step, however few of them a micro-batch has."""
    _, reference, engine, _ = start()
    batches = [dict(batch) for batch in make_batches(2)]
    batches[1]["labels"] = torch.full_like(batches[1]["labels"], -100)
    assert_same_round(engine, reference, [*batches, *make_batches(1, tokens=7, rows=1, seed=5)])


def test_a_model_without_blocks_is_refused() -> None:
    from transformers import AutoModelForCausalLM, XLNetConfig

    config = XLNetConfig(vocab_size=16, d_model=16, n_layer=2, n_head=2, d_inner=16)
    with pytest.raises(ModelError, match="XLNetLMHeadModel has no list of decoder layers"):
        attach_plainly(AutoModelForCausalLM.from_config(config))


def test_nothing_to_train_is_refused() -> None:
    model = make_model(FAMILIES["llama"]())
    freeze_but(model, lambda _: False)
    with pytest.raises(ModelError, match="no parameter requires a gradient"):
        attach_plainly(model).adamw()


# -- exceptions ----------------------------------------------------------------------------------------------


class Stop(Exception):
    """Raised inside a model."""


def raise_on_call(number: int) -> Callable[..., None]:
    """Return a hook that raises on its n-th call and does nothing otherwise."""
    calls = iter(range(1, 1000))

    def hook(*_: Any) -> None:
        if next(calls) == number:
            raise Stop

    return hook


PLACES: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda mlp: mlp.register_forward_hook(raise_on_call(1)),
    "recompute": lambda mlp: mlp.register_forward_pre_hook(raise_on_call(2)),
    "second micro-batch": lambda mlp: mlp.register_forward_pre_hook(raise_on_call(3)),
    "backward": lambda mlp: mlp.register_full_backward_hook(raise_on_call(1)),
}


@pytest.mark.sampled(3)
@every_pair(device=["checked", "emulated"], by_hand=[False, True], place=list(PLACES))
def test_an_exception_in_the_model_leaves_the_engine_whole(place: str, by_hand: bool, device: str) -> None:
    model, reference, engine, optimizer = start("llama", device=device)
    assert_same_steps(engine, optimizer, reference, steps=1)
    handle = PLACES[place](model.model.layers[2].mlp)
    with pytest.raises(Stop):  # noqa: PT012  # by hand, the exception comes from any of several calls
        if by_hand:
            for batch in make_batches(2):
                model(**batch).loss.backward()
        else:
            engine.forward_backward(make_batches(2))
    handle.remove()
    engine.zero_grad()
    for parameter in model.parameters():
        assert isinstance(parameter, nn.Parameter)
    assert_same_steps(engine, optimizer, reference, first=1, num_micro_batches=2)
    last: Batch = make_batches(1, seed=9)[0]
    model(**last).loss.backward()
    reference.forward_backward([last])
    assert_same_gradients(engine, reference.sums)
    assert engine.executor.open_visit is None
    assert not engine.arrangement.rounds._in_backward
    engine.detach()


@pytest.mark.parametrize(
    ("place", "lockstep", "activations"),
    [
        ("forward", 1, ("recompute", "drop_boundary", "drop_boundary", "keep")),
        ("recompute", 2, ("drop_boundary",) * 4),
        ("second micro-batch", 1, ("recompute_cheap", "drop_boundary", "offload", "drop_boundary")),
    ],
)
def test_an_exception_costs_only_its_step_where_boundaries_are_dropped(
    place: str, lockstep: int, activations: tuple[str, ...]
) -> None:
    """What is left of the dropped step, here in the exception, is not made again with the next one's."""
    model, reference, engine, optimizer = start(
        "llama", num_micro_batches=2, boundaries="host", lockstep=lockstep, activations=activations
    )
    engine.arrangement.offloaded._min_bytes = 1  # boundaries of tiny batches leave the device too
    handle = PLACES[place](model.model.layers[2].mlp)
    with pytest.raises(Stop) as stopped:
        engine.forward_backward(make_batches(2))
    handle.remove()
    assert_same_steps(engine, optimizer, reference, num_micro_batches=2)
    assert stopped.value.__traceback__ is not None
    engine.detach()


# -- detach --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["checked", "emulated"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_detach_gives_the_model_back(precision: str, device: str) -> None:
    model, reference, engine, optimizer = start(precision=precision, device=device)
    assert_same_steps(engine, optimizer, reference)
    engine.detach()
    assert not any("forward" in module.__dict__ for module in model.modules())
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), reference.parameters[name].detach(), name)
    batch = make_batches(1)[0]
    assert_same_bits(model(**batch).loss, reference.model(**batch).loss, "loss of the detached model")
    model.to(torch.float64)


CHOICES_IN_TURN: tuple[dict[str, Any], ...] = (
    {"gradients": ("device", "host", "host", "device")},  # a gradient plane of some blocks only
    {},
    {"updates": "immediate", "lockstep": 3},  # staging buffers of one size
    {"sums": "host", "fragments": True},  # of another one
    {"gradients": "device", "resident_layers": 2, "num_slots": 3},
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attaching_again_goes_on_from_the_masters_under_any_choice(precision: str) -> None:
    """Nothing but the masters is left of the engine before: no plane, no optimizer's state."""
    model = make_model(FAMILIES["llama_tied"]())
    reference = Resident(model, precision=precision, **HYPER)
    for step, choice in enumerate(CHOICES_IN_TURN):
        settings = {"device": "checked", "precision": precision, "num_micro_batches": 3, **choice}
        engine = attach_plainly(model, **settings)
        reference.optimizer.state.clear()
        optimizer = engine.adamw(**HYPER, max_grad_norm=None)
        batches = make_batches(3, seed=step)
        expected = reference.forward_backward(batches)
        assert_same_bits(engine.forward_backward(batches), expected, f"loss under {choice}")
        optimizer.step()
        reference.step(0.0, None)
        assert_same_masters(engine, reference)
        engine.detach()
    assert engine.host.plane_bytes.keys() <= {"working", "remainder"}


@pytest.mark.parametrize("way", ["in place", "other memory"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_that_are_changed_between_engines_are_whole_values(precision: str, way: str) -> None:
    """The rest of a master belongs to the weight that it was split from, and to no other one."""
    model, reference, engine, optimizer = start("llama", precision=precision)
    assert_same_steps(engine, optimizer, reference)
    masters = dict(engine.named_masters())
    engine.detach()
    weight = model.model.layers[1].mlp.up_proj.weight
    if way == "in place":
        weight.data.mul_(3)
    else:
        weight.data = (3 * weight.data).float()
    changed = weight.detach().float()
    again = attach_plainly(model, device="checked", precision=precision)
    found = dict(again.named_masters())
    assert_same_bits(found.pop("model.layers.1.mlp.up_proj.weight"), changed, "the changed weight")
    for name, master in found.items():
        assert_same_bits(master, masters[name], name)


def test_weights_that_are_frozen_between_engines_stay_as_they_are_and_lose_their_masters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, reference, engine, optimizer = start("llama", precision="bf16")
    assert_same_steps(engine, optimizer, reference)
    engine.detach()
    weight = model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    before = weight.detach().clone()
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        again = attach_plainly(model, device="checked", precision="bf16")
    assert_same_bits(weight.detach(), before, "the frozen weight")
    assert "1 parameters, model.layers.1.mlp.up_proj.weight among them, were trained in bf16" in caplog.text
    masters = dict(again.named_masters())
    del reference.masters["model.layers.1.mlp.up_proj.weight"]
    assert_same_masters(again, reference)
    assert_same_bits(masters["model.layers.1.mlp.up_proj.weight"], before.float(), "its master")
    again.detach()
    caplog.clear()
    attach_plainly(model, precision="bf16", fragments=True).detach()  # in other places, with nothing to lose
    assert not caplog.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_follow_the_precision_as_transformers_builds_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """Positions that are added to embeddings do, and rotary frequencies do not; `load` does the same."""
    config = XGLMConfig(
        vocab_size=VOCAB_SIZE, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, dropout=0.0
    )
    precision = "bf16" if dtype == torch.bfloat16 else "fp32"
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    model = make_model(config, dtype=other)
    model.save_pretrained(tmp_path)
    engine = attach_plainly(model, device="checked", precision=precision)
    loaded = attach_plainly(megatrain.load(tmp_path, precision=precision).train(), precision=precision)
    built = AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert [(n, b.dtype) for n, b in model.named_buffers()] == [
        (n, b.dtype) for n, b in built.named_buffers()
    ]
    batches = make_batches(1)
    loss = engine.forward_backward(batches, seeds=[1])
    assert_same_bits(loss, loaded.forward_backward(batches, seeds=[1]), "loss")
    assert_same_gradients(engine, dict(loaded.named_gradients()))


def test_detaching_twice_is_harmless_and_training_a_detached_engine_is_refused() -> None:
    for device in ("cpu", "emulated"):
        _, _, engine, optimizer = start(device=device)
        engine.detach()
        engine.detach()
        with pytest.raises(ModelError, match="detach"):
            engine.forward_backward(make_batches(1))
        with pytest.raises((ModelError, ConfigError)):
            optimizer.step()


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_micro_batches", "lockstep", "num_slots", "precision", "fragments"),
    [
        pytest.param(*rounds, *slots, marks=[] if place == number else [pytest.mark.parity])
        for place, rounds in enumerate([(1, 1), (3, 1), (4, 4), (4, 2), (5, 2)])
        for number, slots in enumerate(
            [(1, "bf16", False), (2, "fp32", False), (3, "bf16", False), (2, "bf16", True), (4, "fp32", True)]
        )
    ],
)
def test_bytes_moved_are_the_program_s(
    num_slots: int, num_micro_batches: int, lockstep: int, precision: str, fragments: bool
) -> None:
    settings: dict[str, Any] = {"num_slots": num_slots, "lockstep": lockstep, "fragments": fragments}
    _, _, engine, optimizer = start(precision=precision, **settings)
    spec = engine.executor.spec
    rounds = [min(lockstep, num_micro_batches - n) for n in range(0, num_micro_batches, lockstep)]
    program = step_program(spec, [[1] * together for together in rounds])
    num_streamed = sum(size.is_streamed for size in spec.sizes)
    num_fetches = program.count("fetch") - len(spec.outer)
    assert num_fetches <= 2 * num_streamed * len(rounds)
    fetched = program.nbytes("fetch") + program.nbytes("load")
    offloaded = program.nbytes("offload")
    for number in range(1, 4):
        engine.forward_backward(make_batches(num_micro_batches, seed=number))
        optimizer.step()
        assert engine.counts.fetch_bytes == number * fetched
        assert engine.counts.offload_bytes == number * offloaded
    assert engine.executor.counts.fetches == 3 * num_fetches
    assert engine.executor.counts.offloads == 3 * (program.count("offload") - len(spec.outer))


def test_the_optimizer_s_class_is_found_under_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="StreamedAdamW is deprecated: use StreamedOptimizer"):
        assert optimizer_module.StreamedAdamW is StreamedOptimizer
