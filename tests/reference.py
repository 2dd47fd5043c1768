"""The resident reference: ordinary PyTorch, which streaming must equal bit for bit."""

from __future__ import annotations

import copy
import functools
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

import megatrain
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.read_choice import read_choice
from megatrain.model.blocks import find_blocks, group_layers
from megatrain.model.shares import count_targets
from megatrain.model.weights.parts import maker_of
from megatrain.stream.engine import Engine
from tests.families import VOCAB_SIZE

Batch = Mapping[str, Any]


def make_model(
    config: PretrainedConfig, seed: int = 0, *, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Build a random resident model in training mode, its norms and biases moved off their defaults.

    A small one is built once per process, and copied: that takes a fifth of the time.
    """
    key = (repr(sorted(vars(config).items(), key=str)), type(config), seed, dtype, torch.get_default_device())
    if key not in _BUILT:
        model = _build(config, seed, dtype)
        if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST_KEPT:
            return model
        if len(_BUILT) == _MOST_KEPT:
            _BUILT.pop(next(iter(_BUILT)))
        _BUILT[key] = twin(model), torch.get_rng_state()
    model, state = _BUILT[key]
    torch.manual_seed(seed)  # of every device
    torch.set_rng_state(state)
    for name, value in copy.deepcopy(vars(model.config)).items():
        if vars(config).get(name) != value:  # building decides on it, such as on the attention
            vars(config)[name] = value
    return twin(model, config)


_BUILT: dict[Any, tuple[PreTrainedModel, Tensor]] = {}
"""Models of configurations and seeds, each with the state of torch's generator after it."""

_LARGEST_KEPT = 1 << 18
"""Parameters of a model that is kept."""

_MOST_KEPT = 64


def _build(config: PretrainedConfig, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = maker_of(config).from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape).to(parameter.dtype))
    return model.train()


def twin(model: PreTrainedModel, config: PretrainedConfig | None = None) -> PreTrainedModel:
    """Copy a model deeply; its hundreds of empty containers, the most of a tiny one, at once.

    Args:
        model: What is copied.
        config: That the copy is to hold, as a model does that was built from it: `torch.compile` tells models
            with other objects apart. None: a copy too.
    """
    held_as: dict[int, Any] = {
        id(held): type(held)()
        for module in model.modules()
        for held in vars(module).values()
        if type(held) in (OrderedDict, dict, set) and not held
    }
    if config is not None:
        held_as[id(model.config.get_text_config())] = config.get_text_config()
        held_as[id(model.config)] = config
    return copy.deepcopy(model, held_as)


def make_batches(
    num: int, *, seed: int = 0, rows: int = 2, tokens: int = 16, padded: bool = False
) -> list[Batch]:
    """Make random micro-batches; padded ones have a padded tail of a different length in every row."""
    generator = torch.Generator().manual_seed(seed + 1000)
    batches: list[Batch] = []
    for _ in range(num):
        ids = torch.randint(3, VOCAB_SIZE, (rows, tokens), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if padded:
            mask = torch.ones_like(ids)
            for row in range(rows):
                stop = tokens - 3 - 2 * row
                mask[row, stop:] = 0
                batch["input_ids"][row, stop:] = 0
                batch["labels"][row, stop:] = -100
            batch["attention_mask"] = mask
        batches.append(batch)
    return batches


def attach_plainly(model: PreTrainedModel, **settings: Any) -> Engine:
    """Attach with every choice spelled out: what `settings` do not give is the plainest that there is.

    Where all layers are resident, the outer blocks are too. `num_micro_batches` stands for the whole batch,
    and `tile_tokens` for one of rows that are longer than a tile.
    """
    choice, number = settings.pop("choice", None), settings.pop("num_micro_batches", 1)
    runs, tile = settings.pop("num_runs", 1), settings.pop("tile_tokens", None)
    batch = StepBatch(
        micro_batch_size=1,
        seq_len=1 + (tile or 0),
        num_micro_batches=number,
        num_runs=runs,
        tile_tokens=tile,
    )
    settings.setdefault("batch", batch)
    given = {name: settings.pop(name) for name in _FIELDS & settings.keys()}
    if choice is None:
        layers = group_layers(find_blocks(model, fragments=bool(given.get("fragments"))))
        given.setdefault("outer_resident", given.get("resident_layers", 0) == len(layers))
        choice = read_choice(None, given).with_defaults(len(layers), max(map(len, layers)))
    return megatrain.attach(model, choice, **settings)


_FIELDS = {field.name for field in fields(Choice)} - {"tiers"}


class Resident:
    """A resident model with fp32 AdamW, each parameter zero-padded to a multiple of 64 elements.

    The padding is the oracle's: torch's fused CPU kernel rounds a parameter's last few elements otherwise.
    With `precision="bf16"` the model computes with bf16 weights, rounded from the fp32 masters; frozen ones,
    which have none, are rounded as torch does, and what transformers keeps in fp32 stays. With `num_runs`
    gradients add up in runs, and these by a tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        precision: str = "fp32",
        num_runs: int = 1,
        decays: Callable[[str, nn.Parameter], bool] = lambda name, p: (
            p.ndim >= 2 and not name.endswith("bias")
        ),
        **hyper: Any,
    ) -> None:
        self.model = twin(model)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.masters = {
            name: padded_parameter(parameter.detach().float()) for name, parameter in self.parameters.items()
        }
        if precision == "bf16":
            is_mixed = len({parameter.dtype for parameter in self.model.parameters()}) > 1
            kept = [rf"(^|\.){name}($|\.)" for name in self.model._keep_in_fp32_modules_strict or ()]
            for name, parameter in self.model.named_parameters():
                is_kept = is_mixed or any(re.search(pattern, name) for pattern in kept)
                if parameter.dtype == torch.float32 and not is_kept:
                    rounds = round_half_up if parameter.requires_grad else Tensor.bfloat16
                    parameter.data = rounds(parameter.data)
        decay = hyper.pop("weight_decay", 0.01)
        groups = [
            {"params": [self.masters[name]], "weight_decay": decay if decays(name, parameter) else 0.0}
            for name, parameter in self.parameters.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, fused=True, **hyper)
        self.sums: dict[str, Tensor] = {}
        self._num_runs = num_runs

    def to(self, device: str | torch.device) -> None:
        """Compute on a device from now on; masters stay on the host."""
        self.model.to(device)
        self.model.tie_weights()  # some kinds of device make new parameters, which are not tied
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}

    def forward_backward(self, batches: Sequence[Batch], seeds: Sequence[int] | None = None) -> Tensor:
        """Run ordinary gradient accumulation, normalised over the step's tokens; gradients add up in fp32."""
        total = sum(count_targets(batch) for batch in batches)
        losses = []
        length = len(batches) // self._num_runs
        assert length * self._num_runs == len(batches)
        of_runs: list[dict[str, Tensor]] = []
        for number, batch in enumerate(batches):
            if number % length == 0:
                of_runs.append({})
            sums = of_runs[-1]
            if seeds is not None:
                torch.manual_seed(seeds[number])
            self.model.zero_grad()
            loss = loss_in_step(self.model, batch, torch.tensor(total), len(batches))
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in self.parameters.items():
                if parameter.grad is None:
                    continue
                if name in sums:
                    sums[name] += parameter.grad.float()
                else:
                    sums[name] = parameter.grad.float().clone()
        self.sums = {
            name: tree_sum([sums.get(name, torch.zeros(parameter.shape)) for sums in of_runs])
            for name, parameter in self.parameters.items()
            if any(name in sums for sums in of_runs)
        }
        if len(batches) > 1:  # complete gradients are rounded to the working dtype once
            for name, parameter in self.parameters.items():
                if name in self.sums:
                    self.sums[name] = self.sums[name].to(parameter.dtype).float()
        return functools.reduce(torch.add, losses)

    def norm(self) -> float:
        """Return torch's own global norm of the gradients."""
        return float(torch.nn.utils.get_total_norm(list(self.sums.values())))

    def step(self, grad_norm: float, max_grad_norm: float | None) -> None:
        """Clip by `grad_norm` as torch does, and apply AdamW."""
        for name, master in self.masters.items():
            master.grad = padded_parameter(self.sums[name]).data if name in self.sums else None
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                list(self.masters.values()), max_grad_norm, torch.tensor(grad_norm)
            )
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                value = self.masters[name][: parameter.numel()].view(parameter.shape)
                parameter.copy_(value if parameter.dtype == torch.float32 else round_half_up(value))

    def master(self, name: str) -> Tensor:
        """Return a parameter's fp32 value."""
        parameter = self.parameters[name]
        return self.masters[name].detach()[: parameter.numel()].view(parameter.shape)


def loss_in_step(model: PreTrainedModel, batch: Batch, total: Tensor, num_micro_batches: int) -> Tensor:
    """Return a micro-batch's part of a step's loss: of `total` tokens, and of the mean of routers' losses."""
    if num_micro_batches == 1:
        loss: Tensor = model(**batch).loss
        return loss
    if not getattr(model.config, "output_router_logits", False):
        loss = model(**batch, num_items_in_batch=total).loss
        return loss
    output = model(**{key: value for key, value in batch.items() if key != "labels"})
    vocab_size = output.logits.shape[-1]  # with new tokens, if it has any
    of_tokens: Tensor = model.loss_function(
        output.logits, batch["labels"], vocab_size, num_items_in_batch=total
    )
    return of_tokens + model.config.router_aux_loss_coef * output.aux_loss / num_micro_batches


def round_half_up(master: Tensor) -> Tensor:
    """Round fp32 to bf16 as the split master does: half a bf16 ulp up in magnitude, then truncation."""
    bits = master.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two fp32 or bf16 tensors are equal, NaN to NaN, and say by how much they are not."""
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    if not torch.equal(actual, expected):
        wrong = (actual != expected).sum().item()
        error = (actual.float() - expected.float()).abs().max().item()
        raise AssertionError(f"{what}: {wrong} of {actual.numel()} differ, max |diff| {error:.3g}")


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors up by a balanced binary tree."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree_sum(parts[:half]) + tree_sum(parts[half:])


def padded_parameter(tensor: Tensor) -> nn.Parameter:
    """Return a tensor, flat, with zeros up to whole groups of 64."""
    flat = torch.zeros(-(-tensor.numel() // 64) * 64)
    flat[: tensor.numel()] = tensor.reshape(-1)
    return nn.Parameter(flat)
