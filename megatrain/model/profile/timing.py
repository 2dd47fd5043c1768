"""Times one layer of every kind on this computer: what no count of operations tells of a CPU.

A CPU's time for an operation depends on more than its bytes: exponentials and random numbers cost many
cycles each, products of odd shapes run below the peak, and every call takes microseconds. So the layers
themselves are run, forward and backward, with random weights and what the model's own forward gives them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from megatrain.config.policies import KEEP
from megatrain.model.caches import with_own_caches
from megatrain.model.profile.counter import Counter
from megatrain.model.profile.metering import known_value
from megatrain.model.profile.tracing import FakeBlock, LayerCall

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from typing_extensions import Unpack

    from megatrain.model.profile.counter import ModelShape

_FEWEST_PASSES, _MOST_PASSES = 3, 9
_BUDGET_S = 0.4
"""Time for a kind of layer, after which the fewest passes are enough."""

_CACHE_BYTES = 64 << 20
"""More than the caches of a core hold."""


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """The seconds of one micro-batch in a layer of some kind."""

    forward_s: float
    backward_s: float
    numbers: tuple[int, ...]
    """The layers of this kind."""


def time_layers(
    config: PretrainedConfig, *, micro_batch_size: int, **model: Unpack[ModelShape]
) -> list[LayerSeconds]:
    """Run a layer of every kind on the CPU, with torch's threads of now; one layer's memory is taken.

    Draws from no generator of the caller's. Where rows are shared out, the times leave out what ranks wait
    for each other.

    Args:
        config: The configuration of a causal language model, or of a larger model with one inside.
        micro_batch_size: The number of rows.
        model: The rows, precision and adapters of the model, as in `Counter.of`.

    Raises:
        ModelError: The configuration is refused, as by `count_anatomy`.
    """
    counter = Counter.of(config, micro_batch_size=micro_batch_size, **model)
    whole = counter.run(None, device_type="cpu", policies=(KEEP.name,))
    found = []
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(0)
        for kind, call in enumerate(whole.calls):
            blocks = [
                FakeBlock(counter.blocks[number], counter.layouts[number])
                for number in counter.group_of(call.module)
            ]
            for block in blocks:
                block.draw(generator)
            with counter.rows_shared():
                forward_s, backward_s = _time_layer(_as_real(call, generator), blocks)
            numbers = tuple(number for number, other in enumerate(whole.kinds) if other == kind)
            found.append(LayerSeconds(forward_s, backward_s, numbers))
    return found


def _as_real(call: LayerCall, generator: torch.Generator) -> LayerCall:
    """Return a call with memory behind its tensors, and behind the buffers of its module."""
    real = partial(_real, generator)
    for module in call.module.modules():
        for leaf, buffer in module._buffers.items():
            if isinstance(buffer, FakeTensor):
                module._buffers[leaf] = real(buffer)
    args, kwargs = tree_map_only(FakeTensor, real, (call.args, dict(call.kwargs)))
    return LayerCall(call.module, args, kwargs)


def _real(generator: torch.Generator, fake: FakeTensor) -> Tensor:
    known = known_value(fake)
    if known is not None:
        return known
    if fake.is_floating_point():
        real = torch.randn(fake.shape, generator=generator).to(fake.dtype)
        return real.requires_grad_(fake.requires_grad)
    # of indices, 0 is one that there is; of masks, everything is seen
    fill = torch.ones if fake.dtype == torch.bool else torch.zeros
    return fill(fake.shape, dtype=fake.dtype)


def _time_layer(call: LayerCall, blocks: Sequence[FakeBlock]) -> tuple[float, float]:
    """Return the median seconds of a layer's forward and of its backward; the first pass warms up.

    In a step, a layer's weights come from memory, since those of all others have passed meanwhile.
    """
    _pass(call, blocks)
    others = torch.empty(_CACHE_BYTES, dtype=torch.uint8)
    taken: list[tuple[float, float]] = []
    until_s = time.perf_counter() + _BUDGET_S
    while len(taken) < _FEWEST_PASSES or (len(taken) < _MOST_PASSES and time.perf_counter() < until_s):
        others.fill_(len(taken))
        taken.append(_pass(call, blocks))
    forward, backward = zip(*taken, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _pass(call: LayerCall, blocks: Sequence[FakeBlock]) -> tuple[float, float]:
    hidden = call.hidden.detach().requires_grad_(call.hidden.requires_grad)
    args, kwargs = with_own_caches(*call.given(hidden))
    for block in blocks:
        block.stream_weights(lambda _: None)
    began_s = time.perf_counter()
    result: Any = type(call.module).forward(call.module, *args, **kwargs)
    output: Tensor = result[0] if isinstance(result, (tuple, list)) else result
    between_s = time.perf_counter()
    output.backward(torch.ones_like(output))
    return between_s - began_s, time.perf_counter() - between_s
