"""The seconds of operations on a machine: the rates that an operation asks for what it does."""

from __future__ import annotations

from collections.abc import Sequence

from megatrain.plan.cost.collectives import Collectives
from megatrain.plan.cost.contention import Shares
from megatrain.plan.cost.layer_costs import LayerCosts
from megatrain.plan.cost.rates import Rates
from megatrain.plan.memory.block_sums import share_of
from megatrain.plan.memory.planned_blocks import PlannedBlock

DECODING_PASSES = 10
"""Device memory that decoding reads and writes, by that of the values in bf16: a code of each, its value and
the product with its scale in fp32, which are written and read, and what that is rounded to."""


class Pricing:
    """The rates of a choice: what `Operation.seconds` and `Operation.tasks` ask."""

    def __init__(
        self,
        rates: Rates,
        costs: LayerCosts,
        blocks: Sequence[PlannedBlock],
        shares: Shares,
        collectives: Collectives,
    ) -> None:
        """Price for a machine (`rates`), a model's layers under a choice (`costs`), and its blocks.

        `shares` is what is left of the rates where lanes are in each other's way, and `collectives` knows the
        ranks.
        """
        self._rates = rates
        self._costs = costs
        self._blocks = blocks
        self._shares = shares
        self._collectives = collectives
        self._visits_s: dict[tuple[int, bool, bool], float] = {}
        """The seconds of one micro-batch in a visit."""
        self.passes_host = collectives.passes_host
        self.updates_in_compute = rates.updates_in_compute
        self.read_s, self.write_s = rates.read_s, rates.write_s
        self.host_pass_s = rates.host_pass_s
        self.gather_s, self.give_s = collectives.gather_s, collectives.give_s
        self.network_s = collectives.network_s
        self.given_near = collectives.given_near

    def up_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the device, beside what else is on the link."""
        return self._rates.fetch_s(nbytes) / self._shares.up

    def down_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the host, likewise."""
        return self._rates.offload_s(nbytes) / self._shares.down

    def pull_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to the device of state that is not page-locked."""
        return self._rates.fetch_s(nbytes) / self._rates.spec.pageable_share

    def push_s(self, nbytes: float) -> float:
        """Return the seconds of a copy to such memory."""
        return self._rates.offload_s(nbytes) / self._rates.spec.pageable_share

    def spill_s(self, nbytes: float) -> float:
        """Return the seconds in which the host copies so many bytes, alone."""
        return self._rates.host_pass_s(2 * nbytes)

    def add_s(self, nbytes: float) -> float:
        """Return the seconds in which the host adds up, beside what else uses its memory."""
        return self._rates.host_pass_s(nbytes) / self._shares.update

    def update_s(self, nbytes: float) -> float:
        """Return the seconds of an update on the host, likewise."""
        return self._rates.update_s(nbytes) / self._shares.update

    def decode_s(self, block: int) -> float:
        """Return the seconds in which the device makes values of a block's codes, if it has any."""
        return self._rates.device_pass_s(DECODING_PASSES * self._blocks[block].sizes.decoded_bytes)

    def device_update_s(self, block: int) -> float:
        """Return the seconds of the update of a block on the device, of several ranks of a share of it."""
        num_ranks = self._collectives.exchange.num_ranks
        return self._rates.device_update_s(share_of(self._blocks[block].sizes, num_ranks))

    def hold_s(self, block: int) -> float:
        """Return the seconds in which a block's gradient is rounded to where it waits on the device."""
        return self._rates.device_pass_s(2 * self._blocks[block].size.offload_bytes)

    def kept_bytes(self, block: int, count: int, *, is_share: bool) -> float:
        """Return the bytes of so many partial sums of a block, or of a share, as the kernels keep them."""
        size = self._blocks[block].size
        each = size.share_bytes if is_share else size.accumulator_bytes
        return self._rates.kernels.sum_bytes / 4 * count * each

    def exchange_s(self, nbytes: float) -> float:
        """Return the seconds in which ranks exchange sums of so many bytes in fp32, and add them up."""
        sent = self._sent(nbytes)
        return self._collectives.exchange_s(sent) + self._collectives.sum_s(sent)

    def exchanged_near(self, nbytes: float) -> float:
        """Return how much of what such an exchange sends stays in the node."""
        return self._collectives.exchanged_near(self._sent(nbytes))

    def _sent(self, nbytes: float) -> float:
        return nbytes * self._rates.kernels.sum_bytes / 4

    def head_s(self, *, is_backward: bool) -> float:
        """Return the seconds of one micro-batch in the head, with what outer blocks compute."""
        if is_backward:
            return self._costs.head_backward_s
        return self._costs.head_forward_s + self._costs.outer_s

    def visit_s(self, block: int, *, is_backward: bool, is_head: bool) -> float:
        """Return the seconds of one micro-batch in a block."""
        key = (block, is_backward, is_head)
        if key not in self._visits_s:
            self._visits_s[key] = self._visit_s(*key)
        return self._visits_s[key]

    def _visit_s(self, number: int, is_backward: bool, is_head: bool) -> float:
        block = self._blocks[number]
        if block.layer < 0:  # what outer blocks compute is the head's
            return self.head_s(is_backward=is_backward) if is_head else 0.0
        if not is_backward:
            return self._costs.forward_s(block.layer) * block.share
        seconds = self._costs.backward_s(block.layer) * block.share
        if block.runs_again is not None:
            return seconds + self._costs.forward_s(block.layer) * block.share * block.runs_again
        if block.reruns:  # the others' recomputation is a visit of its own
            share = block.share if self._costs.passes_again(block.layer) else 1.0
            seconds += self._costs.inside_s(block.layer) * share
        return seconds
