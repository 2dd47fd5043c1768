"""A machine's capacities in bytes, rates in bytes/s and FLOP/s. Its import loads neither torch nor numba."""

from megatrain.hardware.machines import load_machine, machine_names, save_machine
from megatrain.hardware.matmul import measure_matmul_peak
from megatrain.hardware.memory import GIB, MemoryLimit, host_memory, memory_rate, resident_bytes
from megatrain.hardware.spec import Drives, HardwareSpec, MemoryNode

__all__ = [
    "GIB",
    "Drives",
    "HardwareSpec",
    "MemoryLimit",
    "MemoryNode",
    "host_memory",
    "load_machine",
    "machine_names",
    "measure_matmul_peak",
    "memory_rate",
    "resident_bytes",
    "save_machine",
]
