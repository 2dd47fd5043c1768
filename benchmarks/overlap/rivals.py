"""Rivals' steps as tasks on the same lanes. Where a source leaves a choice, it is the one that favours them.

MegaTrain (`megatrain_step`), read in infinity/model/cpu_master.py and examples/sft/train.py of
DLYuanGod/MegaTrain at 919520f; checkpoint_interval 4 and 12 gradient slabs are its defaults:

- Three uploads per layer and micro-batch: forward, recomputation of its group of 4 under no_grad, and once
  more for its backward, which runs the forward again: 3 forwards and a backward. The head is not recomputed.
- Two flat buffers and two templates; a layer is copied from one to the other (4 bytes per parameter of
  device memory) before use. A flat buffer is free from then on, a template when its gradient has left.
  The launching thread runs ahead as far as these allow: no other wait of it is modelled.
- A micro-batch begins with a load that nothing covers (`weight_stream.synchronize()`), has a host wait
  between loss and backward (`.item()`), and ends with `torch.cuda.synchronize()` and a wait until the host
  has added up all gradients (`_accumulate_grads_batch`): the embedding's, at the end, are not covered.
- Gradients go home in bf16 after every micro-batch and are added on the host in bf16: 4 bytes of host memory
  per parameter in the first, 6 later, at full bandwidth although it is one Python thread.
- Then, one after the other: norm (2), scaling (4), DeepSpeed's CPU Adam on bf16 weights with fp32 moments
  (22: weights 4, gradient 2, moments 16), the copy into the pinned flats (4, layers only), and the upload of
  embedding and head, at full speed although their memory is not pinned.
- Left out: Python between the copies, allocation of gradients every step, chunked loss in Python.

ZeRO-3 with CPU offload (`zero3_step`), read in deepspeed/runtime/zero of 0.19.8; activation checkpoints:

- A block is fetched for its forward and again for recomputation and backward; fetches begin one block ahead
  (stage3_prefetch_bucket_size is 5e7 parameters by default, a quarter of a block: favoured). The last blocks
  within stage3_max_reuse_distance, 1e9 parameters, are not fetched again.
- Gradients go home in bf16 in every micro-batch; from the second on the sum comes up, is added to, and
  returns (`partition_grads`); at the last one they go home in fp32 too. All of it is asynchronous here.
- `keeps`: without activation checkpoints, if one micro-batch's activations fit: Hugging Face's switch is all
  or nothing. MegaTrain has no such switch.
- Then, one after the other: `unscale_and_clip_grads` (8), CPU Adam in fp32 (28: gradient 4, master 8, moments
  16), and the cast into the bf16 copy (6). The norm is taken on the device.

llmq and ml_dataflow (`accumulation_step`) are only here to check the method against their published rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.overlap.work import Costs, Step, Task
from megatrain.plan.program.operations import Buffer, Lane

MEGATRAIN_GROUP = 4
MEGATRAIN_SLABS = 12
MEGATRAIN_STEP_BYTES = {"norm": 2, "scale": 4, "adam": 22}
MEGATRAIN_REFRESH_BYTES = 4
ZERO3_STEP_BYTES = {"unscale and clip": 8, "adam": 28, "cast": 6}
ZERO3_REUSE_PARAMS = 1e9

Buffers = tuple[Buffer, ...]


class _Tasks:
    """A list of tasks under construction."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.tasks: list[Task] = []

    def add(self, lane: Lane, kind: str, work: float, reads: Buffers = (), writes: Buffers = ()) -> None:
        self.tasks.append(Task(lane, work, reads, writes, kind))

    def compute(self, kind: str, work: float, reads: Buffers = (), writes: Buffers = ()) -> None:
        self.add(Lane.COMPUTE, kind, work, reads, writes)

    def step(self, name: str, tokens: int, **details: object) -> Step:
        return Step(name=name, tasks=self.tasks, costs=self.costs, tokens=tokens, details=details)


def megatrain_step(costs: Costs, *, tokens: int, num_micro_batches: int = 1) -> Step:
    """List MegaTrain's step."""
    build = _Megatrain(costs)
    for number in range(num_micro_batches):
        build.micro_batch(tokens / num_micro_batches, is_first=number == 0)
    build.optimizer()
    return build.step("MegaTrain's schedule", tokens)


class _Megatrain(_Tasks):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.num_blocks = costs.shape.num_blocks
        self.layer_bytes = 2 * costs.shape.block_params
        self.part_bytes = 2 * costs.shape.part_params
        self.slab = 0

    def micro_batch(self, tokens: float, *, is_first: bool) -> None:
        forward = self.costs.forward(tokens)
        self.load(0, (("micro_batch", 0),))
        self.unflatten(0)
        for layer in range(self.num_blocks):
            if layer + 1 < self.num_blocks:
                self.load(layer + 1)
            self.unflatten(layer)
            self.compute("forward", forward, (("template", layer % 2),))
        head = self.costs.head(tokens)
        self.compute("head", head, writes=(("loss", 0),))
        self.compute("head", 2 * head, writes=(("head_gradient", 0),))
        self.bring_home("head", self.part_bytes, is_first=is_first)
        after_loss: Buffers = (("loss", 0),)
        for start in range((self.num_blocks - 1) // MEGATRAIN_GROUP * MEGATRAIN_GROUP, -1, -MEGATRAIN_GROUP):
            group = range(start, min(start + MEGATRAIN_GROUP, self.num_blocks))
            for layer in group:
                self.load(layer, after_loss)
                after_loss = ()
                self.unflatten(layer)
                self.compute("forward", forward, (("template", layer % 2),))
            for layer in reversed(group):
                self.load(layer)
                self.unflatten(layer)
                template: Buffer = ("template", layer % 2)
                self.compute("backward", 3 * forward, (template,), (("layer_gradient", layer % 2),))
                slab: Buffer = ("slab", self.slab % MEGATRAIN_SLABS)
                self.slab += 1
                reads = (template, ("layer_gradient", layer % 2))
                self.add(Lane.OFFLOAD, "offload", self.layer_bytes, reads, (slab,))
                work = (2 if is_first else 3) * self.layer_bytes
                self.add(Lane.HOST, "accumulate", work, (slab,))
        self.compute("backward", self.costs.device_pass(2 * self.part_bytes), (), (("embed_gradient", 0),))
        self.bring_home("embed", self.part_bytes, is_first=is_first)
        self.add(Lane.HOST, "join", 0.0, (), (("micro_batch", 0),))

    def load(self, layer: int, reads: Buffers = ()) -> None:
        self.add(Lane.FETCH, "fetch", self.layer_bytes, reads, (("flat", layer % 2),))

    def unflatten(self, layer: int) -> None:
        work = self.costs.device_pass(2 * self.layer_bytes)
        self.compute("copy", work, (("flat", layer % 2),), (("template", layer % 2),))

    def bring_home(self, part: str, nbytes: float, *, is_first: bool) -> None:
        self.add(Lane.OFFLOAD, "offload", nbytes, ((f"{part}_gradient", 0),), ((f"{part}_slab", 0),))
        self.add(Lane.HOST, "accumulate", (2 if is_first else 3) * nbytes, ((f"{part}_slab", 0),))

    def optimizer(self) -> None:
        for nbytes in MEGATRAIN_STEP_BYTES.values():  # after "join", in the same lane
            self.add(Lane.HOST, "update", nbytes * self.costs.shape.num_params)
        refresh = MEGATRAIN_REFRESH_BYTES * self.num_blocks * self.costs.shape.block_params
        self.add(Lane.HOST, "update", refresh, (), (("updated", 0),))
        self.add(Lane.FETCH, "fetch", 2 * self.part_bytes, (("updated", 0),))


def zero3_fits_activations(costs: Costs, tokens: float) -> bool:
    """Whether the device holds what a micro-batch of `tokens` saves, and the parameters that are there."""
    shape = costs.shape
    activations = tokens * shape.num_blocks * shape.kept_bytes(whole=True)
    parameters = 2 * (ZERO3_REUSE_PARAMS + 4 * shape.part_params)  # with the gradients of the outer parts
    return activations + parameters <= 0.95 * costs.rates.device_bytes


def zero3_step(costs: Costs, *, tokens: int, num_micro_batches: int = 1, keeps: bool = False) -> Step:
    """List the step of ZeRO-3 with parameters and optimizer on the CPU."""
    build = _Zero3(costs)
    build.keeps = keeps and zero3_fits_activations(costs, tokens / num_micro_batches)
    for number in range(num_micro_batches):
        is_last = number == num_micro_batches - 1
        build.micro_batch(tokens / num_micro_batches, is_first=number == 0, is_last=is_last)
    build.take_home(build.visited)
    for nbytes in ZERO3_STEP_BYTES.values():
        build.add(Lane.HOST, "update", nbytes * costs.shape.num_params, (("home", 0),))
    return build.step("ZeRO-3's schedule", tokens, keeps_activations=build.keeps)


class _Zero3(_Tasks):
    def __init__(self, costs: Costs) -> None:
        super().__init__(costs)
        self.visited = 0
        self.keeps = False
        self.leaving: list[tuple[int, float, bool, bool]] = []

    def micro_batch(self, tokens: float, *, is_first: bool, is_last: bool) -> None:
        shape, forward, head = self.costs.shape, self.costs.forward(tokens), self.costs.head(tokens)
        last = shape.num_blocks - 1
        reused = range(shape.num_blocks - int(ZERO3_REUSE_PARAMS // shape.block_params), shape.num_blocks)
        self.visit("forward", 0.0, 2 * shape.part_params)
        for _ in range(shape.num_blocks):
            self.visit("forward", forward, 2 * shape.block_params)
        self.visit("head", 3 * head, 2 * shape.part_params)
        self.gradient(shape.part_params, is_first=is_first, is_last=is_last)
        for layer in range(last, -1, -1):
            work = (2 if self.keeps else 3) * forward
            self.visit("backward", work, 0 if layer in reused else 2 * shape.block_params)
            self.gradient(shape.block_params, is_first=is_first, is_last=is_last)
        self.visit("backward", 0.0, 0)
        self.gradient(shape.part_params, is_first=is_first, is_last=is_last)

    def visit(self, kind: str, work: float, nbytes: float) -> None:
        """Pass a module, whose fetch begins with the pass of the module before it."""
        at = self.visited
        self.visited += 1
        if nbytes:
            self.add(Lane.FETCH, "fetch", nbytes, (("passed", at - 2),), (("weights", at),))
        self.take_home(at - 2)
        self.compute(kind, work, (("weights", at),), (("passed", at), ("new_gradient", at)))

    def gradient(self, params: float, *, is_first: bool, is_last: bool) -> None:
        """Note that the last pass left a gradient."""
        self.leaving.append((self.visited - 1, params, is_first, is_last))

    def take_home(self, until: int) -> None:
        """Take home what passes up to `until` left: behind the fetch that could begin at the same time."""
        while self.leaving and self.leaving[0][0] <= until:
            at, params, is_first, is_last = self.leaving.pop(0)
            reads: Buffers = (("new_gradient", at),)
            if not is_first:
                after = (("weights", at + 2),)
                self.add(Lane.RESTORE, "load", 2 * params, reads + after, (("sum", at),))
                reads += (("sum", at),)
            nbytes = (2 + 4 * is_last) * params
            self.add(Lane.OFFLOAD, "offload", nbytes, reads, (("home", 0),))


@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulation:
    """What a system that runs round after round and updates on the device does."""

    name: str
    streams_weights: bool
    gradients_at_home: bool
    """Every round brings them up and takes them home; otherwise they add up on the device."""
    saves_boundaries: bool = False
    recomputed: float = 0.0
    """Forwards that are made again, as a part of one."""
    state_up: float = 0.0
    """Bytes per parameter that come up for the update, after the last backward, block by block."""
    state_down: float = 0.0
    update_bytes: float = 14.0
    """Bytes of device memory per parameter that the update touches."""


def accumulation_step(costs: Costs, system: Accumulation, *, tokens: int, rounds: int) -> Step:
    """List the step of a system that updates on the device: llmq, ml_dataflow."""
    build = _Accumulation(costs, system)
    for number in range(rounds):
        build.round(tokens / rounds, is_first=number == 0)
    build.optimizer()
    return build.step(system.name, tokens)


class _Accumulation(_Tasks):
    def __init__(self, costs: Costs, system: Accumulation) -> None:
        super().__init__(costs)
        self.system = system
        self.visited = 0
        self.params = costs.shape.block_params

    def round(self, tokens: float, *, is_first: bool) -> None:
        forward, boundary = self.costs.forward(tokens), 2 * tokens * self.costs.shape.hidden
        num_blocks = self.costs.shape.num_blocks
        for layer in range(num_blocks):
            self.visit("forward", forward, writes=(("boundary", layer),))
            if self.system.saves_boundaries:
                self.add(Lane.SAVE, "save", boundary, (("boundary", layer),), (("saved", layer),))
        self.compute("head", 3 * self.costs.head(tokens))
        for layer in range(num_blocks - 1, -1, -1):
            ring: Buffer = ("gradient", layer % 2)
            reads: Buffers = ()
            if self.system.saves_boundaries:
                reads = (("restored", layer % 2),)
                self.add(Lane.RESTORE, "restore", boundary, (("saved", layer),), reads)
            if self.system.gradients_at_home and not is_first:
                self.add(Lane.RESTORE, "load", 2 * self.params, (("home", layer),), (ring,))
            self.visit("backward", (2 + self.system.recomputed) * forward, reads, (ring,))
            if self.system.gradients_at_home:
                self.add(Lane.OFFLOAD, "offload", 2 * self.params, (ring,), (("home", layer),))

    def visit(self, kind: str, work: float, reads: Buffers = (), writes: Buffers = ()) -> None:
        slot: Buffer = ("slot", self.visited % 2)
        self.visited += 1
        if self.system.streams_weights:
            self.add(Lane.FETCH, "fetch", 2 * self.params, (), (slot,))
        self.compute(kind, work, (slot, *reads), writes)

    def optimizer(self) -> None:
        shape = self.costs.shape
        outer = [shape.part_params] * 2
        for number, params in enumerate([shape.block_params] * shape.num_blocks + outer):
            ring: Buffer = ("state", number % 2)
            if self.system.state_up:
                self.add(Lane.FETCH, "fetch", self.system.state_up * params, (), (ring,))
            self.compute("update", self.costs.device_pass(self.system.update_bytes * params), (), (ring,))
            if self.system.state_down:
                self.add(Lane.OFFLOAD, "offload", self.system.state_down * params, (ring,))
