"""Optimizers as data: the one list of them, and that nothing else in the package knows their names."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest

from megatrain.config.optimizers import adamw
from megatrain.config.optimizers.optimizer import Grain, Plane
from megatrain.config.optimizers.registry import DEFAULT, OPTIMIZERS, find
from megatrain.errors import ConfigError
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.ownership import shares, state_shares
from tests.test_imports import modules, parsed

ALL = [each for formats in OPTIMIZERS.values() for each in formats]


def outside() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the package but those of the optimizers themselves."""
    kernels = tuple(f"megatrain.optim.{name}" for name in OPTIMIZERS)
    for name, source in modules().items():
        if not name.startswith(("megatrain.config.optimizers.", *kernels)):
            yield name, parsed(source)


def test_nothing_else_knows_the_name_of_a_plane() -> None:
    planes = {name for each in ALL for name in each.planes}
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, tree in outside()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in planes)
        or (isinstance(node, ast.Attribute) and node.attr in planes)
    ]
    assert not found


def test_an_optimizer_is_found_by_name_and_format() -> None:
    assert [find(each.name, each.state) for each in ALL] == ALL
    assert len({*ALL}) == len({each.rate_key for each in ALL}) == len(ALL)
    assert find(DEFAULT.name, DEFAULT.state) is DEFAULT
    assert copy.deepcopy(DEFAULT) == DEFAULT
    with pytest.raises(ConfigError, match="the optimizer is 'muon'; use adamw"):
        find("muon", "fp32")


def test_bytes_follow_from_the_planes() -> None:
    sizes = BlockBytes(num_split=256, num_state=512, num_scales=2)
    assert [sizes.optimizer_bytes(each) for each in adamw.FORMATS] == [8 * 512, 4 * 512, 2 * 512 + 2 * 2 * 4]
    for each in ALL:
        assert sum(sizes.plane_bytes(each, name) for name in each.planes) == sizes.optimizer_bytes(each)
        assert each.bytes_per_element * 512 == sizes.optimizer_bytes(each)
        masters = 4 * 512
        assert sizes.update_bytes(each) == 2 * (masters + sizes.optimizer_bytes(each)) + sizes.gradient_bytes


@pytest.mark.parametrize("grain", [Grain.ROW, Grain.MATRIX])
def test_what_needs_whole_matrices_is_refused_where_state_is_cut(grain: Grain) -> None:
    coarse = replace(adamw.FP32, name="muon", planes={"momentum": Plane("float32")}, grain=grain)
    sizes = BlockBytes(working_bytes=1 << 20, num_split=1 << 19, num_state=1 << 19)
    with pytest.raises(
        ConfigError, match=f"needs a whole {grain.value} .* several ranks cut its state anywhere"
    ):
        state_shares(shares(sizes, 0, 2), coarse, lambda index: index)


def test_a_format_compresses_what_keeps_the_same_in_more_bytes() -> None:
    found = {
        (small.state, large.state)
        for formats in OPTIMIZERS.values()
        for small in formats
        for large in formats
        if small.compresses(large)
    }
    assert found == {("bf16", "fp32"), ("int8", "fp32"), ("int8", "bf16")}


def test_settings_are_checked_with_their_ranges() -> None:
    DEFAULT.check(DEFAULT.defaults())
    for settings, sentence in (
        ({"lr": -1.0}, "lr is -1.0; use a finite number of 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); each must be in \[0, 1\)"),
        ({"momentum": 0.9}, "adamw has no momentum; it takes lr, weight_decay, betas, eps"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            DEFAULT.check(settings)
