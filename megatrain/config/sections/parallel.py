"""The section `parallel`: the parts of a step, whose result does not depend on who computes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator

from megatrain.config.runs import Runs, power_of_two
from megatrain.config.sections.section import Section
from megatrain.config.types import Count, Rate, reads_as
from megatrain.errors import ConfigError

PowerOfTwo = Annotated[Count, AfterValidator(power_of_two), reads_as("a power of two")]


class ParallelConfig(Section):
    """These settings say how a step is cut into parts that may be computed apart."""

    shards: PowerOfTwo | None = None
    """Runs of a step: contiguous, equally long pieces of its `train.grad_accumulation` micro-batches; a power
    of two. Gradients add up in order inside a run, and the sums of runs by a balanced tree, so the result
    depends on this number, and not on who computes what. Each doubling keeps one more sum in fp32. null = one
    per rank (of those that share out rows, one for all), or as many as the checkpoint was made with."""
    sequence: PowerOfTwo = 1
    """Ranks that train the same micro-batches, each on its part of every row's tokens: for rows that are too
    long for one. A power of two that divides the number of ranks, and the model's attention heads and heads
    of keys and values: inside attention each rank has all tokens and a part of the heads. Results differ from
    those of 1 by rounding alone."""
    timeout: Rate = 300.0
    """Seconds after which a rank that is silent, or keeps others waiting within a step, is taken for lost:
    all end, and one says which it was. Before the first step others wait as long as it lives, and while it
    evaluates or saves as long as it moves. A process that a debugger has stopped is silent."""
    gather: Literal["auto", "on", "off"] = "auto"
    """Each rank fetches a piece of every block's weights over its own link, and the ranks of a node gather
    them, so a link carries a part of what it does where each rank fetches whole blocks (off). No bit depends
    on it. auto = on where the accelerators of all ranks reach each other's memory."""

    @property
    def gathers(self) -> bool | None:
        """Whether ranks gather weights; None: where their devices reach each other."""
        return None if self.gather == "auto" else self.gather == "on"


def cut_problems(shards: int, num_micro_batches: int) -> list[str]:
    """Say why the micro-batches of a step cannot be cut into so many runs, if they cannot."""
    try:
        Runs.of(shards, num_micro_batches)
    except ConfigError as error:
        return [str(error)]
    return []
