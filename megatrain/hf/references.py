"""TRL's losses against a reference, whose passes come before those with gradients, as parts of the program.

TRL's loss runs the model again with its adapters off, or with the adapter `ref`. That is a state of the whole
model, which micro-batches that take turns at every layer cannot each have. So all micro-batches of a round
first pass with it, and their losses find the log-probabilities in the place of precomputed ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

from datasets import Dataset, concatenate_datasets
from torch import Tensor
from trl.trainer.utils import use_adapter

from megatrain.errors import ConfigError
from megatrain.hf.batches.ahead import Ahead
from megatrain.hf.batches.steps import StepGroup
from megatrain.hf.ranks import working_alone
from megatrain.hf.streaming import Streaming
from megatrain.stream.steps import PassBefore


class WithReference(Streaming):
    """Comes before a trainer of TRL whose loss compares the model with a reference, in a class's bases."""

    precompute_ref_logps: bool
    """Whether a batch's inputs have the log-probabilities of the reference; the attribute is TRL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Make the trainer; see `Streaming`.

        Raises:
            ConfigError: The trainer would hold a resident reference model.
        """
        own = {key: value for key, value in kwargs.items() if key != "megatrain"}
        given = inspect.signature(super(Streaming, self).__init__).bind(*args, **own).arguments
        model, config = given.get("model"), given.get("args")
        has_adapter = given.get("peft_config") is not None or hasattr(model, "peft_config")
        beforehand = getattr(config, "precompute_ref_log_probs", False)
        if given.get("ref_model") is not None or not (has_adapter or beforehand):
            name = type(self).__name__
            raise ConfigError(
                f"{name} would hold a second, resident model as its reference; leave ref_model out and pass "
                f"precompute_ref_log_probs=True in {type(config).__name__}, or train an adapter "
                "(peft_config=LoraConfig(...)), whose base is the reference"
            )
        self._num_passes_before = self._count_passes(config, in_step=not beforehand)
        super().__init__(*args, **kwargs)

    @staticmethod
    def _count_passes(config: Any, *, in_step: bool) -> int:
        """Count the passes before a step's losses; `in_step` adds those of the reference."""
        return int(in_step)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self._stream()  # the plain class computes them before it is complete
        ranks = self._ranks
        if ranks.size == 1:
            with self._references_together():
                return super()._precompute_ref_logps(dataset, *args, **kwargs)
        if ranks.rank > 0:
            return concatenate_datasets([dataset, Dataset.from_dict(ranks.tell())], axis=1)
        with working_alone(), self._references_together():
            found = super()._precompute_ref_logps(dataset, *args, **kwargs)
        ranks.tell({name: found[name][:] for name in found.column_names if name not in dataset.column_names})
        return found

    @contextmanager
    def _references_together(self) -> Iterator[None]:
        """Let the plain class's loop find the reference's results for many batches at once."""
        prepare, find = self.accelerator.prepare, self.compute_ref_log_probs
        loaders: list[Ahead] = []

        def find_all(batches: Sequence[Any]) -> list[Any]:
            with self._as_reference() if hasattr(self.model, "peft_config") else nullcontext():
                return self._turns.run([partial(find, self.model, batch) for batch in batches])

        def prepared(loader: Any) -> Any:
            loaders.append(Ahead(self.engine, prepare(loader), find_all))
            return loaders[-1]

        def take(*_: Any) -> Any:
            return loaders[-1].take()

        with (
            mock.patch.object(self.accelerator, "prepare", prepared),
            mock.patch.object(self, "compute_ref_log_probs", take),
        ):
            yield

    @contextmanager
    def _with_reference_before(self) -> Iterator[None]:
        """Let losses find the log-probabilities of their reference, which earlier passes have computed."""
        self._reference_is_in_step = not self.precompute_ref_logps
        with mock.patch.object(self, "precompute_ref_logps", True):
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return a batch's loss; the log-probabilities of its reference are there when it is computed."""
        with self._with_reference_before():
            return super().training_step(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the log-probabilities of each batch's reference are there when its loss is computed."""
        with self._with_reference_before():
            return super().evaluation_loop(*args, **kwargs)

    def _before(
        self,
        group: StepGroup,
        find: Callable[[Any], dict[str, Tensor]],
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> PassBefore:
        """Return a pass of all batches that this rank runs.

        Args:
            group: The group whose inputs receive the results.
            find: The function that passes the model once.
            around: The context around the pass, as in `PassBefore`.
        """

        def call(number: int) -> None:
            inputs = self._prepare_inputs(group.inputs[number])
            group.inputs[number] = {**inputs, **find(inputs)}

        calls = [partial(call, number) for number in group.own]
        return PassBefore(calls, around)

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        """Make the model its own reference, so that no call of a round switches adapters by itself."""
        model = self.accelerator.unwrap_model(self.model)
        adapter = "ref" if "ref" in model.peft_config else None
        with use_adapter(model, adapter), mock.patch.object(self, "ref_model", self.model):
            yield
