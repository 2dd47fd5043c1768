"""Looks at this machine: what is wrong with it for training, and how fast it is."""

from megatrain.doctor.examine import Report, examine
from megatrain.doctor.machine_spec import keep, this_machine

__all__ = ["Report", "examine", "keep", "this_machine"]
