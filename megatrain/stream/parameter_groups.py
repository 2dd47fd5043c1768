"""Groups of an optimizer's parameters, each with rates and a decay of its own, as in torch's optimizers."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from torch import nn

from megatrain.config.optimizers.optimizer import COMMON, Optimizer
from megatrain.errors import ConfigError
from megatrain.layout.blocks import Entry

_log = logging.getLogger(__name__)

Group = dict[str, Any]

_AS_TORCH = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""What else a group of `torch.optim.AdamW` says, and the value of each that is what is done here."""
_OF_KERNELS = ("foreach", "fused", "capturable", "names", "param_names", "initial_lr")
"""What says nothing of the result."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """What says how parameters are grouped; nothing does: by whether they decay."""

    no_decay: Iterable[str] | None = None
    """Patterns of names of parameters without decay."""
    groups: Sequence[Mapping[str, Any]] | None = None
    """Groups as torch's optimizers take them."""

    def make(
        self,
        parameters: Mapping[str, nn.Parameter],
        trained: Mapping[str, Entry],
        optimizer: Optimizer,
        weight_decay: float,
    ) -> list[Group]:
        """Return the groups of the `trained` parameters; see `by_decay` and `as_given`."""
        if self.groups is None:
            return by_decay(parameters, trained, weight_decay=weight_decay, no_decay=self.no_decay)
        if self.no_decay is not None:
            raise ConfigError("groups and no_decay are both given; give each group its weight_decay")
        return as_given(self.groups, parameters, trained, optimizer, weight_decay=weight_decay)


def by_decay(
    parameters: Mapping[str, nn.Parameter],
    trained: Mapping[str, Entry],
    *,
    weight_decay: float,
    no_decay: Iterable[str] | None,
) -> list[Group]:
    """Return the trained parameters in two groups: those that decay, and those that do not.

    Args:
        parameters: The parameters of the model, by name.
        trained: The parameters that the engine trains, by name.
        weight_decay: The decay of the former.
        no_decay: The patterns of the names of the latter; None: biases, and what has fewer than two
            dimensions.
    """
    patterns = None if no_decay is None else tuple(no_decay)
    decayed = [name for name, entry in trained.items() if _decays(name, entry, patterns)]
    exempt = [name for name in trained if name not in set(decayed)]
    groups: list[Group] = [
        {"params": [parameters[name] for name in names], "names": names, "weight_decay": decay}
        for names, decay in ((decayed, weight_decay), (exempt, 0.0))
    ]
    return [group for group in groups if group["params"]]


def as_given(
    given: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    trained: Mapping[str, Entry],
    optimizer: Optimizer,
    *,
    weight_decay: float,
) -> list[Group]:
    """Return the groups that the user has made, with the names of their parameters.

    Args:
        given: The groups. Each has `params`, and may have a learning rate, a decay and other settings of its
            own. `params` are parameters, pairs of a name and a parameter, or patterns of names; a name goes
            to the first group with a pattern for it. Frozen parameters are left out, and what is in no group
            stays.
        parameters: The parameters of the model, by name.
        trained: The parameters that the engine trains, by name.
        optimizer: The optimizer, which says what else a group may have.
        weight_decay: The decay of the groups that say none.

    Raises:
        ConfigError: No group, one without trained parameters, a parameter twice or of another model, or
            something that the optimizer does not take.
    """
    names_of = {id(parameter): name for name, parameter in parameters.items()}
    taken: set[str] = set()
    groups: list[Group] = []
    for number, each in enumerate(given):
        hyper = _hyper(each, number, optimizer)
        names = [
            name
            for param in _listed(each.get("params", ()))
            for name in _names(param, parameters, names_of, taken, number)
            if name in trained
        ]
        names = list(dict.fromkeys(names))
        again = taken.intersection(names)
        if again:
            raise ConfigError(f"parameter {min(again)} is in more than one group of parameters")
        taken.update(names)
        own = {"params": [parameters[name] for name in names], "names": names}
        groups.append({**own, "weight_decay": weight_decay, **hyper})  # an empty one keeps others' numbers
    if not taken:
        raise ConfigError("the groups of parameters name no parameter that is trained")
    return groups


def _hyper(group: Mapping[str, Any], number: int, optimizer: Optimizer) -> Group:
    """Return the settings of the optimizer that a group gives."""
    names = ["lr", *optimizer.settings, *(COMMON.keys() - {"lr"})]
    unknown = sorted(group.keys() - {"params", *names, *_AS_TORCH, *_OF_KERNELS})
    if unknown:
        raise ConfigError(
            f"group {number} of parameters has {', '.join(unknown)}; it takes params, {', '.join(names)}"
        )
    for name, value in _AS_TORCH.items():
        if group.get(name, value) != value:
            raise ConfigError(f"group {number} of parameters has {name}={group[name]}; use {name}={value}")
    found = {name: group[name] for name in names if name in group}
    optimizer.check(found)
    return found


def _listed(params: Any) -> Iterable[Any]:
    return [params] if isinstance(params, (str, nn.Parameter)) else params


def _names(
    param: Any,
    parameters: Mapping[str, nn.Parameter],
    names_of: Mapping[int, str],
    taken: set[str],
    number: int,
) -> list[str]:
    """Return the names of what a group lists once."""
    if isinstance(param, str):
        found = [name for name in parameters if fnmatch(name, param)]
        if not found:
            _log.warning("group %d of parameters: no parameter of the model is called %s", number, param)
        return [name for name in found if name not in taken]
    value = param[1] if isinstance(param, tuple) else param
    if id(value) not in names_of:
        raise ConfigError(
            f"group {number} of parameters has a parameter that is none of the model's "
            f"({type(value).__name__}); make groups of model.named_parameters(), or of patterns of names"
        )
    return [names_of[id(value)]]


def _decays(name: str, entry: Entry, patterns: tuple[str, ...] | None) -> bool:
    if patterns is None:
        return len(entry.shape) >= 2 and not name.endswith("bias")
    return not any(fnmatch(name, pattern) for pattern in patterns)
