"""The streamed side of a run: a model, its engine and optimizer, and how a step is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import megatrain
from benchmarks.training.random_search.oracle import Batch
from benchmarks.training.random_search.settings import Settings
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.read_choice import read_choice
from megatrain.model.blocks import ends_of, find_blocks, group_layers
from megatrain.stream.engine import Engine
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from megatrain.stream.optimizer import StreamedOptimizer

PLAINEST: dict[str, Any] = {"extra_slots": 1, "extra_buffers": 0}


class Streamed:
    """A model that an engine streams."""

    engine: Engine
    optimizer: StreamedOptimizer

    def __init__(
        self, model: PreTrainedModel, settings: Settings, directory: Path, *, is_plain: bool = False
    ) -> None:
        """Attach a model as the settings say; plain: under the plainest choice, in RAM."""
        self.model = model
        self._settings = settings
        self._directory = directory
        self._is_plain = is_plain
        self._adamw = dict(settings["adamw"])
        self.tiers: Settings | None = None
        self._drawn: Mapping[str, Any] = PLAINEST
        self.attach(settings["choice"], settings["tiers"])

    def attach(self, choice: Mapping[str, Any], tiers: Settings | None) -> None:
        """Put a new engine under the model, which has none, and make a new optimizer.

        Raises:
            MegatrainError: The engine refuses it; the model is detached.
        """
        settings, device = self._settings, self._settings["device"]
        if self._is_plain:
            choice, tiers, device = PLAINEST, None, "cpu"
        rows = settings["data"]["rows"]
        engine = megatrain.attach(
            self.model,
            self._choice(choice),
            device=EmulatedLanes(EmulatedMachine(seed=settings["seed"])) if device == "emulated" else device,
            precision=settings["precision"],
            batch=StepBatch(
                micro_batch_size=rows,
                seq_len=max(settings["data"]["tokens"]),
                num_micro_batches=settings["num_micro_batches"],
                num_runs=settings["num_runs"],
            ),
            micro_batch_size=rows if settings["num_runs"] == 1 else None,
            compile="off",
            optimizer_state=settings["moments"],
            tiers=self.make_tiers(tiers),
        )
        try:
            self._take(engine)
        except BaseException:
            engine.detach()
            raise
        self.tiers, self._drawn = tiers, choice

    def attach_again(self) -> None:
        """Let `megatrain.reattach` detach and attach the model, which nothing changes meanwhile."""
        self._take(megatrain.reattach(self.engine, lambda model: model))

    def load(self, place: Path) -> None:
        """Go on with a model from files, attached as this one was."""
        trained = {name: parameter.requires_grad for name, parameter in self.model.named_parameters()}
        self.engine.close()
        tiers = None if self._is_plain else self.make_tiers(self.tiers)
        self.model = megatrain.load(
            place,
            precision=self._settings["precision"],
            tiers=tiers,
            fragments=bool(self._drawn.get("fragments")),
        ).train()
        if tiers is not None:  # they hold what was loaded, as it was laid out: nothing was frozen
            self.attach(self._drawn, self.tiers)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trained[name])
        if tiers is None:
            self.attach(self._drawn, self.tiers)

    def reconfigure(self, choice: Mapping[str, Any]) -> None:
        """Go on under another choice, as far as it can be another."""
        held = self.engine.choice
        kept = ("fragments", "head_chunk_tokens", "tiers", "blocks_in_ram", "weights_in_ram")
        wanted = self._choice({**choice, "fragments": held.fragments})
        values = {field.name: getattr(wanted, field.name) for field in fields(Choice)}
        self.engine.reconfigure(Choice(**{**values, **{name: getattr(held, name) for name in kept}}))

    def set_lr(self, lr: float) -> None:
        """Go on with another learning rate."""
        self._adamw["lr"] = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def backward(self, how: str, batches: Sequence[Batch], seeds: Sequence[int]) -> Tensor:
        """Run a step's forward and backward; `how` is of `Run.backward_of_oracle` too."""
        if how == "engine":
            return self.engine.forward_backward(batches, seeds=seeds)
        if how == "losses":
            losses = self.engine.run_losses(self.losses(batches), seeds=seeds, only_loss=True)
        elif how == "split":
            whole = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
            loss: Tensor = self.model(**whole).loss
            loss.backward()
            return loss.detach()
        else:
            losses = []
            for seed, loss_of in zip(seeds, self.losses(batches), strict=True):
                torch.manual_seed(seed)
                losses.append(loss_of())
                losses[-1].backward()
        total = losses[0].detach()
        for loss in losses[1:]:
            total = total + loss.detach()
        return total

    def losses(self, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
        """Return what computes the losses of a step whose micro-batches count alike."""
        return losses_of(self.model, batches)

    def make_tiers(self, tiers: Settings | None) -> megatrain.Tiers | None:
        """Make the tiers that the settings name, in directories of this run."""
        if tiers is None:
            return None
        drives = tuple(self._directory / f"drive{number}" for number in range(tiers["drives"]))
        return megatrain.Tiers(
            nvme=drives,
            ram=1 << 30,
            blocks_in_ram=tiers["blocks_in_ram"],
            weights_in_ram=tiers["weights_in_ram"],
        )

    def _take(self, engine: Engine) -> None:
        engine.arrangement.offloaded._min_bytes = 1  # tiny tensors leave the device too
        adamw = {**self._adamw, "betas": tuple(self._adamw["betas"])}
        if self._is_plain:
            adamw["updates"] = "serial"
        self.engine, self.optimizer = engine, engine.adamw(**adamw, seed=3)

    def _choice(self, drawn: Mapping[str, Any]) -> Choice:
        """Return a resolved choice; what is drawn of slots and buffers is beyond a layer's fragments."""
        blocks = find_blocks(self.model, fragments=drawn.get("fragments", False))
        layers = group_layers(blocks)
        most = max(map(len, layers))
        given = {name: value for name, value in drawn.items() if not name.startswith("extra_")}
        given["num_slots"] = most + drawn["extra_slots"]
        given["num_gradient_buffers"] = drawn["extra_buffers"] + (most if given.get("lockstep", 1) > 1 else 1)
        given["head_chunk_tokens"] = self._settings["head_chunk_tokens"]
        if not all(ends_of(blocks)):
            given["outer_streams"] = False  # tied weights cannot
        return read_choice(None, given).with_defaults(len(layers), most)


def losses_of(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Callable[[], Tensor]]:
    """Return what computes each micro-batch's own loss, as a share of all of them."""

    def loss(batch: Batch) -> Tensor:
        found: Tensor = model(**batch).loss
        return found / len(batches)

    return [partial(loss, batch) for batch in batches]
