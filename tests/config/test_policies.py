"""The registry of activation policies is sound, and help and documentation say all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import config_keys
from megatrain.config.policies import (
    BASES,
    COUNTED,
    DROP_BOUNDARY,
    FILLING,
    KEEP,
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    RECOMPUTE_CHEAP,
    Policy,
    read_policy,
)
from megatrain.errors import ConfigError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_help_and_pages_say_every_policy(policy: Policy) -> None:
    assert f"{policy.stays} (`{policy.name}`)" in config_keys()["memory.activations"].description
    assert f"| `{policy.name}` |" in (DOCS / "design.md").read_text(encoding="utf-8")
    assert f"`{policy.name}`" in (DOCS / "planning.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_a_policy_that_runs_as_another_keeps_the_same(policy: Policy) -> None:
    other = POLICIES[policy.counted_as]
    assert other.counted_as == other.name
    assert (policy.reruns, policy.keeps_products, policy.keeps_attention) == (
        other.reruns,
        other.keeps_products,
        other.keeps_attention,
    )
    assert policy.reruns or policy.keeps_boundary


def test_what_the_search_begins_and_goes_on_with() -> None:
    assert BASES == (RECOMPUTE, DROP_BOUNDARY, OFFLOAD, KEEP)
    assert FILLING[-1] is KEEP
    assert {KEEP.name, RECOMPUTE.name} <= set(COUNTED)


def test_boundaries_leave_the_device_where_a_layer_runs_again() -> None:
    assert [name for name, policy in POLICIES.items() if policy.leaves_device(1, "device")] == ["offload"]
    elsewhere = [name for name, policy in POLICIES.items() if policy.leaves_device(1, "host")]
    assert elsewhere == [n for n, p in POLICIES.items() if p is not KEEP and p is not DROP_BOUNDARY]
    assert DROP_BOUNDARY.leaves_device(0, "host"), "the first layer's input cannot be made again"
    assert DROP_BOUNDARY.drops(1)
    assert not DROP_BOUNDARY.drops(0)


def test_only_policies_that_keep_products_are_refused_to_compiled_layers() -> None:
    refused = [policy for policy in POLICIES.values() if policy.compile_problem]
    assert refused == [policy for policy in POLICIES.values() if policy.reruns and policy.keeps_products]
    assert RECOMPUTE_CHEAP.compile_problem.startswith(
        "activations=recompute_cheap keeps the results of matrix products"
    )


def test_a_name_that_is_none_is_refused() -> None:
    assert read_policy("keep", "activations") is KEEP
    with pytest.raises(ConfigError, match=r"^activations is 'kept'; use keep, offload, .* or drop_boundary$"):
        read_policy("kept", "activations")
