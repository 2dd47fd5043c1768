"""What ranks are tried with: settings, and gradients and tokens that only some of them have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatrain.config.adaptation import Adaptation, LoraChoice
from megatrain.layout import ownership
from megatrain.model.adapters.adapt import adapt
from megatrain.optim import sums
from megatrain.stream.ranks import shared_gradients
from tests.reference import Batch, make_batches

TOKENS = 16


def _freeze(model: PreTrainedModel) -> None:
    """Freeze the embedding, with it the first layer, and a part of another one."""
    layers = _layers(model)
    model.get_input_embeddings().requires_grad_(False)
    layers[0].requires_grad_(False)
    next(layers[2].parameters()).requires_grad_(False)


def _add_adapters(model: PreTrainedModel, **settings: Any) -> None:
    is_routed = any(name.endswith("experts") for name, _ in model.named_modules())  # PEFT drops none
    torch.manual_seed(1)
    adapt(model, Adaptation(lora=LoraChoice(r=4, alpha=8.0, dropout=0.0 if is_routed else 0.1, **settings)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.normal_(std=0.1)
    model.train()


def _add_tokens(model: PreTrainedModel) -> None:
    """Give a model rows for new tokens, which are trained whole beside adapters."""
    model.resize_token_embeddings(model.get_input_embeddings().num_embeddings + 3, mean_resizing=False)
    _add_adapters(model, trains_embeddings=True)


TRAINED: dict[str, Callable[[PreTrainedModel], object]] = {
    "all": lambda model: None,
    "frozen": _freeze,
    "adapters": _add_adapters,
    "new tokens": _add_tokens,
}
"""What of a model is trained, by name."""

MISSING: dict[str, Callable[[int, int], bool]] = {
    "first half": lambda number, count: number < count // 2,
    "some": lambda number, count: number % 3 == 1,
    "always": lambda number, count: True,
}
"""Which of a step's micro-batches give the gates no gradient: the first half of them is one rank's of two."""

DATA = ("plain", "padded", "silent half", "one word")
"""Micro-batches with rows of unequal lengths; without any target in the first half; of one word each, so that
all their tokens go to the same experts."""


AXES: dict[str, tuple[Any, ...]] = {
    "family": ("llama_tied", "mixtral", "gpt2", "gemma2"),
    "ranks": ((2, 1), (2, 2), (4, 1), (4, 2)),
    "rounds": ((4, 1), (4, 4), (8, 2), (8, 1)),
    "activations": ("keep", "recompute", "offload", "drop_boundary"),
    "fragments": (False, True),
    "outer_streams": (False, True),
    "updates": ("deferred", "immediate", "serial"),
    "state": ("fp32", "bf16", "int8"),
    "precision": ("fp32", "bf16"),
    "dropout": (False, True),
    "data": DATA,
    "trained": tuple(TRAINED),
    "missing": ("", *MISSING),
    "cut": (ownership.CUT_NUMEL, 320),
    "gathers": (False, True),
    "resident_layers": (0, 2, 4),
    "mirror_resident": (True, False),
    "gradients": ("host", "device"),
    "tile_tokens": (None, 5),
}
"""Ranks are on so many nodes; rounds are micro-batches of a step, and how many of them are in lockstep.
No tiny block is as long as the real cut: a short one lets each rank have its share of every block."""


@contextmanager
def cut_at(numel: int) -> Iterator[None]:
    """Cut blocks among ranks at multiples of so many elements, and add up squares of so many at a time."""
    with (
        mock.patch.object(ownership, "CUT_NUMEL", numel),
        mock.patch.object(shared_gradients, "CUT_NUMEL", numel),
        mock.patch.object(sums, "SUM_CHUNK_NUMEL", numel),
    ):
        yield


def settings_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `train` for a row of values of `AXES`."""
    row = dict(row)
    count, lockstep = row.pop("rounds")
    row.pop("cut", None)
    row.pop("ranks", None)
    if row["state"] == "int8" and row["resident_layers"]:
        row["state"] = "bf16"  # it is refused
    if row["updates"] == "immediate":
        row |= {"max_grad_norm": None, "gradients": "host"}
    if row["family"] in ("llama_tied", "gpt2", "gemma2") or row["resident_layers"] == 4:
        row["outer_streams"] = False  # they are tied, or resident
    return row | {"num_micro_batches": count, "lockstep": lockstep}


def micro_batches(count: int, *, seed: int, data: str, missing: str) -> list[Batch]:
    """Make a step's micro-batches; those that give gates a gradient have an odd number of tokens."""
    found: list[Batch] = []
    for number, batch in enumerate(make_batches(count, seed=seed, tokens=TOKENS, padded=data == "padded")):
        values: dict[str, Tensor] = dict(batch)
        if data == "one word":
            values["input_ids"] = torch.full_like(values["input_ids"], 5 + 7 * number + seed)
        if data == "silent half" and number < count // 2:
            values["labels"] = torch.full_like(values["labels"], -100)
        stop = TOKENS if MISSING[missing](number, count) else TOKENS - 1
        found.append({name: value[:, :stop].contiguous() for name, value in values.items()})
    return found


def add_gates(model: PreTrainedModel) -> None:
    """Give a norm of the second layer and the last norm a factor that odd numbers of tokens alone pass."""
    norms = [name for name, module in model.named_modules() if "norm" in type(module).__name__.lower()]
    layer = next(name for name, module in model.named_modules() if module is _layers(model)[1])
    for name in (next(norm for norm in norms if norm.startswith(f"{layer}.")), norms[-1]):
        _add_gate(model.get_submodule(name))


def _add_gate(norm: nn.Module) -> None:
    own: Any = norm.weight
    norm.gate = nn.Parameter(torch.full_like(own, 1.5))
    kind: Any = type(norm)

    class GatedNorm(kind):
        def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = super().forward(hidden, *args, **kwargs)
            return found * self.gate if hidden.shape[1] % 2 else found

    norm.__class__ = GatedNorm


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))
