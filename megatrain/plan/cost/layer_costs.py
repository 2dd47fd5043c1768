"""The cost per micro-batch of each layer of a choice: seconds on the device, and bytes that leave it."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from functools import cached_property

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.policies import POLICIES, Policy
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, Layer
from megatrain.model.profile.cost import Cost
from megatrain.plan.cost.rates import Rates
from megatrain.plan.memory.block_sums import BlockSums, share_of
from megatrain.plan.memory.layer_runs import LayerRun, layer_runs

_DROPPING = frozenset(name for name, policy in POLICIES.items() if not policy.keeps_boundary)

_SIZES = [field.name for field in fields(BlockBytes)]


class LayerCosts:
    """The seconds and bytes of one micro-batch in each layer."""

    def __init__(self, rates: Rates, anatomy: Anatomy, choice: Choice, batch: StepBatch) -> None:
        """Precompute them for layers that are alike."""
        anatomy = anatomy.as_split(choice)
        self.rates, self.anatomy, self.choice, self.batch = rates, anatomy, choice, batch
        self.layers = anatomy.layers
        self._kinds = BlockSums.of(anatomy, choice).kinds
        self._known: dict[tuple[int, str], tuple[float, float, float]] = {}

    def forward_s(self, number: int) -> float:
        """Return the seconds of a layer's forward."""
        return self._of(number)[0]

    def backward_s(self, number: int) -> float:
        """Return the seconds of its backward, without recomputation."""
        return self._of(number)[1]

    def inside_s(self, number: int) -> float:
        """Return the seconds of what is made again inside its backward."""
        return self._of(number)[2]

    def passes_again(self, number: int) -> bool:
        """Return whether its forward runs again: the parts before its last in visits that cost forwards."""
        return POLICIES[self.choice.activations[number]].reruns

    @cached_property
    def runs(self) -> tuple[LayerRun, ...]:
        """Say how each layer runs, and what of it leaves the device and comes back."""
        return layer_runs(self.anatomy, self.choice)

    @property
    def newest_bytes(self) -> float:
        """Return the bytes of what is saved last in a round: it is still on the device when it is needed."""
        return next((nbytes for nbytes in reversed(self._saved_bytes) if nbytes), 0.0)

    @property
    def _saved_bytes(self) -> list[int]:
        """List the bytes of each layer whose copies a program lists: all but the last.

        The last one is needed first. Where its input comes back late it leaves all the same, but is not
        priced.
        """
        return [run.leaving_bytes for run in self.runs[:-1]]

    def sums(self, first_trained: int = 0) -> tuple[float, float, float, float]:
        """Return the seconds of all forwards, all backwards and all forwards again, and the bytes saved.

        Backwards are with what is made again inside them; forwards again make the boundary of the next layer.

        Args:
            first_trained: The layer with which backward ends.
        """
        kinds = Counter(zip(self._kinds, self.choice.activations, strict=True))
        forward = backward = 0.0
        for (kind, policy), count in kinds.items():
            forward_s, backward_s, inside_s = self._known_of(kind, policy)
            forward += count * forward_s
            backward += count * (backward_s + inside_s)
        backward -= sum(self.backward_s(n) + self.inside_s(n) for n in range(first_trained))
        before = range(max(0, first_trained - 1), len(self.layers) - 1)
        again = sum(self.forward_s(n) for n in before if self.choice.activations[n + 1] in _DROPPING)
        return forward, backward, again, float(sum(self._saved_bytes))

    @property
    def head_forward_s(self) -> float:
        """Return the seconds of the forward of head and loss."""
        return self.rates.head_s(self.anatomy.head_forward)

    @property
    def head_backward_s(self) -> float:
        """Return the seconds of what makes their gradients."""
        return self.rates.head_s(self.anatomy.head_backward)

    @property
    def outer_s(self) -> float:
        """Return the seconds of a visit's launch, for what is between visits."""
        return self.rates.spec.launch_s

    @property
    def step_s(self) -> float:
        """Return the seconds of what the device does once per step: updates of its own state."""
        blocks = BlockSums.of(self.anatomy, self.choice).residency(self.choice).resident
        sizes = {name: blocks.total(_of_share, name, self.batch.num_ranks) for name in _SIZES}
        return self.rates.device_update_s(BlockBytes(**sizes))

    def _of(self, number: int) -> tuple[float, float, float]:
        return self._known_of(self._kinds[number], self.choice.activations[number])

    def _known_of(self, kind: int, policy: str) -> tuple[float, float, float]:
        key = (kind, policy)
        if key not in self._known:
            again = self.anatomy.again_of(kind)
            self._known[key] = self._count(self.layers[kind], again, POLICIES[policy])
        return self._known[key]

    def _count(self, layer: Layer, again: Cost, policy: Policy) -> tuple[float, float, float]:
        launch_s = self.rates.spec.launch_s
        forward = self.rates.forward_s(layer.forward) + launch_s
        backward = self.rates.backward_s(layer.backward) + self._sums_s(layer) + launch_s
        backward += self.rates.forward_s(again)
        inside = 0.0
        if policy.reruns:
            inside = self.rates.forward_s(layer.rerun(policy)) + launch_s
        return forward, backward, inside

    def _sums_s(self, layer: Layer) -> float:
        """Return the seconds in which gradients add up and their squares are summed, per micro-batch."""
        count = self.batch.num_micro_batches
        params = sum(fragment.sizes.num_state for fragment in layer.fragments)
        # one micro-batch: read on the way out. More: working dtype in, fp32 read and written, rounded; in a
        # system that adds in bf16, its products read the sum and write it
        each = 10 if self.rates.kernels.sum_bytes == 4 else 4
        passes = 2 if count == 1 else 6 + (count - 1) * each + 6
        return self.rates.device_pass_s(passes * params) / count


def _of_share(sizes: BlockBytes, name: str, num_ranks: int) -> int:
    return int(getattr(share_of(sizes, num_ranks), name))
