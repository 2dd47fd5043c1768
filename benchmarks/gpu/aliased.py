"""A model larger than memory, for its speed alone: a few layers' state stands for that of all.

Every layer is a block of its own, fetched, offloaded and updated like any other, with bytes that lie in the
memory of one of a few *real* layers: layer i's in that of layer i modulo their number. What crosses the link
and what the host's AdamW reads and writes per step is what the whole model would take; the memory that
holds it is a fraction. Nothing orders two blocks that share memory, and each real layer is updated many times
a step with whichever gradient came last, so losses mean nothing but that they are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.measure import Normal, put_parameters
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.config.runs import SumRoom
from megatrain.distributed.alone import ALONE
from megatrain.layout.blocks import BlockLayout
from megatrain.layout.totals import BlockTotals, GradientPlaces
from megatrain.model.blocks import find_blocks
from megatrain.model.weights.skeleton import build_skeleton
from megatrain.store.planes import Planes
from megatrain.store.precision import Precision
from megatrain.store.state import HostState
from megatrain.stream.attach.bind import plan_layouts
from megatrain.stream.job.job import Job
from megatrain.stream.memory import host_planes


class AliasedPlanes(Planes):
    """Planes of which those of decoder layers lie over those of the first few."""

    def __init__(self, num_layers: int, num_real: int, layouts: Sequence[BlockLayout], *where: Any) -> None:
        """Allocate the planes of `num_real` of the first `num_layers` blocks, and of all blocks after."""
        self._num_layers, self._num_real = num_layers, num_real
        super().__init__(layouts, *where)

    def _allocate(self, plane: str, sizes: Sequence[int]) -> list[Any]:
        if len(sizes) != len(self.layouts):  # staging buffers
            return super()._allocate(plane, sizes)
        assert len(set(sizes[: self._num_layers])) == 1, "layers of different sizes"
        real = [*sizes[: self._num_real], *sizes[self._num_layers :]]
        views = super()._allocate(plane, real)
        layers = [views[number % self._num_real] for number in range(self._num_layers)]
        return [*layers, *views[self._num_real :]]


class AliasedState(HostState):
    """Host state with such planes."""

    def __init__(self, layouts: Sequence[BlockLayout], num_layers: int, num_real: int) -> None:
        """Allocate `AliasedPlanes`."""
        self.make_planes = partial(AliasedPlanes, num_layers, num_real)
        super().__init__(
            layouts, Precision.BF16, tiers=None, optimizer=DEFAULT, sum_room=SumRoom(), ranks=ALONE
        )

    @property
    def host_bytes(self) -> int:
        """Bytes that the planes would take if every layer had its own: attach reckons with that."""
        totals = BlockTotals(layout.sizes for layout in self.layouts)
        everything, nobody = totals[:], totals[:0]
        places = GradientPlaces(
            everything, on_device=nobody, on_drives=nobody, staged=nobody, sums_on_drives=nobody
        )
        planes = host_planes(Job(precision=self.precision), self.layouts, places, SumRoom())
        return sum(planes.values())

    @property
    def real_bytes(self) -> int:
        """Bytes that the planes take."""
        return sum(arena.nbytes for arena in self.planes.arenas.values())


def aliased_model(config: Any, num_real: int) -> Any:
    """Make a random bf16 model over aliased state, for `megatrain.attach(precision="bf16")`."""
    import torch

    model = build_skeleton(config, dtype=torch.bfloat16).train()
    blocks = find_blocks(model)
    layouts = plan_layouts(model, blocks, Precision.BF16)
    num_layers = sum(block.is_streamed for block in blocks)
    state = AliasedState(layouts, num_layers, num_real)
    normal = Normal(config.initializer_range)
    filled: set[int] = set()

    def make(name: str, _: Any) -> Any:
        weight = state.weight(name)
        if weight.data_ptr() not in filled:
            filled.add(weight.data_ptr())
            normal.fill(weight)
        return weight

    put_parameters(model, make)
    model.__dict__["_megatrain_host"] = state
    return model
