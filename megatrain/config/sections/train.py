"""The step of a run, and how many of them there are: the section `train`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatrain.config.choice import AUTO
from megatrain.config.sections.section import Section
from megatrain.config.types import (
    Count,
    Device,
    OpenBudget,
    OpenCount,
    OpenPrecision,
    OpenSeconds,
    Patterns,
    Rate,
    Seed,
    one_of,
)
from megatrain.objective.registry import DEFAULT, OBJECTIVES

_LEARNS = [f"{one.learns} (`{one.name}`)" for one in OBJECTIVES.values()]


class TrainConfig(Section):
    """The step, and how many of them."""

    loss: Annotated[str, one_of(*OBJECTIVES)] = Field(
        default=DEFAULT.name,
        description=f"The objective: {', '.join(_LEARNS[:-1])}, or {_LEARNS[-1]}; see `preference`.",
    )
    steps: Count | None = None
    """Optimizer steps. null = `train.epochs`."""
    epochs: Rate | None = None
    """Passes over the data, such as 3 or 0.5, in place of `train.steps`. null = 1."""
    tokens_per_step: OpenCount = AUTO
    """Tokens per optimizer step, of all ranks, rounded down to whole rows; what fills rows up counts too, and
    both sequences of a pair. `auto` = 131,072 (8,192 on a CPU, 32,768 where adapters are trained) or less, so
    that rows are a power of two, halved until the run has 100 steps and a pass over its data 32; if
    `train.steps` is given, only a pass counts."""
    micro_batch_size: OpenCount = AUTO
    """Rows of `data.seq_len` tokens in one forward and backward; where answers are judged (`train.loss`),
    pairs or answers, of two sequences each. `auto` = as planned: the fastest of 1, 2, 3, 4, 6, 8, ... 64. It
    changes the last bits of results, so it is chosen once, and a run that goes on keeps it."""
    grad_accumulation: OpenCount = AUTO
    """Micro-batches per optimizer step. `auto` = as many as make `train.tokens_per_step`."""
    seed: Seed = 0
    """Seed of random initialisation, dropout and the order of the data."""
    precision: OpenPrecision = AUTO
    """`fp32`, or `bf16` compute with exact fp32 master weights; both take 12 bytes per parameter. `auto` =
    `bf16` on accelerators, `fp32` on a CPU."""
    device: Device = "auto"
    """Where blocks run. `auto` = the GPU if there is one; `emulated` = a simulated GPU, for tests, with the
    rates of a JSON file if one is named."""
    reproducible: bool = False
    """Keep to the plan that was made at the start. false = plan anew between steps when the machine turns out
    faster or slower; every choice is exact, but the times of steps then depend on the machine's mood."""
    deterministic: bool = False
    """Give the same bits in every run on the same device with the same software: operations take their
    deterministic forms, attention is flash and not cuDNN, and one that has no such form stops the run. Slower
    on a GPU, as `megatrain plan` says; no difference on a CPU."""
    on_spike: Literal["warn", "skip", "stop", "replay"] = "warn"
    """The action when the loss jumps: above the median of the last 64 steps by more than a tenth, and by
    more than 8 robust standard deviations. `warn` says so, `skip` makes no update, `stop` ends the run (exit
    code 5). `replay` runs the step twice more: if its bits differ the machine computes wrong, and the run
    ends (exit code 10), else it skips the step."""
    hang_after: OpenSeconds | None = AUTO
    """Seconds without progress in a step, an evaluation or a save, after which the device, a drive or a
    driver is taken to hang: the last whole step is saved from RAM, and the run ends (exit code 8). Any one
    layer, update or compilation must take less. `auto` = 20 times the median of the last steps, 30 minutes or
    more. null = wait without limit. Several ranks have `parallel.timeout`."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Run layers through `torch.compile`, one compilation for all of a kind: about a minute, in the first
    step. `auto` = on a GPU, if torch has a compiler for it."""
    activation_budget: OpenBudget = AUTO
    """What compiled layers may keep for their backward, as a share of what they would; they compute the rest
    again, the cheapest first. `auto` = as planned; 1.0 where layers are not compiled. It changes the last
    bits of results, so it is chosen once, and a run that goes on keeps it."""
    tile_tokens: OpenCount = AUTO
    """Tokens of a tile: MLPs, norms and all else in a layer that computes each token by itself pass a longer
    row tile by tile, forward and backward, so what is inside of them is in memory for one tile. Gradients of
    weights add up over tiles in fp32, so it changes their last bits; a number of at least `data.seq_len`
    passes rows whole. `auto` = 4,096 where rows are longer than 131,072 tokens, else whole rows."""
    freeze: Patterns = ()
    """Shell patterns of the names of parameters that are not trained, such as `["model.embed_tokens*"]`. They
    take 2 bytes each in bf16, and no gradient of theirs is made."""
    only: Patterns = ()
    """Shell patterns of the names of the parameters that are trained, and no others. [] = all."""
