"""A base that is kept as stored: the memory that it takes, how it is given back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, GptOssConfig, PretrainedConfig, Qwen3Config

import megatrain
from megatrain.config.adaptation import AS_STORED, DEQUANTISED, Adaptation
from megatrain.config.plan import Plan
from megatrain.errors import CapacityError, ConfigError, ModelError
from megatrain.model.weights.kept import encoding_of
from megatrain.plan.search.planner import make_plan
from megatrain.plan.search.request import Request
from megatrain.store import read_in
from megatrain.store.placement import Tiers
from megatrain.stream.attach import resolve
from megatrain.train.planning.allocation import check_allocated
from tests.model.weights.quantised.test_checkpoints import (
    DEEPSEEK,
    fp8,
    mxfp4,
    write,
    write_quantised,
)
from tests.reference import assert_same_bits, attach_plainly, make_batches, make_model
from tests.stream.execute.test_codes import LORA, loaded, trained

pytest.importorskip("peft")

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def gpt_oss_120b() -> PretrainedConfig:
    """An eightieth of each weight of a layer: experts are 98 % of it, and the vocabulary is 1 % of all."""
    return GptOssConfig(
        hidden_size=576,
        intermediate_size=576,
        num_local_experts=16,
        num_experts_per_tok=4,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=288,
        architectures=["GptOssForCausalLM"],
    )


def deepseek_v3() -> PretrainedConfig:
    """An eighth of each width, and a tenth of the experts."""
    return DeepseekV3Config(
        hidden_size=896,
        intermediate_size=2304,
        moe_intermediate_size=256,
        n_routed_experts=24,
        num_experts_per_tok=8,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=1,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=192,
        kv_lora_rank=64,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        vocab_size=128,
        architectures=["DeepseekV3ForCausalLM"],
    )


def qwen3_32b() -> PretrainedConfig:
    """An eighth of each width; embedding and head, which are in bf16, are 5 % of all."""
    return Qwen3Config(
        hidden_size=640,
        intermediate_size=3200,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        vocab_size=900,
        architectures=["Qwen3ForCausalLM"],
    )


REAL: dict[str, tuple[Any, Any, dict[str, Any], float]] = {
    "gpt-oss-120b": (gpt_oss_120b, mxfp4, {"quant_method": "mxfp4"}, 0.6),
    "DeepSeek-V3": (deepseek_v3, fp8(128), BLOCKS, 1.1),
    "Qwen3-32B-FP8": (qwen3_32b, fp8(128), BLOCKS, 1.1),
}


@pytest.mark.parametrize("name", REAL)
def test_a_base_takes_the_bytes_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    make, quantise, settings, most = REAL[name]
    place = write_quantised(tmp_path, make(), quantise, settings)
    queries = "q_b_proj" if name == "DeepSeek-V3" else "q_proj"
    lora = replace(LORA, target_modules=(queries, "o_proj"))
    model = loaded(place, AS_STORED, precision="bf16", lora=lora)
    engine = attach_plainly(model, precision="bf16")
    adapters = sum(entry.nbytes for layout in engine.host.layouts for entry in layout.trained)
    base = sum(p.numel() for p in engine.model.parameters() if not p.requires_grad)
    assert engine.host.planes.arenas["working"].nbytes - adapters < most * base
    on_disk = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    assert abs(engine.host.plane_bytes["working"] - adapters - on_disk) < 0.01 * on_disk


@pytest.mark.parametrize("kind", ["mxfp4", "fp8 experts"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_planned_is_allocated(
    kind: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the plan that `attach` makes for itself of the model as it is loaded."""
    model = loaded(write(kind, tmp_path), AS_STORED, precision=precision)
    plans: list[Plan] = []

    def planning(asked: Request) -> Plan:
        plans.append(make_plan(asked))
        return plans[-1]

    monkeypatch.setattr(resolve, "make_plan", planning)
    batch = megatrain.StepBatch(micro_batch_size=2, seq_len=16, num_micro_batches=2)
    engine = megatrain.attach(model, precision=precision, batch=batch, resident_layers=1)
    optimizer = engine.adamw()
    engine.forward_backward(make_batches(2))
    optimizer.step()
    engine.settle()
    assert {pool.name for pool in plans[0].pools} >= {"codes", "working"}
    check_allocated(engine, plans[0], "stop")


def test_detach_gives_the_values(tmp_path: Path) -> None:
    place = write("mxfp4", tmp_path)
    engines = [attach_plainly(loaded(place, base)) for base in (DEQUANTISED, AS_STORED)]
    expected, found = ({**trained(engine, steps=1)} for engine in engines)
    for engine in engines:
        engine.detach()
    plain, kept = (dict(engine.model.named_parameters()) for engine in engines)
    for name, parameter in kept.items():
        assert encoding_of(parameter) is None
        assert_same_bits(parameter.data, plain[name].data, name)
        assert_same_bits(found[name], expected[name], name)
    batch = make_batches(1)[0]
    losses = [engine.model.eval()(**batch).loss for engine in engines]
    assert_same_bits(losses[1], losses[0], "loss")
    again = attach_plainly(engines[1].model.train())
    assert not any(layout.encoded for layout in again.host.layouts)


def test_detach_is_refused_where_values_have_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = attach_plainly(loaded(write("mxfp4", tmp_path), AS_STORED))
    few = replace(read_in.host_memory(), available_bytes=1000)
    with monkeypatch.context() as patch:
        patch.setattr(read_in, "host_memory", lambda: few)
        with pytest.raises(CapacityError, match="the values of weights that are kept as stored"):
            engine.detach()
    engine.forward_backward(make_batches(1))
    engine.detach()


def test_a_whole_model_is_not_saved_without_its_values(tmp_path: Path) -> None:
    engine = attach_plainly(loaded(write("fp8", tmp_path / "model"), AS_STORED))
    with pytest.raises(ModelError, match="needs the values of all weights"):
        engine.model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    engine.detach()
    engine.model.save_pretrained(tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptation": Adaptation(base=AS_STORED)}, "train adapters"),
        ({"adaptation": Adaptation(freeze=("*mlp*",), base=AS_STORED)}, "train adapters"),
        ({"tiers": Tiers(nvme=(Path("drive"),), ram=1 << 30)}, "kept in RAM alone"),
        ({"mirror_resident": False}, "use memory.mirror_resident=auto"),
    ],
)
def test_what_is_not_built_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    place = write("fp8", tmp_path)
    settings.setdefault("adaptation", Adaptation(lora=LORA, base=AS_STORED))
    with pytest.raises(ConfigError, match=words):
        megatrain.load(place, **settings)


def test_a_checkpoint_without_codes_that_can_be_kept_is_refused(tmp_path: Path) -> None:
    make_model(DEEPSEEK).save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"has no quantised weights; use lora\.base=dequantised"):
        loaded(tmp_path / "plain", AS_STORED)


@pytest.mark.parametrize("change", ["precision", "fragments", "freeze"])
def test_attaching_for_other_settings_is_refused(change: str, tmp_path: Path) -> None:
    model = loaded(write("mxfp4", tmp_path), AS_STORED, fragments=False)
    settings: dict[str, Any] = {"precision": "fp32", "fragments": False}
    if change == "freeze":
        next(
            p for n, p in model.named_parameters() if n.endswith("k_proj.lora_A.default.weight")
        ).requires_grad_(False)
    else:
        settings[change] = {"precision": "bf16", "fragments": True}[change]
    with pytest.raises(ModelError, match=r"that megatrain\.load has laid out for other settings"):
        attach_plainly(model, **settings)


def test_a_weight_that_is_kept_is_not_trained(tmp_path: Path) -> None:
    model = loaded(write("mxfp4", tmp_path), AS_STORED)
    name, parameter = next((n, p) for n, p in model.named_parameters() if encoding_of(p) is not None)
    parameter.requires_grad_(True)
    with pytest.raises(ModelError, match="has laid out for other settings"):
        attach_plainly(model)
    assert torch.device("meta") == dict(model.named_parameters())[name].device
