"""A choice: open until it is decided, joined from fields by name, and refused in one sentence."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest

from megatrain.config import apply_overrides, build_config, config_keys
from megatrain.config.choice import AUTO, BOUNDARIES, GRADIENTS, KEYS, SUMS, Choice, Updates
from megatrain.config.policies import POLICY_NAMES
from megatrain.config.read_choice import read_choice
from megatrain.errors import ConfigError

NAMES = [field.name for field in fields(Choice)]


def choice_of(*overrides: str) -> Choice:
    return build_config(apply_overrides({}, ["model.path=m", "data.path=a.txt", *overrides])).choice


def test_a_choice_loads_no_more_than_itself() -> None:
    code = "import sys, megatrain.config.choice; print({'torch', 'pydantic', 'yaml'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_field_can_be_open() -> None:
    assert {name: getattr(Choice(), name) for name in NAMES} == dict.fromkeys(NAMES, "auto")
    assert Choice().given == {}
    assert not Choice().is_resolved


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_with_one_open_field_is_not_resolved(name: str) -> None:
    choice = Choice().with_defaults(3)
    assert choice.is_resolved
    choice.require_resolved("this")
    is_open = replace(choice, **{name: AUTO})
    assert not is_open.is_resolved
    with pytest.raises(ConfigError, match=f"this needs a choice in which nothing is open, but {name} is not"):
        is_open.require_resolved("this")


def test_one_policy_for_all_layers_is_resolved_where_their_number_is_known() -> None:
    choice = replace(Choice().with_defaults(3), activations="keep")  # type: ignore[arg-type]
    assert not choice.is_resolved
    with pytest.raises(ConfigError, match="but activations is not decided"):
        choice.require_resolved("this")
    assert choice.for_layers(3).activations == ("keep",) * 3
    assert choice.for_layers(3).is_resolved
    assert Choice().for_layers(3) == Choice()


def test_defaults_are_the_plainest() -> None:
    assert Choice().with_defaults(3) == Choice(
        num_slots=2,
        num_gradient_buffers=1,
        activations=("recompute",) * 3,
        boundaries="device",
        outer_streams=False,
        fragments=False,
        expert_chunks=1,
        resident_layers=0,
        outer_resident=False,
        mirror_resident=True,
        lockstep=1,
        updates="deferred",
        gradients=("host",) * 3,
        sums="device",
        tiers=frozenset(),
        blocks_in_ram=0,
        weights_in_ram=0,
        head_chunk_tokens=None,
    )
    assert (
        Choice(num_slots=5, lockstep=2).with_defaults(3).given.items()
        >= {
            "num_slots": 5,
            "lockstep": 2,
            "num_gradient_buffers": 2,
        }.items()
    )
    in_parts = Choice(fragments=True, lockstep=2).with_defaults(3, 2)
    assert (in_parts.num_slots, in_parts.num_gradient_buffers) == (3, 3)
    assert Choice(fragments=False).with_defaults(3, 2).num_slots == 2


def test_settings_that_are_not_given_are_open() -> None:
    assert choice_of() == Choice(updates="deferred")
    assert choice_of("optim.updates=auto") == Choice()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_slots", 3),
        ("activations", "keep"),
        ("boundaries", "host"),
        ("activations", "keep_attention"),
        ("fragments", False),
        ("resident_layers", 0),
        ("mirror_resident", False),
        ("lockstep", 1),
        ("num_gradient_buffers", 2),
        ("gradients", "device"),
        ("sums", "host"),
        ("updates", "serial"),
    ],
)
def test_each_setting_is_a_field(field: str, value: Any) -> None:
    overrides = [] if field == "updates" else ["optim.updates=auto"]
    found = choice_of(*overrides, f"{KEYS[field]}={str(value).lower()}")
    assert found.given == {field: value}


def test_the_head_s_chunks_are_a_field() -> None:
    assert choice_of("memory.head_chunk_tokens=64").head_chunk_tokens == 64
    assert choice_of("memory.head_chunk_tokens=0").head_chunk_tokens == AUTO


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("activations", POLICY_NAMES),
        ("boundaries", BOUNDARIES),
        ("gradients", GRADIENTS),
        ("sums", SUMS),
        ("updates", [schedule.value for schedule in Updates]),
    ],
)
def test_settings_know_the_names_of_the_choice(field: str, names: list[str]) -> None:
    assert set(config_keys()[KEYS[field]].kind.split(" | ")) == {"auto", *names}


def test_fields_are_joined() -> None:
    given = Choice(num_slots=3, lockstep=2)
    joined = read_choice(given, {"activations": ["keep", "offload"], "resident_layers": 1})
    assert joined == replace(given, activations=("keep", "offload"), resident_layers=1)
    assert read_choice(None, {}) == Choice()
    assert read_choice(given, {"boundaries": "auto"}) == given


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_slot": 2}, "there is no setting num_slot; did you mean num_slots?"),
        ({"x": 2}, "there is no setting x; a choice has num_slots, num_gradient_buffers, activations, "),
        ({"lockstep": 3}, "lockstep is given twice, in the choice and by itself; keep one"),
        ({"lockstep": "auto"}, "lockstep is given twice"),
        ({"num_slots": 0}, "num_slots is 0; use 1 or more, or auto"),
        ({"num_slots": None}, "num_slots is None; use 1 or more, or auto"),
        ({"num_slots": True}, "num_slots is True; use 1 or more, or auto"),
        ({"num_slots": 2.0}, "num_slots is 2.0; use 1 or more, or auto"),
        ({"resident_layers": -1}, "resident_layers is -1; use 0 or more, or auto"),
        ({"head_chunk_tokens": 0}, "head_chunk_tokens is 0; use 1 or more, or auto"),
        (
            {"activations": "some"},
            "activations is 'some'; use keep, offload, recompute_cheap, keep_attention, recompute or d",
        ),
        ({"activations": ["keep", "some"]}, "activations is 'some'; use keep"),
        ({"boundaries": "disk"}, "boundaries is 'disk'; use device, host, nvme or auto"),
        ({"gradients": "disk"}, "gradients is 'disk'; use host, device, nvme or auto"),
        ({"updates": "late"}, "updates is 'late'; use deferred, immediate, serial or auto"),
        ({"fragments": "yes"}, "fragments is 'yes'; use False, True or auto"),
    ],
)
def test_what_is_no_field_or_value_is_one_sentence(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_choice(Choice(lockstep=2), values)
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        (
            Choice(activations=("keep",)),
            "activations names 1 policies for 3 layers; give one, or one per layer",
        ),
        (
            Choice(resident_layers=4),
            "resident_layers (memory.resident_blocks) is 4, but the model has 3 layers; use at most that",
        ),
    ],
)
def test_a_choice_for_other_layers_is_refused(choice: Choice, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choice.for_layers(3)
    assert str(caught.value) == problem
