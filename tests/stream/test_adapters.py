"""Adapters and frozen weights that stream: equal to resident PEFT, in the bytes that are planned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import megatrain
from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.config.policies import POLICY_NAMES
from megatrain.layout.block_bytes import aligned
from megatrain.model.adapters.adapt import adapt, adapter_tensors
from megatrain.model.adapters.left_out import left_out
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model

peft = pytest.importorskip("peft")

HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


def adapted(family: str, *, dtype: torch.dtype = torch.float32, **lora: Any) -> PreTrainedModel:
    """Make a model with adapters whose second matrices are not zero, so that the first have gradients.

    Of `target_modules` it is given those that it has.
    """
    model = make_model(FAMILIES[family](), dtype=dtype)
    if "target_modules" in lora:
        names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        lora["target_modules"] = tuple(end for end in lora["target_modules"] if end in names)
    torch.manual_seed(1)
    adapt(model, Adaptation(lora=LoraChoice(**{"r": 4, "alpha": 8.0, **lora})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    return model.train()


def assert_same_training(model: PreTrainedModel, steps: int = 2, **settings: Any) -> dict[str, Any]:
    """Train a model streamed and resident, with dropout; return the bytes of the planes on the host."""
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked", num_micro_batches=3, **settings)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(steps):
        batches, seeds = make_batches(3, seed=step, padded=True), [7 * step + n for n in range(3)]
        loss = engine.forward_backward(batches, seeds=seeds)
        assert_same_bits(loss, reference.forward_backward(batches, seeds), "loss")
        gradients = dict(engine.named_gradients())
        assert gradients.keys() == reference.sums.keys()
        for name, gradient in gradients.items():
            assert_same_bits(gradient, reference.sums[name], name)
        optimizer.step()
        reference.step(0.0, None)
    for name, master in engine.named_masters():
        if name in reference.parameters:
            assert_same_bits(master, reference.master(name), name)
    planes = engine.host.plane_bytes
    engine.detach()
    return planes


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"dropout": 0.1},
    "rslora": {"rslora": True, "dropout": 0.1},
    "dora": {"dora": True, "target_modules": ("q_proj", "c_attn", "down_proj")},
    "with head": {"modules_to_save": ("lm_head",), "dropout": 0.1},
}
DENSE = ["llama", "llama_tied", "gpt2", "qwen2", "gemma2"]


@pytest.mark.sampled(3)
@every_value(
    family=DENSE,
    variant=list(VARIANTS),
    activations=list(POLICY_NAMES),
    boundaries=["device", "host"],
    lockstep=[1, 3],
    fragments=[False, True],
)
def test_streamed_adapters_equal_resident_ones(
    family: str,
    variant: str,
    activations: str,
    boundaries: str,
    lockstep: int,
    fragments: bool,
) -> None:
    assert_same_training(
        adapted(family, **VARIANTS[variant]),
        activations=activations,
        boundaries=boundaries,
        lockstep=lockstep,
        fragments=fragments,
        num_slots=2,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("whole", [(), ("embed_tokens",), ("embed_tokens", "lm_head")])
def test_modules_that_are_trained_whole_stream(whole: tuple[str, ...]) -> None:
    model = adapted("llama", dropout=0.1, modules_to_save=whole)
    assert model.lm_head.weight.requires_grad == ("lm_head" in whole)
    assert model.model.embed_tokens.weight.requires_grad == bool(whole)
    assert_same_training(model, outer_streams=True, num_slots=2, lockstep=3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "weights_in_ram"), [("llama", None), ("llama", 2), ("llama_tied", 0)])
def test_what_an_adapted_model_generates_equals_resident(
    family: str, weights_in_ram: int | None, tmp_path: Path
) -> None:
    """PEFT's `generate` calls the model inside the adapters, and so may a loop of one's own."""
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with _quietly():
        model = peft.get_peft_model(make_model(FAMILIES[family]()), config)
    reference = Resident(model, **HYPER)
    tiers = None
    if weights_in_ram is not None:
        tiers = megatrain.Tiers(nvme=(tmp_path,), ram=1 << 30, blocks_in_ram=0, weights_in_ram=weights_in_ram)
    engine = attach_plainly(model, device="checked", tiers=tiers)
    optimizer = engine.adamw(**HYPER, max_grad_norm=None)
    for step in range(2):
        batch = make_batches(1, seed=step)[0]
        found, expected = (
            each.eval().generate(batch["input_ids"], max_new_tokens=3) for each in (model, reference.model)
        )
        assert found.tolist() == expected.tolist()
        reference.model.train()
        loss = model.train().get_base_model()(**batch).loss
        loss.backward()
        assert_same_bits(loss.detach(), reference.forward_backward([batch]), "loss")
        for name, gradient in engine.named_gradients():
            assert_same_bits(gradient, reference.sums[name], name)
        optimizer.step()
        reference.step(0.0, None)
    engine.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_adapters_of_fused_experts_equal_resident_ones(family: str, activations: str) -> None:
    """PEFT adapts whole parameters there, by parametrizations, which streamed weights cannot have."""
    model = adapted(family)
    assert any("experts" in name and "lora_A" in name for name, _ in model.named_parameters())
    assert_same_training(model, activations=activations)
    assert not any("_activate_lora" in vars(module) for module in model.modules())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "llama_tied", "gpt2"])
def test_loaded_adapters_begin_as_peft_s_and_take_what_is_planned(
    family: str, precision: str, tmp_path: Path
) -> None:
    """The base takes its working weights alone: 2 bytes per parameter in bf16, and no other plane."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    make_model(FAMILIES[family]()).to(dtype).save_pretrained(tmp_path)
    target = "c_attn" if family == "gpt2" else "q_proj"
    lora = LoraChoice(r=4, alpha=8.0, dora=family == "llama", target_modules=(target,))
    model = megatrain.load(tmp_path, precision=precision, adaptation=Adaptation(lora=lora), seed=3)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    own = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        name for name, _ in model.named_parameters() if "lora_" in name
    }
    for name, value in base.named_parameters():
        assert_same_bits(own[name].data, value.data, name)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_dora=lora.dora, target_modules=list(lora.target_modules), task_type="CAUSAL_LM"
    )
    with pytest.warns(UserWarning, match="fan_in") if family == "gpt2" else _no_warnings():
        theirs = peft.get_peft_model(base, config)
    resident = dict(theirs.get_base_model().named_parameters())
    for name, value in model.named_parameters():
        if "lora_B" in name or (precision == "fp32" and "magnitude" in name):
            assert_same_bits(value.data, resident[name].data, name)
        elif "magnitude" in name:  # PEFT's went through bf16
            torch.testing.assert_close(value.data, resident[name].data, rtol=2**-8, atol=0)
        if "lora_A" in name:  # other draws of the same distribution
            limit = resident[name].shape[1] ** -0.5
            assert value.abs().max() <= limit
            assert float(value.detach().std()) == pytest.approx(limit / 3**0.5, rel=0.2)
    engine = attach_plainly(model.train(), device="checked", precision=precision)
    optimizer = engine.adamw(**HYPER)
    engine.forward_backward(make_batches(1))
    optimizer.step()
    engine.settle()
    trained = sum(aligned(p.numel()) for p in model.parameters() if p.requires_grad)
    frozen = sum(aligned(p.numel()) for p in model.parameters() if not p.requires_grad)
    found = {name: nbytes for name, nbytes in engine.host.plane_bytes.items() if nbytes}
    adapters = dict.fromkeys(("exp_avg", "exp_avg_sq", "gradient"), 4 * trained)
    assert found == {"working": dtype.itemsize * frozen + 4 * trained} | adapters


def _no_warnings() -> Any:
    return pytest.MonkeyPatch.context()


def test_saved_adapters_come_back(tmp_path: Path) -> None:
    """Those of PEFT, in PEFT's own files, with ranks that no setting of ours gives."""
    make_model(FAMILIES["llama_tied"]()).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        rank_pattern={"layers.1.self_attn.q_proj": 2},
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    theirs.save_pretrained(tmp_path / "adapter")
    ours = megatrain.load(tmp_path / "adapter")
    ids = make_batches(1)[0]["input_ids"]
    assert_same_bits(ours(ids).logits, theirs.eval()(ids).logits, "logits")
    names = adapter_tensors(ours)
    assert len(names) == 4 * 2 * 2
    broken = {key: torch.zeros(1) for key in names}
    save_file(broken, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(megatrain.MegatrainError, match=r"is \[1\], and the model's is \[4, 32\]"):
        megatrain.load(tmp_path / "adapter")
    save_file({**broken, "other": torch.zeros(1)}, tmp_path / "adapter/adapter_model.safetensors")
    with pytest.raises(megatrain.MegatrainError, match="has, for which the model has no place, other"):
        megatrain.load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("adaptation", "words"),
    [
        (Adaptation(freeze=("nothing*",)), "train.freeze has 'nothing.', which is the name of no parameter"),
        (Adaptation(freeze=("*",)), "leave no parameter to train"),
        (Adaptation(lora=LoraChoice(r=4, alpha=8.0, modules_to_save=("hed",))), "'hed', which is no module"),
        (
            Adaptation(lora=LoraChoice(r=4, alpha=8.0, target_modules=("nose",))),
            "target_modules has 'nose', which is the end of no module's name; the model has q_proj, k_proj",
        ),
        (
            Adaptation(lora=LoraChoice(r=4, alpha=8.0, target_modules=("q_proj", "gate_prj"))),
            "has 'gate_prj', which is the end of no module's name; the model has gate_proj",
        ),
        (
            Adaptation(lora=LoraChoice(r=4, alpha=8.0, target_modules=("proj",))),
            "has 'proj', which is the end of no module's name",
        ),
        (
            Adaptation(
                lora=LoraChoice(
                    r=4, alpha=8.0, target_modules=("lm_head", "q_proj"), modules_to_save=("lm_head",)
                )
            ),
            "lm_head is in lora.modules_to_save and has an adapter",
        ),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(adaptation: Adaptation, words: str) -> None:
    with pytest.raises(megatrain.MegatrainError, match=words):
        adapt(make_model(FAMILIES["llama"]()), adaptation)


def test_names_by_which_peft_knows_experts_are_taken() -> None:
    """Mixtral's files have w1, w2 and w3 of each expert, and its modules have none of them."""
    model = make_model(FAMILIES["mixtral"]())
    adapt(model, Adaptation(lora=LoraChoice(r=4, alpha=8.0, target_modules=("q_proj", "w1", "w2", "w3"))))
    assert any("experts" in name and "lora_A" in name for name, _ in model.named_parameters())
    model = make_model(FAMILIES["mixtral"]())
    lora = LoraChoice(r=4, alpha=8.0, target_modules=("q_proj", "w1", "w2", "w3", "w4"))
    with pytest.raises(megatrain.MegatrainError, match="has 'w4', which is the end of no module's name"):
        adapt(model, Adaptation(lora=lora))


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", ""),
        ("mixtral", ""),
        ("gpt_oss", "puts no adapter on experts (mlp.experts.gate_up_proj, mlp.experts.down_proj): PEFT has"),
        ("deepseek_v3", "puts no adapter on linear layers (mlp.gate_proj, mlp.up_proj, mlp.down_proj, "),
    ],
)
def test_what_all_linear_leaves_out_is_named(family: str, parts: str) -> None:
    """PEFT has a table of families; in DeepSeek's, the names of the dense MLP mean experts."""
    found = left_out(adapted(family))
    assert found == "" if not parts else parts in found, found


def test_adapters_after_attach_are_refused_with_the_way_that_is_exact() -> None:
    """A step of the whole model, then adapters beside what it has trained: as resident PEFT does it."""
    model = make_model(FAMILIES["llama"]())
    reference = Resident(model, **HYPER)
    engine = attach_plainly(model, device="checked")
    batches = make_batches(1)
    engine.forward_backward(batches)
    reference.forward_backward(batches)
    engine.adamw(**HYPER, max_grad_norm=None).step()
    reference.step(0.0, None)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def add(changed: PreTrainedModel) -> None:
        torch.manual_seed(5)
        with _quietly():
            peft.get_peft_model(changed, config, autocast_adapter_dtype=False)

    again = megatrain.reattach(engine, add)
    assert again.choice == engine.choice
    with pytest.raises(megatrain.MegatrainError, match="was detached"):
        engine.forward_backward(batches)
    add(reference.model)
    resident = Resident(reference.model, **HYPER)
    optimizer = again.adamw(**HYPER, max_grad_norm=None)
    for step in range(2):
        batches = make_batches(1, seed=step)
        assert_same_bits(again.forward_backward(batches), resident.forward_backward(batches), "loss")
        optimizer.step()
        resident.step(0.0, None)
    assert len(resident.parameters) == 4 * 2 * 2
    for name, master in again.named_masters():
        if name in resident.parameters:
            assert_same_bits(master, resident.master(name), name)
    third = attach_plainly(make_model(FAMILIES["llama"]()), device="checked")
    add(third.model)
    with pytest.raises(megatrain.MegatrainError, match=r"or in megatrain\.reattach"):
        third.adamw(**HYPER)
    third.close()


@contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield
