"""What ranks send each other costs: seconds, from the bytes of a collective and how many ranks there are.

Among the devices of a node, bytes go from one to the other, or, where they have no access to each other,
through host memory: down one's link and up another's. Among nodes, all devices of one share its network.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.choice import StepBatch
from megatrain.hardware.spec import UNKNOWN_NETWORK_BYTES_PER_S
from megatrain.plan.cost.rates import Rates


@dataclass(frozen=True, slots=True)
class Collectives:
    """Seconds of one rank of several that all do the same."""

    rates: Rates
    """Of a rank: `HardwareSpec.of_rank`."""
    num_ranks: int
    num_nodes: int = 1

    @classmethod
    def of(cls, rates: Rates, batch: StepBatch) -> Collectives:
        """Return those of the ranks that a batch is shared out to."""
        return cls(rates, batch.num_ranks, batch.num_nodes)

    @property
    def num_peers(self) -> int:
        """Ranks of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def passes_host(self) -> bool:
        """Whether what the ranks of a node exchange passes through its memory."""
        return self.num_peers > 1 and self.rates.spec.peer_bytes_per_s is None

    def gather_s(self, nbytes: float) -> float:
        """Return the seconds in which every rank of a node gets so many bytes of the others."""
        spec = self.rates.spec
        return spec.peer_latency_s + nbytes / (spec.peer_bytes_per_s or spec.h2d_bytes_per_s)

    def exchanged_near(self, nbytes: float) -> float:
        """Return how much of what an exchange sends stays in the node."""
        return nbytes * (self.num_peers - 1) / max(1, self.num_ranks - 1)

    def exchange_s(self, nbytes: float) -> float:
        """Return the seconds of an exchange in which each rank sends so many bytes, near and far at once.

        What passes through host memory takes the copies there and back in addition.
        """
        return max(self.near_s(nbytes), self.network_s(nbytes - self.exchanged_near(nbytes)))

    def near_s(self, nbytes: float) -> float:
        """Return the seconds of what stays in the node of such an exchange."""
        if self.num_peers == 1:
            return 0.0
        spec = self.rates.spec
        return spec.peer_latency_s if self.passes_host else self.gather_s(self.exchanged_near(nbytes))

    def network_s(self, nbytes: float) -> float:
        """Return the seconds in which every rank sends so many bytes to other nodes."""
        if self.num_nodes == 1:
            return 0.0
        rate = self.rates.spec.network_bytes_per_s or UNKNOWN_NETWORK_BYTES_PER_S
        return self.rates.spec.network_latency_s * (self.num_nodes - 1) + nbytes * self.num_peers / rate

    def sum_s(self, nbytes: float) -> float:
        """Return the seconds in which owners add up their shares of all sums after such an exchange."""
        if self.num_ranks == 1:
            return 0.0
        own = nbytes / (self.num_ranks - 1)
        return self.rates.device_pass_s((self.num_ranks + 1) * own)
