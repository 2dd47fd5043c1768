"""Describes emulated lanes to the planner, as `doctor` describes a real machine."""

from __future__ import annotations

from megatrain.hardware import HardwareSpec, MemoryNode, host_memory
from megatrain.plan.cost.rates import UPDATE_BYTES, other_rates
from megatrain.stream.lanes import EmulatedMachine

_UNLIMITED = 1e18
"""Of device memory where compute has a rate: it is FLOPs alone."""


def emulated_spec(machine: EmulatedMachine, computer: HardwareSpec | None = None) -> HardwareSpec:
    """Return what a machine's rates come to; launching is part of computing.

    Args:
        machine: The machine with its rates; one that is zero means that things take as long as they take.
        computer: The computer on which it is emulated, for the rates that are zero; None: the machine has
            them all.
    """

    def rate(value: float, own: float) -> float:
        return value or own

    flops = dict.fromkeys(("fp32", "bf16"), machine.compute_flops_per_s)
    host = machine.host_bytes_per_s
    if computer is not None:
        flops = {name: rate(flops[name], own) for name, own in computer.matmul_flops_per_s.items()}
        host = rate(host, computer.update_rate * UPDATE_BYTES)
    return HardwareSpec(
        name="emulated",
        device="emulated",
        device_bytes=machine.device_bytes,
        matmul_flops_per_s=flops,
        attention_flops_per_s=flops,
        device_bytes_per_s=_UNLIMITED
        if machine.compute_flops_per_s or computer is None
        else computer.device_bytes_per_s,
        h2d_bytes_per_s=rate(machine.h2d_bytes_per_s, 1.0 if computer is None else computer.h2d_bytes_per_s),
        d2h_bytes_per_s=rate(machine.d2h_bytes_per_s, 1.0 if computer is None else computer.d2h_bytes_per_s),
        memory=(MemoryNode(nbytes=host_memory().available_bytes, bytes_per_s=host),),
        update_params_per_s={1: host / UPDATE_BYTES},
        compressed_params_per_s=other_rates(host) if machine.host_bytes_per_s else {},
        num_cores=1,
        sources={"rates": "of the emulated machine"},
    )
