"""Draws the settings of a run from a seed, as plain JSON values, what happens in it included."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.training.random_search.families import PACKED, names
from megatrain.config.policies import POLICY_NAMES
from tests.families import FAMILIES

NUM_LAYERS = 4

PLACES = ("layer", "first leaf", "last leaf", "norm", "head", "embedding")
"""Modules on which a hook throws."""
HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)

Settings = dict[str, Any]


def draw(seed: int) -> Settings:
    """Draw the settings of a run."""
    chance = random.Random(seed)
    family = chance.choice(names() if chance.random() < 0.6 else list(FAMILIES))
    is_lora = chance.random() < 0.2
    num_runs = chance.choice((1, 1, 1, 1, 2, 4))
    settings: Settings = {
        "seed": seed,
        "family": family,
        "dropout": chance.random() < 0.25,
        "precision": chance.choice(("fp32", "fp32", "bf16")),
        "device": chance.choice(("cpu", "checked", "checked", "emulated")),
        "lora": _lora(chance, family) if is_lora else None,
        "frozen": [] if is_lora else _frozen(chance),
        "moments": "fp32",
        "head_chunk_tokens": chance.choice((1, 5, 7, 16)) if chance.random() < 0.25 else None,
        "num_runs": num_runs,
        "num_micro_batches": num_runs * chance.choice((1, 2, 3, 4) if num_runs == 1 else (1, 2)),
        "data": _data(chance, family),
        "adamw": {
            "lr": 1e-2,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": chance.choice((0.0, 0.1)),
            "max_grad_norm": chance.choice((None, 0.5, 1000.0)),
        },
        "tiers": _tiers(chance),
    }
    if settings["tiers"] is None and chance.random() < 0.1:
        settings["moments"] = chance.choice(("bf16", "int8"))
    settings["choice"] = _choice(chance, settings)
    if settings["choice"]["updates"] == "immediate":
        settings["adamw"]["max_grad_norm"] = None
    settings["events"] = _events(chance, settings)
    return settings


def _lora(chance: random.Random, family: str) -> dict[str, Any] | None:
    """Draw adapters; PEFT has none for some families."""
    if "mamba" in family:
        return None
    return {
        "r": chance.choice((2, 4)),
        "target_modules": "all-linear",
        "use_dora": chance.random() < 0.2 and family in ("llama", "llama_tied", "qwen2", "gemma2", "olmo2"),
        "lora_dropout": chance.choice((0.0, 0.1)),
        "modules_to_save": chance.choice((None, None, ["lm_head"])),
    }


def _frozen(chance: random.Random) -> list[str]:
    """Draw parts of names of parameters that are frozen when the model is attached."""
    if chance.random() < 0.7:
        return []
    return chance.choice((["embed"], ["layers.0."], ["layers.0.", "embed"], ["norm"], ["lm_head"], ["mlp"]))


def _data(chance: random.Random, family: str) -> dict[str, Any]:
    kind = chance.choice(("plain", "padded", "packed" if family in PACKED else "plain"))
    unequal = chance.random() < 0.5
    return {
        "kind": kind,
        "rows": chance.choice((1, 2, 3)),
        "tokens": [chance.choice((5, 8, 11, 16, 24)) for _ in range(4)] if unequal else [16] * 4,
    }


def _tiers(chance: random.Random) -> dict[str, Any] | None:
    if chance.random() < 0.75:
        return None
    state, weights = chance.choice((0, 2, None)), chance.choice((0, 3, None))
    if state is not None and weights is not None:
        weights = max(state, weights)
    return {"drives": chance.choice((1, 2)), "blocks_in_ram": state, "weights_in_ram": weights}


def _choice(chance: random.Random, settings: Settings) -> dict[str, Any]:
    """Draw a choice; numbers of slots and gradient buffers are those beyond a layer's fragments."""
    on_drives = settings["tiers"] is not None
    updates = chance.choice(("deferred", "deferred", "serial", "immediate"))
    sums = "host" if settings["num_runs"] == 1 and chance.random() < 0.25 else "device"
    places: tuple[str, ...] = ("host", "device", "nvme") if on_drives else ("host", "device")
    if updates == "immediate" or sums == "host":
        places = ("host",)
    residents = 0 if on_drives else chance.choice((0, 0, 0, 1, 2, 4))
    outer = chance.choice(("stays", "stays", "resident", "streams"))
    return {
        "extra_slots": chance.choice((0, 1, 1, 2)),
        "extra_buffers": chance.choice((0, 0, 1)),
        "activations": _per_layer(chance, POLICY_NAMES),
        "boundaries": chance.choice(("device", "host", "nvme" if on_drives else "host")),
        "fragments": chance.random() < 0.4,
        "resident_layers": residents,
        "outer_resident": residents == NUM_LAYERS or (outer == "resident" and not on_drives),
        "outer_streams": outer == "streams" and residents < NUM_LAYERS,
        "lockstep": chance.choice((1, 2, 3, 4)),
        "updates": updates,
        "gradients": _per_layer(chance, places),
        "sums": sums,
    }


def _per_layer(chance: random.Random, values: Sequence[str]) -> list[str]:
    if chance.random() < 0.4:
        return [chance.choice(values)] * NUM_LAYERS
    return [chance.choice(values) for _ in range(NUM_LAYERS)]


def _events(chance: random.Random, settings: Settings) -> list[dict[str, Any]]:
    events = [_step(chance, settings, 0)]
    for number in range(1, chance.choice((2, 3, 4))):
        for _ in range(chance.choice((0, 1, 1, 2))):
            events.append(_between(chance, settings, number))
        events.append(_step(chance, settings, number))
    if chance.random() < 0.3:
        events.append(_between(chance, settings, 90))
    return events


def _step(chance: random.Random, settings: Settings, number: int) -> dict[str, Any]:
    hows = ["engine", "engine", "engine", "losses"]
    if settings["num_runs"] == 1:
        hows += ["hand", "split"]
    return {
        "do": "step",
        "how": chance.choice(hows),
        "data": number,
        "reads": chance.random() < 0.6,
        "compares": chance.random() < 0.5,
    }


def _between(chance: random.Random, settings: Settings, number: int) -> dict[str, Any]:
    what = chance.choice(
        (
            *("throw", "throw", "throw", "reconfigure", "reconfigure", "reattach", "reattach", "freeze"),
            *("evaluate", "generate", "infinite", "zero_grad", "lr", "state_dict", "save_load"),
        )
    )
    match what:
        case "throw":
            # what wraps the output of a layer takes it for another tensor, which several runs do not foresee
            places = PLACES if settings["num_runs"] == 1 else PLACES[1:]
            return {
                **_step(chance, settings, 50 + number),
                "do": "throw",
                "layer": chance.randrange(NUM_LAYERS),
                "place": chance.choice(places),
                "hook": chance.choice(HOOKS),
                "call": chance.choice((1, 1, 2, 3, 5)),
            }
        case "reconfigure":
            return {"do": what, "choice": _choice(chance, settings)}
        case "reattach":
            tiers = _tiers(chance) if chance.random() < 0.3 else settings["tiers"]
            held = settings | {"tiers": tiers}
            return {
                "do": what,
                "choice": _choice(chance, held),
                "tiers": tiers,
                "by_reattach": chance.random() < 0.3,
            }
        case "freeze":
            part = chance.choice(("embed", "layers.1.", "norm", "lm_head", "q_proj", "mlp", "lora_A"))
            return {"do": what, "part": part, "value": chance.random() < 0.4}
        case "lr":
            return {"do": what, "value": chance.choice((0.0, 3e-3))}
        case "infinite" | "zero_grad":
            return {"do": what, "data": 70 + number}
        case _:
            return {"do": what}
