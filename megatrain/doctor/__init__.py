"""Looks at this machine: what is wrong with it for training, and how fast it is."""

from megatrain.doctor.examine import Report, examine
from megatrain.doctor.machine_spec import compute_device, keep, this_machine
from megatrain.doctor.proof import prove, save_proof

__all__ = ["Report", "compute_device", "examine", "keep", "prove", "save_proof", "this_machine"]
