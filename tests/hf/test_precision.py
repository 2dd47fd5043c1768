"""A model is trained in the precision that it comes in, with fp32 masters, and saved in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Trainer, TrainingArguments

from megatrain.hf import StreamingTrainer
from megatrain.hf.model.precision import precision_of
from tests.hf.setups import arguments, assert_same_weights, logged, plain, planned, rows, tiny


def dtypes(directory: Path) -> tuple[set[str], str]:
    """Return the dtypes of a saved model's tensors, and the one that its configuration names."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        found = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found, json.loads((directory / "config.json").read_text())["dtype"]


def test_a_model_in_bf16_is_trained_as_with_the_flag(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its first loss is the plain trainer's, which rounds its updates; ours are exact, and saved as bf16."""
    trained: list[Any] = []
    for flag in (False, True):
        model = tiny().to(torch.bfloat16)
        ours = StreamingTrainer(
            model=model,
            args=arguments(tmp_path / str(flag), max_steps=2, bf16=flag),
            train_dataset=rows(),
            megatrain=planned(model),
        )
        assert ours.engine.host.precision.value == "bf16"
        ours.train()
        ours.save_model(str(tmp_path / str(flag)))
        trained.append(ours)
    assert sum("the model is in bf16" in message for message in caplog.messages) == 1
    without, with_flag = trained
    assert logged(without) == logged(with_flag)
    assert_same_weights(*(dict(one.engine.named_masters()) for one in trained))
    assert dtypes(tmp_path / "False") == dtypes(tmp_path / "True") == ({"BF16"}, "bfloat16")
    reference = plain(
        Trainer,
        tiny().to(torch.bfloat16),
        arguments(tmp_path / "plain", max_steps=1),
        train_dataset=rows(),
    )
    reference.train()
    assert logged(reference)[0]["loss"] == logged(without)[0]["loss"]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing. is deprecated:FutureWarning")  # TRL sets it
def test_a_path_is_read_in_the_dtype_of_its_class(tmp_path: Path) -> None:
    """Trainer takes that of the checkpoint, as from_pretrained does; TRL takes fp32, or what it is told."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
    path = tmp_path / "model"
    tiny().to(torch.bfloat16).save_pretrained(path)
    own, of_trl = arguments(tmp_path), arguments(tmp_path, trl.SFTConfig, bf16=False)
    assert precision_of(own, str(path)) == "bf16"
    assert precision_of(of_trl, str(path)) == "fp32"
    for dtype, precision in (("auto", "bf16"), ("bfloat16", "bf16"), (torch.float32, "fp32")):
        of_trl.model_init_kwargs = {"dtype": dtype}
        assert precision_of(of_trl, str(path)) == precision
    config = json.loads((path / "config.json").read_text())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    assert precision_of(own, str(path)) == "bf16"  # as the weights are
    tiny().save_pretrained(path)
    assert precision_of(own, str(path)) == "fp32"


def test_other_dtypes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A few weights in fp32 decide nothing."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    model = tiny().half()
    assert precision_of(args, model) == "fp32"
    assert "the model is in float16: it is trained and saved in fp32" in caplog.text
    model.bfloat16().model.norm.float()
    assert precision_of(args, model) == "bf16"
