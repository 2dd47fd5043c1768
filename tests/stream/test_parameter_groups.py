"""Groups of parameters with rates, betas, eps and decays of their own: bitwise torch's fused AdamW."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatrain.errors import ConfigError
from tests.families import FAMILIES
from tests.products import every_value
from tests.reference import Resident, assert_same_bits, attach_plainly, make_batches, make_model

GROUPS: list[dict[str, Any]] = [
    {"params": ["*.lm_head.*", "lm_head.weight"], "lr": 3e-3, "weight_decay": 0.0},
    {"params": ["model.layers.[01].*"], "betas": (0.7, 0.8), "eps": 1e-5},
    {"params": ["nothing.of.the.model"]},
    {"params": ["model.layers.*", "model.norm.weight"], "lr": 2e-2, "weight_decay": 0.4},
]
"""The embedding is in none: it is not trained."""


@pytest.mark.sampled(2)
@every_value(
    resident_layers=[0, 2, 4],
    updates=["deferred", "immediate", "serial"],
    fragments=[False, True],
    outer_streams=[True, False],
    precision=["fp32", "bf16"],
)
def test_groups_are_torch_s(
    resident_layers: int, updates: str, fragments: bool, outer_streams: bool, precision: str
) -> None:
    model = make_model(FAMILIES["llama"]())
    reference = Resident(model, precision=precision, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.2)
    engine = attach_plainly(
        model,
        device="checked",
        precision=precision,
        resident_layers=resident_layers,
        fragments=fragments,
        outer_streams=outer_streams and resident_layers < 4,
        lockstep=2,
        num_micro_batches=2,
    )
    optimizer = engine.adamw(
        lr=1e-2,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.2,
        groups=GROUPS,
        max_grad_norm=None,
        updates=updates,
    )
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 18, 0, 19]
    by_name = {name: group for group in optimizer.param_groups for name in group["names"]}
    for name, group in zip(reference.parameters, reference.optimizer.param_groups, strict=True):
        own = by_name.get(name)
        keys = ("lr", "betas", "eps", "weight_decay")
        group.update({key: own[key] for key in keys} if own else {"params": []})
    before = dict(engine.named_masters())["model.embed_tokens.weight"].clone()
    for step in range(3):
        batches = make_batches(2, seed=step)
        reference.forward_backward(batches)
        engine.forward_backward(batches)
        optimizer.step()
        reference.step(1.0, None)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9  # as a schedule does
        for group in reference.optimizer.param_groups:
            group["lr"] *= 0.9
    for name, master in engine.named_masters():
        assert_same_bits(master, before if "embed" in name else reference.master(name), name)
    assert optimizer.steps["model.embed_tokens.weight"] == 0


@pytest.mark.parametrize(
    ("groups", "more", "says"),
    [
        ([], {}, "name no parameter that is trained"),
        ([{"params": ["lm_head.weight"], "momentum": 0.9}], {}, "group 0 of parameters has momentum"),
        ([{"params": ["*"], "lr": -1.0}], {}, "lr is -1.0"),
        ([{"params": ["*"]}], {"no_decay": []}, "groups and no_decay are both given"),
        ([{"params": [torch.nn.Parameter(torch.ones(2))]}], {}, "none of the model's"),
    ],
)
def test_groups_that_cannot_be_are_refused(
    groups: list[dict[str, Any]], more: dict[str, Any], says: str
) -> None:
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    with pytest.raises(ConfigError, match=says):
        engine.adamw(groups=groups, **more)


def test_a_parameter_is_in_one_group() -> None:
    """Patterns take what is left; a parameter that is listed again is a mistake."""
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model)
    head: Any = model.lm_head.weight
    with pytest.raises(ConfigError, match=r"parameter lm_head.weight is in more than one group"):
        engine.adamw(groups=[{"params": ["*"]}, {"params": head}])
    optimizer = engine.adamw(groups=[{"params": [("named", head)]}, {"params": ["*"]}])
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 38]


def test_a_group_that_comes_later_is_refused() -> None:
    """Nothing would update its parameters, and nobody would say so."""
    model = make_model(FAMILIES["llama"]())
    optimizer = attach_plainly(model).adamw(groups=[{"params": ["lm_head.weight"]}])
    with pytest.raises(ConfigError, match=r"add_param_group: .* give all groups to engine\.adamw"):
        optimizer.add_param_group({"params": [model.model.embed_tokens.weight]})
    assert len(optimizer.param_groups) == 1


def test_a_pattern_that_names_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A mistyped one would leave its parameters to the next group, at other rates."""
    engine = attach_plainly(make_model(FAMILIES["llama"]()))
    groups: list[dict[str, Any]] = [
        {"params": ["*.LM_head.*", "lm_head.*"], "lr": 3e-3},
        {"params": ["model.*"]},
        {"params": ["*"]},
    ]
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        engine.adamw(groups=groups)
    assert [record.getMessage() for record in caplog.records] == [
        "group 0 of parameters: no parameter of the model is called *.LM_head.*"
    ]


def test_clipping_can_be_changed_between_steps() -> None:
    """To another norm, to none and back; not where blocks are updated before the norm is known."""
    model = make_model(FAMILIES["llama"]())
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    reference = Resident(model, **hyper, weight_decay=0.1)
    engine = attach_plainly(model, device="checked")
    optimizer = engine.adamw(**hyper, max_grad_norm=0.5)
    for step, clip in enumerate((0.5, 0.1, None, 0.2)):
        optimizer.max_grad_norm = clip
        batches = make_batches(1, seed=step)
        reference.forward_backward(batches)
        engine.forward_backward(batches)
        stats = optimizer.step()
        assert stats.grad_norm > 0.5
        reference.step(stats.grad_norm, clip)
    for name, master in engine.named_masters():
        assert_same_bits(master, reference.master(name), name)
    with pytest.raises(ConfigError, match="max_grad_norm is -1"):
        optimizer.max_grad_norm = -1.0
    immediate = attach_plainly(make_model(FAMILIES["llama"]())).adamw(updates="immediate", max_grad_norm=None)
    with pytest.raises(ConfigError, match="updates=immediate cannot clip"):
        immediate.max_grad_norm = 1.0
