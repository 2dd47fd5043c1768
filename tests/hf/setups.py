"""Small models, rows and arguments of trainers, the same for a plain trainer and ours."""

from __future__ import annotations

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

from megatrain.config.choice import Choice
from megatrain.hf import MegatrainArguments
from megatrain.model.blocks import find_blocks, group_layers
from tests.families import FAMILIES, VOCAB_SIZE
from tests.reference import assert_same_bits, make_model

ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 3,
    "gradient_accumulation_steps": 4,
    "num_train_epochs": 1,
    "use_cpu": True,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "max_grad_norm": 0.0,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "warmup_steps": 1,
}
"""22 rows are 11 micro-batches: an epoch has three steps, the last with 3 of them. Nothing is clipped."""


def rows(count: int = 22, seed: int = 0) -> list[dict[str, Tensor]]:
    """Make rows of random tokens, all of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (count, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer whose words are the numbers of the vocabulary."""
    words = models.WordLevel({str(number): number for number in range(VOCAB_SIZE)}, unk_token="0")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="1", eos_token="1", pad_token="2")


def arguments(directory: Path, kind: Any = TrainingArguments, **changes: Any) -> Any:
    """Make the arguments of a trainer."""
    return kind(**{**ARGUMENTS, "output_dir": str(directory), **changes})


def planned(model: PreTrainedModel, **fields: Any) -> MegatrainArguments:
    """Decide everything, the plainest way but for `fields`: tests wait for no plan."""
    device = fields.pop("device", "checked")
    layers = group_layers(find_blocks(model, fragments=bool(fields.get("fragments"))))
    choice = Choice(**fields).with_defaults(len(layers), max(map(len, layers)))
    return MegatrainArguments(choice=choice, device=device)


class Padded(torch.optim.AdamW):
    """torch's AdamW on parameters padded to multiples of 64: its fused kernel rounds the last ones else."""

    def __init__(self, groups: list[dict[str, Any]], **kwargs: Any) -> None:
        self.theirs = [group["params"] for group in groups]
        padded = [{**g, "params": [nn.Parameter(_pad(p)) for p in g["params"]]} for g in groups]
        super().__init__(padded, **{**kwargs, "fused": True})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the padded parameters with the gradients of the model's, and copy them back."""
        for group, theirs in zip(self.param_groups, self.theirs, strict=True):
            for padded, parameter in zip(group["params"], theirs, strict=True):
                padded.grad = None if parameter.grad is None else _pad(parameter.grad)
        super().step()
        for group, theirs in zip(self.param_groups, self.theirs, strict=True):
            for padded, parameter in zip(group["params"], theirs, strict=True):
                parameter.copy_(padded[: parameter.numel()].view(parameter.shape))


def _pad(tensor: Tensor) -> Tensor:
    flat = torch.zeros(-(-tensor.numel() // 64) * 64)
    flat[: tensor.numel()] = tensor.detach().reshape(-1)
    return flat


def plain(
    kind: Any,
    model: PreTrainedModel,
    args: TrainingArguments,
    norms: Any = None,
    **kwargs: Any,
) -> Trainer:
    """Make a plain trainer of a resident copy of `model`, whose AdamW is exact for every shape.

    Args:
        kind: Its class.
        model: Not changed.
        args: Of the trainer.
        norms: Clip the steps by these norms in place of torch's.
        **kwargs: Of the trainer.
    """

    class Exact(kind):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
            _, kwargs = Trainer.get_optimizer_cls_and_kwargs(args, model)
            return Padded, kwargs

        def _clip_grad_norm(self, model: Any) -> Any:
            if norms is None:
                return super()._clip_grad_norm(model)
            norm = torch.tensor(norms[self.state.global_step])
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
            return norm

    Exact.__name__ = kind.__name__
    return Exact(model=copy.deepcopy(model), args=args, **kwargs)


def tiny(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Make a model of a few thousand parameters."""
    return make_model(FAMILIES[family](), seed=seed)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Return copies of a trainer's weights, after every update."""
    engine = getattr(trainer, "engine", None)
    if engine is not None:
        engine.sync()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def assert_same_weights(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert that two models have the same bits."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_same_bits(value, theirs[name], name)


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """Return what a trainer has logged, without times and norms."""
    left_out = ("runtime", "per_second", "grad_norm")
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in left_out)}
        for entry in trainer.state.log_history
    ]


def norms_of(trainer: Trainer) -> list[float]:
    """Return the norms that a trainer has logged."""
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def train_both(
    kinds: tuple[Any, Any, Any],
    directory: Path,
    model: PreTrainedModel,
    fields: dict[str, Any],
    data: dict[str, Any],
    **settings: Any,
) -> tuple[Trainer, Any]:
    """Train with a plain class on a resident copy, and with ours.

    Args:
        kinds: The plain class, ours, and that of their arguments.
        directory: Of their outputs, `plain` and `ours`.
        model: Is streamed.
        fields: As in `planned`.
        data: Keywords of both trainers.
        **settings: As in `arguments`.
    """
    kind, our_kind, config = kinds
    reference = plain(kind, model, arguments(directory / "plain", config, **settings), **data)
    reference.train()
    args = arguments(directory / "ours", config, **settings)
    ours = our_kind(model=model, args=args, megatrain=planned(model, **fields), **data)
    ours.train()
    return reference, ours


def assert_equal(reference: Trainer, ours: Any, names: Collection[str] = ("loss",)) -> None:
    """Assert that all that is logged, `names` among it, and the weights have the same bits."""
    theirs = logged(reference)
    assert set(names) <= theirs[0].keys()
    losses = [entry["loss"] for entry in theirs if "loss" in entry]
    assert len(set(losses)) == len(losses) > 1
    assert logged(ours) == theirs
    assert norms_of(ours) == pytest.approx(norms_of(reference), rel=1e-6)
    assert_same_weights(weights(ours), weights(reference))
