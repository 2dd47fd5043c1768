"""How many tokens of a step go to each expert: counted on the device, where routers choose.

All tokens count that pass a layer in a forward with gradients, padding too, and each of them once: what is
chosen again in a recomputation is not counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megatrain.model.experts.routes import COUNT_DTYPE
from megatrain.stream.forward.attached import AttachedLayer


class ExpertLoads:
    """The tokens of each expert since they were read last, by router; `3.mlp.gate` is the fourth layer's."""

    def __init__(self, layers: Sequence[AttachedLayer]) -> None:
        """Count what the routers of these layers choose from now on, in place of whoever counted before."""
        self._counts: dict[str, Tensor] = {}
        self._places: dict[str, int] = {}
        for number, layer in enumerate(layers):
            names = [f"{number}.{name}" for name in layer.router_names]
            if names:
                layer.count = partial(self._add, names)
                self._places |= {name: len(self._places) + place for place, name in enumerate(names)}

    @property
    def has_routers(self) -> bool:
        """Whether there is anything to count."""
        return bool(self._places)

    def _add(self, routers: Sequence[str], place: int, experts: Tensor, num_experts: int) -> None:
        router = routers[place % len(routers)]  # a layer may call its router several times
        if router not in self._counts:
            self._counts[router] = torch.zeros(num_experts, dtype=COUNT_DTYPE, device=experts.device)
        chosen = experts.detach().flatten()
        self._counts[router].index_add_(0, chosen, torch.ones_like(chosen, dtype=COUNT_DTYPE))

    def take(self) -> dict[str, Tensor]:
        """Return what was counted, (experts,) int64 on the host, and begin anew; it waits for the device."""
        routers = sorted(self._counts, key=self._places.__getitem__)
        if not routers:
            return {}
        counts = [self._counts[router] for router in routers]
        parts = torch.cat(counts).cpu().split([each.numel() for each in counts])
        for each in counts:
            each.zero_()
        return dict(zip(routers, parts, strict=True))
