"""The moments of a step at which most is on the device, beside what is allocated for good.

Every layer's forward and backward of the first and the last micro-batch of a round, the head's, the
embedding's, and the optimizer's on the device. In a round all micro-batches pass a layer before any passes
the next, and come to the head one after the other, each with its backward: then it leaves a gradient of its
hidden states. Where the loss reaches the layers by another way too, all forwards of the head come first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.optimizer import Optimizer
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.layout import pools
from megatrain.layout.block_bytes import BlockBytes
from megatrain.layout.exchange import Exchange
from megatrain.model.profile.anatomy import IDS_BYTES, Anatomy, Layer
from megatrain.plan.memory.block_sums import BlockSums
from megatrain.plan.memory.layer_runs import layer_runs

SCALAR_BYTES = 4096
"""Room for what is counted nowhere: losses, token counts, checkpoint's tokens; 30 numbers were measured."""


class DevicePeak(NamedTuple):
    """A moment of a step, with the bytes that are on the device beside what is allocated for good."""

    name: str
    boundaries: int = 0
    saved: int = 0
    working: int = 0

    @property
    def nbytes(self) -> int:
        """Return all of them."""
        return self.boundaries + self.saved + self.working


class DevicePeaks:
    """The moments of a round."""

    def __init__(
        self,
        anatomy: Anatomy,
        choice: Choice,
        batch: StepBatch,
        optimizer: Optimizer = DEFAULT,
        *,
        overlaps: bool = True,
        has_scratch: bool = True,
    ) -> None:
        """Add up what earlier layers leave.

        Args:
            anatomy: The anatomy of the model.
            choice: The choice, with one policy per layer.
            batch: The batch of a step.
            optimizer: The optimizer of the run.
            overlaps: Whether the lanes run at the same time: gradients are rounded on their way home while
                backward goes on, and blocks update on the device while the first layers' forward does. False:
                they run one after the other, as on a CPU.
            has_scratch: Whether updates on the device run as operations of a GPU, which take scratch memory.
        """
        self._overlaps, self._has_scratch, self._optimizer = overlaps, has_scratch, optimizer
        self._anatomy = anatomy
        self._choice = choice
        self._layers = anatomy.layers_of(choice)
        self._runs = layer_runs(anatomy, choice)
        self._m = min(choice.lockstep, batch.num_micro_batches)
        self._streams = choice.outer_streams
        self._exchange = Exchange.of(batch)
        self._block_sums = BlockSums.of(anatomy, choice)
        self._is_alone = self._exchange.num_ranks == 1
        self._scratch = self._scratch_of_layers()
        """Bytes that updates on the device still take while the forward is in each layer."""
        sums = pools.square_sums(self._block_sums.num_blocks)
        if self._is_alone or overlaps:
            in_chunks = batch.runs.number * batch.num_ranks > 1
            sums += pools.gradient_scratch(self._block_sums.largest_numel, in_chunks=in_chunks)
        if overlaps and not self._is_alone:
            sums += pools.exchange_room([block.sizes for block in self._block_sums.blocks], self._exchange)
        sums += sum(layer.beside_bytes for layer in self._layers)
        self.constant = anatomy.constant_bytes - anatomy.pass_bytes + sums + SCALAR_BYTES
        self._travelling = [
            number
            for number, run in enumerate(self._runs)
            if run.late is None and self._travels(number, back=True)
        ]
        """Layers whose visits go to the host while others compute, and come back ahead of their use."""
        places = self._places()
        last = {place: number for number, place in enumerate(places)}
        self._telling = list(last.values())
        """Layers to look at: what earlier ones leave only adds up, so of those alike the last one."""
        stays = {place: self._stays(number, self._layers[number]) for place, number in last.items()}
        self._left = [stays[place] for place in places]
        """Bytes that a micro-batch leaves of each layer: its boundary, and the rest."""
        self._head_gradient = anatomy.head_gradient_bytes
        """Gradients of outer weights that a micro-batch leaves from the head's backward until the end."""
        self._held = [0, *accumulate(self._m * boundary for boundary, _ in self._left)]
        self._kept = [0, *accumulate(self._m * saved for _, saved in self._left)]
        """Bytes of all micro-batches that the layers before layer n leave: boundaries, and the rest."""

    def _places(self) -> list[tuple[object, ...]]:
        """Return for each layer all on which its moments depend, but for what earlier layers leave.

        That is its kind and policy, those of its neighbours, the two nearest layers before it that send
        something to the host, and whether one after it does.
        """
        kinds = list(zip(self._block_sums.kinds, (run.policy.name for run in self._runs), strict=True))
        nobody = (-1, "")
        before, after = [nobody, *kinds], [*kinds[1:], nobody]
        nearest, second = [], []
        one = two = nobody
        away = set(self._travelling)
        for number, kind in enumerate(kinds):
            nearest.append(one)
            second.append(two)
            if number in away:
                one, two = kind, one
        newest = self._travelling[-1] if self._travelling else -1
        later = [number < newest for number in range(len(kinds))]
        return list(zip(before, kinds, after, nearest, second, later, self._scratch, strict=False))

    @property
    def largest(self) -> DevicePeak:
        """Return the moment with most bytes."""
        return max(self.all(), key=lambda moment: moment.nbytes)

    def all(self) -> Iterator[DevicePeak]:
        """Yield every moment that may be the largest of compute's."""
        for number in self._telling:
            layer = self._layers[number]
            for place in {0, self._m - 1}:
                yield self._forward(number, layer, place)
                yield self._backward(number, layer, place)
            if self._runs[number].is_dropped:
                yield self._remaking(number)
        for place in {0, self._m - 1}:
            yield self._head_forward(place)
            yield self._head_backward(place)
        yield self._embedding()
        ids = IDS_BYTES * self._anatomy.tokens * self._m
        after = max([*self._scratch_bytes(), *self._rounded_bytes()], default=0)
        yield DevicePeak("update", working=self.constant + ids + after)

    def _rounded_bytes(self) -> Iterator[int]:
        """Yield what ranks take to exchange and round each sum of resident blocks.

        A rank that is alone has scratch memory for it, and so has one whose lanes run at the same time.
        """
        if self._is_alone or self._overlaps:
            return
        first = self._block_sums.first_streamed(self._choice)
        for number, is_outer in self._block_sums.sample(self._choice):
            if is_outer or number < first:
                yield self._completed_bytes(self._block_sums.blocks[number].sizes)

    def _completed_bytes(self, sizes: BlockBytes) -> int:
        """Return what several ranks take, beside memory of their own, to exchange and round a block's sum."""
        if self._overlaps:
            return 0
        exchanged = pools.exchanged_sum(sizes, self._exchange)
        rounded = pools.rounded_share(sizes, self._exchange.num_ranks)
        return max(exchanged, rounded)

    def _exchanged_at(self, end: int) -> int:
        """Return what ranks take at the model's beginning, or its end, whose block streams, one by one."""
        if self._is_alone or self._overlaps or not self._streams:
            return 0
        sizes = [self._block_sums.blocks[number].sizes for number in self._block_sums.ends[end]]
        return max(map(self._completed_bytes, sizes), default=0)

    def _scratch_bytes(self) -> Iterator[int]:
        """Yield the scratch of each update on the device."""
        first = self._block_sums.first_streamed(self._choice)
        for number, is_outer in self._block_sums.sample(self._choice):
            if self._has_scratch and (self._choice.outer_resident if is_outer else number < first):
                yield pools.update_scratch(self._block_sums.blocks[number].largest_run, self._optimizer)

    def _scratch_of_layers(self) -> list[int]:
        """Return for each layer the most scratch of updates that may run during its forward.

        Blocks outside all layers update first, then layers in forward order, and a layer's forward waits for
        its own update: so what is left are the updates of the resident layers after it.
        """
        residents = self._choice.resident_layers if self._overlaps and self._has_scratch else 0
        left = [0] * len(self._layers)
        after = 0
        for number in reversed(range(residents)):
            left[number] = after
            blocks = self._block_sums.blocks[
                self._block_sums.starts[number] : self._block_sums.starts[number + 1]
            ]
            runs = (block.largest_run for block in blocks)
            after = max([after, *(pools.update_scratch(run, self._optimizer) for run in runs)])
        return left

    def _stays(self, number: int, layer: Layer) -> tuple[int, int]:
        """Return what a micro-batch leaves of a layer on the device: its boundary, and the rest."""
        run = self._runs[number]
        policy = run.policy
        if run.late is not None:
            return 0, run.late.left_bytes
        if run.is_dropped:
            return 0, layer.saved_bytes[policy.name]
        if policy.is_offloaded:
            return 0, layer.offload_left_bytes + self._routes_beside(number)
        saved = layer.saved_bytes[policy.counted_as]
        boundary = layer.boundary_bytes if layer.holds_input[policy.name] else 0
        rest = saved - boundary + self._routes_beside(number)
        if self._is_source(number) and not boundary:
            boundary = layer.boundary_bytes
        if run.is_boundary_on_host:  # and with it kept results, and what flows into experts that come apart
            return 0, rest - (run.leaving_bytes - layer.boundary_bytes)
        return boundary, rest

    def _is_source(self, number: int) -> bool:
        return number + 1 < len(self._layers) and self._runs[number + 1].is_dropped

    def _routes_beside(self, number: int) -> int:
        """Return the bytes of routes that a layer keeps for the next one's boundary, which needs it again."""
        has_own = self._runs[number].policy.reruns
        return self._layers[number].route_bytes if self._is_source(number) and not has_own else 0

    def _full(self, number: int) -> int:
        """Return what a micro-batch's forward of a layer saves while it is still on the device."""
        return self._layers[number].saved_bytes[self._runs[number].policy.counted_as]

    def _travels(self, number: int, *, back: bool = False) -> int:
        """Return the bytes of a micro-batch that leave the device after a layer's forward, or come back."""
        layer, run = self._layers[number], self._runs[number]
        if run.policy.is_offloaded:
            return run.host_bytes if back else self._full(number) - layer.offload_left_bytes
        return run.leaving_bytes if run.is_boundary_on_host else 0

    def _leaving(self, number: int, place: int, *, after: int = -1) -> int:
        """Return what the newest visit that goes to the host still has on the device in a layer's forward.

        Visits of layers up to `after` do not count.
        """
        newest = bisect_right(self._travelling, number if place else number - 1) - 1
        if newest < 0 or self._travelling[newest] <= after:
            return 0
        return self._travels(self._travelling[newest])

    def _arriving(self, number: int, place: int, count: int = 1) -> int:
        """Return what is on the device again of the next `count` visits that come from the host."""
        nbytes, index = 0, bisect_right(self._travelling, number) - 1
        while count > 0 and index >= 0:
            layer = self._travelling[index]
            visits = min(count, self._m - 1 - place if layer == number else self._m)
            nbytes += visits * self._travels(layer, back=True)
            count -= visits
            index -= 1
        return nbytes

    def _beside(self, num_begun: int, num_ended: int = 0) -> int:
        """Return what forwards themselves hold of which so many have passed the embedding, or have ended."""
        anatomy, boundary = self._anatomy, self._layers[0].boundary_bytes
        num_open = self._m - num_ended
        nbytes = self.constant + num_open * anatomy.pass_bytes + num_ended * anatomy.graph_bytes
        lets_go = anatomy.lets_go_of_embeddings and self._runs[0].late is not None
        if anatomy.holds_embedding and self._left[0][0] == 0 and not lets_go:
            nbytes += min(num_open, num_begun) * boundary
        return nbytes

    def _waiting(self) -> int:
        """Return what a micro-batch that waits for its turn at the head has beside what the graph holds."""
        layer, held = self._layers[-1], self._left[-1][0]
        return layer.boundary_bytes + (layer.boundary_bytes if held == 0 else 0)

    def _left_by_head(self, num_passed: int, num_back: int) -> int:
        """Return what micro-batches leave whose forward of the head has ended, and whose backward has."""
        passed = (num_passed - num_back) * self._anatomy.head_saved_bytes
        return passed + num_back * (self._head_gradient + self._layers[-1].boundary_bytes)

    def _forward(self, number: int, layer: Layer, place: int) -> DevicePeak:
        """A micro-batch is in a layer, and `place` others have passed it."""
        policy = self._runs[number].policy.name
        boundary, rest = self._left[number]
        passed = layer.boundary_bytes if number < len(self._layers) - 1 else self._waiting()
        leaving = self._leaving(number, place)
        late = self._runs[number].late
        peak = layer.forward_peak_bytes[policy] + self._full(number)
        working = (peak if late is None else late.forward_peak_bytes) - layer.boundary_bytes
        working += self._scratch[number] + (self._m - 1) * layer.waiting_forward_bytes
        working += self._routes_beside(number)
        return DevicePeak(
            f"forward of layer {number}",
            boundaries=self._held[number] + place * boundary + (self._m - place) * layer.boundary_bytes,
            saved=self._kept[number] + place * rest + leaving,
            working=working + place * passed + self._beside(self._m if number > 0 else place),
        )

    def _head_forward(self, place: int) -> DevicePeak:
        """A micro-batch is in the head, and `place` others have passed it."""
        anatomy, waiting = self._anatomy, self._m - 1 - place
        num_back = 0 if anatomy.loss_reaches_layers else place
        return self._in_head(
            "forward of the head",
            max(
                anatomy.norm_forward_peak_bytes + self._beside(self._m, place),
                anatomy.head_forward_peak_bytes + self._beside(self._m, place + 1),
            )
            + waiting * self._waiting()
            + self._left_by_head(place, num_back),
        )

    def _head_backward(self, place: int) -> DevicePeak:
        """The backward of a micro-batch is in the head; that of `place` others has left it."""
        anatomy, others = self._anatomy, self._m - 1
        waiting = 0 if anatomy.loss_reaches_layers else others - place
        return self._in_head(
            "backward of the head",
            max(anatomy.head_backward_peak_bytes, anatomy.head_gradient_bytes + self._exchanged_at(1))
            + waiting * self._waiting()
            + self._left_by_head(others - waiting, place)
            + self._beside(self._m, self._m - waiting),
        )

    def _in_head(self, name: str, working: int) -> DevicePeak:
        last = len(self._layers) - 1
        boundary, rest = self._left[last]
        return DevicePeak(
            name,
            boundaries=self._held[last] + self._m * boundary,
            saved=self._kept[last] + self._m * rest + self._leaving(last, 0),
            working=working,
        )

    def _in_backward(self) -> int:
        return self.constant + self._m * self._anatomy.graph_bytes

    def _backward(self, number: int, layer: Layer, place: int) -> DevicePeak:
        """The backward of a micro-batch is in a layer, and those of `place` others have left it."""
        policy, m, late = self._runs[number].policy, self._m, self._runs[number].late
        boundary, rest = self._left[number]
        peaks = layer.fragment_peak_bytes if self._choice.comes_apart else layer.backward_peak_bytes
        saved = self._full(number)
        if policy.is_offloaded:
            saved = layer.saved_bytes[policy.name] + layer.offload_left_bytes
        peak = peaks[policy.name] + saved
        if late is not None:
            peak = late.fragment_peak_bytes if self._choice.comes_apart else late.backward_peak_bytes
        working = peak - layer.boundary_bytes
        arriving = self._arriving(number, place)
        if policy.is_offloaded:
            parts = layer.fragments[:1] if self._choice.comes_apart else layer.fragments
            at_end = (
                sum(part.sizes.gradient_bytes for part in parts) + self._arriving(number, place, 2) - arriving
            )
            if place == 0 and not self._leaving(len(self._layers), 0, after=number):
                # the newest to go to the host comes back first: its copy may not be done, so nothing is freed
                at_end += saved
                working = max(
                    working, saved + layer.made_bytes[self._choice.comes_apart] - layer.boundary_bytes
                )
            working = max(working, at_end)
        working = max(working, self._rounding(number, layer, place) - layer.boundary_bytes)
        beside = (m - 1) * (layer.boundary_bytes + layer.waiting_backward_bytes)
        of_head = m * self._head_gradient
        is_dropped = self._runs[number].is_dropped
        remade = self._remade(number) - place * layer.boundary_bytes if is_dropped else 0
        return DevicePeak(
            f"backward of layer {number}",
            boundaries=self._held[number] + (m - 1 - place) * boundary + max(layer.boundary_bytes, remade),
            saved=self._kept[number] + (m - 1 - place) * rest + arriving,
            working=working + beside + of_head + self._in_backward() + self._routes_beside(number),
        )

    def _rounding(self, number: int, layer: Layer, place: int) -> int:
        """Return what is there when a layer's gradients are complete: exchanged, and rounded on their way."""
        if self._is_alone or place < self._m - 1:
            return 0
        late = self._runs[number].late
        collected = (
            layer.collect_bytes[self._runs[number].policy.name] if late is None else late.collect_bytes
        )
        *parts, whole = collected
        if not self._choice.comes_apart:
            return whole + self._completed_bytes(sum((f.sizes for f in layer.fragments), BlockBytes()))
        return max(
            alive + self._completed_bytes(fragment.sizes)
            for alive, fragment in zip(parts, layer.fragments, strict=True)
        )

    def _remade(self, number: int) -> int:
        """Return the bytes of all dropped boundaries that are there in the backward of a dropped layer."""
        nbytes = 0
        while self._runs[number].is_dropped:
            nbytes += self._m * self._layers[number].boundary_bytes
            number -= 1
        if self._runs[number].is_boundary_on_host:  # it comes back with what waits beside it
            nbytes += self._m * self._runs[number].leaving_bytes
        return nbytes

    def _remaking(self, number: int) -> DevicePeak:
        """The layers before run again for a dropped boundary."""
        layer = self._layers[number]
        return DevicePeak(
            f"boundary of layer {number}",
            boundaries=self._held[number] + self._remade(number),
            saved=self._kept[number] + self._m * self._left[number][1],
            working=self._layers[number - 1].rerun_peak_bytes
            + self._m * (layer.boundary_bytes + self._head_gradient)
            + self._in_backward(),
        )

    def _embedding(self) -> DevicePeak:
        anatomy, first = self._anatomy, self._layers[0]
        return DevicePeak(
            "backward of the embedding",
            working=anatomy.embedding_peak_bytes
            + self._exchanged_at(0)
            + self._m * self._head_gradient
            + (self._m - 1) * first.boundary_bytes
            + self._in_backward(),
        )
