"""The seconds of what ranks send each other, from the bytes of a collective and the number of ranks.

Among the devices of a node, bytes go from one to the other, or, where they have no access to each other,
through host memory: down one's link and up another's. Among nodes, all devices of one share its network. An
exchange is one after the other, in the node and among nodes; see `Exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.config.choice import StepBatch
from megatrain.hardware.spec import UNKNOWN_NETWORK_BYTES_PER_S
from megatrain.layout.exchange import Exchange
from megatrain.plan.cost.rates import Rates


@dataclass(frozen=True, slots=True)
class Collectives:
    """The seconds of what ranks send each other, of one rank of several that all do the same."""

    rates: Rates
    """The rates of a rank: `HardwareSpec.of_rank`."""
    exchange: Exchange

    @classmethod
    def of(cls, rates: Rates, batch: StepBatch) -> Collectives:
        """Return the collectives of the ranks that a batch is shared out to."""
        return cls(rates, Exchange.of(batch))

    @property
    def passes_host(self) -> bool:
        """Return whether what the ranks of a node exchange passes through its memory."""
        return self.exchange.num_peers > 1 and self.rates.spec.peer_bytes_per_s is None

    def gather_s(self, nbytes: float) -> float:
        """Return the seconds in which every rank of a node gets so many bytes of the others."""
        spec = self.rates.spec
        return spec.peer_latency_s + nbytes / (spec.peer_bytes_per_s or spec.h2d_bytes_per_s)

    def exchanged_near(self, nbytes: float) -> float:
        """Return how much of what an exchange sends stays in the node."""
        return nbytes * self.exchange.near_part

    def given_near(self, nbytes: float) -> float:
        """Return how much of what every rank gives to all others stays in the node."""
        return nbytes * (self.exchange.num_peers - 1) / max(1, self.exchange.num_ranks - 1)

    def give_s(self, nbytes: float) -> float:
        """Return the seconds in which every rank gives so many bytes to all others, as `exchange_s` does."""
        near = self.given_near(nbytes)
        return self.gather_s(0.0 if self.passes_host else near) + self.network_s(nbytes - near)

    def exchange_s(self, nbytes: float) -> float:
        """Return the seconds of an exchange in which each rank sends so many bytes, near and far.

        What passes through host memory takes the copies there and back in addition.
        """
        return self.near_s(nbytes) + self.network_s(nbytes - self.exchanged_near(nbytes))

    def near_s(self, nbytes: float) -> float:
        """Return the seconds of what stays in the node of such an exchange: one for each node's shares."""
        if self.exchange.num_peers == 1:
            return 0.0
        more_s = self.rates.spec.peer_latency_s * (self.exchange.num_nodes - 1)
        return more_s + self.gather_s(0.0 if self.passes_host else self.exchanged_near(nbytes))

    def network_s(self, nbytes: float) -> float:
        """Return the seconds in which every rank sends so many bytes to other nodes."""
        num_nodes, num_peers = self.exchange.num_nodes, self.exchange.num_peers
        if num_nodes == 1:
            return 0.0
        rate = self.rates.spec.network_bytes_per_s or UNKNOWN_NETWORK_BYTES_PER_S
        return self.rates.spec.network_latency_s * (num_nodes - 1) + nbytes * num_peers / rate

    def sum_s(self, nbytes: float) -> float:
        """Return the seconds in which ranks add up what they get in such an exchange."""
        return self.rates.device_pass_s(nbytes * self.exchange.passed_part)
