"""Activation policies: what stays of a layer between its forward and its backward. All give the same bits.

An entry of `POLICIES` says all of a policy; planner, counter, engine and help ask its attributes, and nowhere
else is a name compared. Loads neither pydantic nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatrain.errors import ConfigError, one_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Policy:
    """One way to keep activations."""

    name: str
    """The name that settings, choices and plans have for it."""
    stays: str
    """The tensors of a layer that stay until its backward, in the words of the settings' help."""
    reruns: bool = True
    """Whether the layer's forward runs again in the backward, but for operations whose results are kept."""
    keeps_products: bool = False
    """Whether a forward that runs again finds the results of matrix products."""
    keeps_attention: bool = False
    """Whether it finds the results of attention: outputs, and what its backward asks for beside them."""
    moves_results: bool = False
    """Whether these wait where the layer's input does: on the device, the host or drives."""
    keeps_boundary: bool = True
    """Whether the layer's input is kept; otherwise the layers before it make it again."""
    is_offloaded: bool = False
    """Whether what autograd saves waits on the host, or on drives, in place of the device."""
    runs_as: str = ""
    """The policy that a layer runs and is counted under, where this one differs only in what is moved or
    made again around it; empty: its own."""
    base_place: int | None = None
    """Place among the policies that the search gives to all layers first; None: to none of them first."""
    fills: bool = False
    """Whether the search gives it to the last layers, as many as the memory that is left has room for."""
    refines: bool = False
    """Whether the search does so only around the best choice that it has found without it: so it never costs
    a plan its speed, whose search ends after so many operations."""

    @property
    def counted_as(self) -> str:
        """Return the policy under which its bytes are counted."""
        return self.runs_as or self.name

    @property
    def keeps_results(self) -> bool:
        """Whether a forward that runs again finds the results of some of its operations."""
        return self.reruns and (self.keeps_products or self.keeps_attention)

    @property
    def keeps_attention_alone(self) -> bool:
        """Whether it is there for attention that returns a log-sum-exp, and spares nothing without."""
        return self.keeps_attention and not self.keeps_products

    @property
    def reruns_whole(self) -> bool:
        """Whether the whole forward runs again."""
        return self.reruns and not self.keeps_results

    @property
    def stays_whole(self) -> bool:
        """Whether everything that autograd saves stays on the device."""
        return not self.reruns and not self.is_offloaded

    @property
    def is_intricate(self) -> bool:
        """Whether it moves activations or goes back to other layers: of equal plans, others are simpler."""
        return self.is_offloaded or not self.keeps_boundary

    @property
    def compile_problem(self) -> str:
        """Say why compiled layers cannot have it; empty: they can."""
        if not (self.reruns and self.keeps_products):
            return ""
        return (
            f"activations={self.name} keeps the results of matrix products, which a compiled layer may not "
            f"show; use compile=off, or activations={KEEP.name}: a compiled layer keeps little by itself"
        )

    def drops(self, number: int) -> bool:
        """Whether the boundary of layer `number` is made again; that of the first one cannot be."""
        return not self.keeps_boundary and number > 0

    def leaves_device(self, number: int, boundaries: str) -> bool:
        """Whether what layer `number` keeps waits elsewhere, if it is large enough to be worth it.

        Args:
            number: The layer's place in forward order.
            boundaries: The place of boundaries, as `Choice.boundaries` names it.
        """
        return self.is_offloaded or (boundaries != "device" and self.reruns and not self.drops(number))


KEEP = Policy(name="keep", stays="all", reruns=False, base_place=3, fills=True)
OFFLOAD = Policy(
    name="offload", stays="all on the host", reruns=False, is_offloaded=True, runs_as="keep", base_place=2
)
RECOMPUTE_CHEAP = Policy(
    name="recompute_cheap",
    stays="products and attention",
    keeps_products=True,
    keeps_attention=True,
    fills=True,
)
KEEP_ATTENTION = Policy(
    name="keep_attention",
    stays="its input and attention",
    keeps_attention=True,
    moves_results=True,
    refines=True,
)
RECOMPUTE = Policy(name="recompute", stays="its input", base_place=0)
DROP_BOUNDARY = Policy(
    name="drop_boundary", stays="nothing", keeps_boundary=False, runs_as="recompute", base_place=1
)

POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (KEEP, OFFLOAD, RECOMPUTE_CHEAP, KEEP_ATTENTION, RECOMPUTE, DROP_BOUNDARY)
}
"""All policies by name, from most bytes on the device and the host to least."""

POLICY_NAMES = tuple(POLICIES)

COUNTED = tuple(name for name, policy in POLICIES.items() if policy.counted_as == name)
"""Names of the policies under which the counter runs a layer."""

BASES = tuple(
    sorted((p for p in POLICIES.values() if p.base_place is not None), key=lambda p: p.base_place or 0)
)
"""Policies that the search gives to all layers first, in its order."""

FILLING = tuple(policy for policy in reversed(list(POLICIES.values())) if policy.fills)
"""Policies that fill the memory that is left, from least bytes to most."""

REFINING = tuple(p for p in reversed(list(POLICIES.values())) if p.fills or p.refines)
"""The policies of `FILLING`, and those that are tried around the best choice alone."""


def read_policy(name: str, what: str) -> Policy:
    """Return the policy of a name.

    Args:
        name: The name that a user or caller has given.
        what: The setting, at the beginning of the error.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"{what} is {name!r}; use {one_of(POLICY_NAMES)}")
    return POLICIES[name]
