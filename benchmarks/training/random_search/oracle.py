"""The resident model that streamed runs are held against: plain PyTorch, no code of the engine's.

Gradients of micro-batches add up in fp32, in order, within a run, and those of runs by a balanced tree; what
is complete is rounded to the dtype of its weight. AdamW is torch's fused one over fp32 masters, each padded
with zeros to a multiple of 64 elements: its kernel rounds a parameter's last few elements otherwise.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.reference import padded_parameter, round_half_up, tree_sum

Batch = Mapping[str, Any]
IGNORED = -100


def num_targets(batch: Batch) -> int:
    """Count the tokens that a causal loss averages over."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


class Oracle:
    """A resident model, its fp32 masters and torch's AdamW."""

    def __init__(
        self, model: PreTrainedModel, *, precision: str, num_runs: int, adamw: Mapping[str, Any]
    ) -> None:
        """Copy `model`, which is in fp32, and round what bf16 has of it.

        Args:
            model: As it is attached.
            precision: `fp32` or `bf16`.
            num_runs: Of a step.
            adamw: `lr`, `betas`, `eps`, `weight_decay`.
        """
        self.model = copy.deepcopy(model)
        self.num_runs = num_runs
        self._adamw = dict(adamw)
        self._is_bf16 = precision == "bf16"
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        values = {name: parameter.detach().float().clone() for name, parameter in self.parameters.items()}
        if self._is_bf16:
            self._round_model()
        self.masters: dict[str, nn.Parameter] = {}
        self.gradients: dict[str, Tensor] = {}
        self._begin(values)
        self._divides = self._takes_total()
        self.is_random = self._draws_numbers()
        """A forward draws random numbers: dropout, or noise of routers."""

    # -- a step ---------------------------------------------------------------------------------------------

    def step_of_model(self, batches: Sequence[Batch], seeds: Sequence[int]) -> Tensor:
        """Run micro-batches of the model's own loss, averaged over all their tokens; return their loss."""
        total = sum(map(num_targets, batches))

        def loss(batch: Batch) -> Tensor:
            return self._share(batch, total, len(batches))

        return self.run([partial(loss, batch) for batch in batches], seeds)

    def run(self, losses: Sequence[Callable[[], Tensor]], seeds: Sequence[int]) -> Tensor:
        """Run calls and their backwards, one after the other; return the sum of what they return."""
        length = len(losses) // self.num_runs
        of_runs: list[dict[str, Tensor]] = [{} for _ in range(self.num_runs)]
        found: list[Tensor] = []
        for number, loss_of in enumerate(losses):
            torch.manual_seed(seeds[number])
            self.model.zero_grad(set_to_none=True)
            loss = loss_of()
            loss.backward()
            found.append(loss.detach())
            sums = of_runs[number // length]
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[name] = sums[name] + gradient if name in sums else gradient.clone()
        self.gradients = {}
        for name, parameter in self.parameters.items():
            if any(name in sums for sums in of_runs):
                zero = torch.zeros(parameter.shape)
                total = tree_sum([sums.get(name, zero) for sums in of_runs])
                self.gradients[name] = total.to(parameter.dtype).float()
        total_loss = found[0]
        for loss in found[1:]:
            total_loss = total_loss + loss
        return total_loss

    def norm(self) -> float:
        """Return the norm of all gradients."""
        return float(torch.stack([g.double().square().sum() for g in self.gradients.values()]).sum().sqrt())

    def update(self, norm: float, max_grad_norm: float | None) -> None:
        """Clip by `norm`, and apply AdamW to what has a gradient."""
        for name, master in self.masters.items():
            gradient = self.gradients.get(name)
            master.grad = None if gradient is None else padded_parameter(gradient).data
        if max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(
                list(self.masters.values()), max_grad_norm, torch.tensor(norm)
            )
        self.optimizer.step()
        self._write_back()
        self.gradients = {}

    def set_lr(self, lr: float) -> None:
        """Go on with another learning rate."""
        self._adamw["lr"] = lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    # -- what is read ---------------------------------------------------------------------------------------

    def master(self, name: str) -> Tensor:
        """Return a parameter's fp32 value."""
        parameter = self.parameters[name]
        return self.masters[name].detach()[: parameter.numel()].view(parameter.shape)

    # -- what is changed ------------------------------------------------------------------------------------

    def begin_again(self, *, keeps_masters: bool) -> None:
        """Go on with a new optimizer, for what is trained now.

        Args:
            keeps_masters: False: they are gone, and the weights in the working dtype are all that is left.
        """
        values = {name: self.master(name).clone() for name in self.masters} if keeps_masters else {}
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        own = {n: values.get(n, p.detach().float().clone()) for n, p in self.parameters.items()}
        self._begin(own)

    # -- inside ---------------------------------------------------------------------------------------------

    def _begin(self, values: Mapping[str, Tensor]) -> None:
        self.masters = {name: padded_parameter(value) for name, value in values.items()}
        decay = self._adamw["weight_decay"]
        groups = [
            {"params": [master], "weight_decay": decay if self._decays(name) else 0.0}
            for name, master in self.masters.items()
        ]
        hyper = {key: value for key, value in self._adamw.items() if key != "weight_decay"}
        self.optimizer = torch.optim.AdamW(groups, fused=True, **hyper)
        self._write_back()

    def _decays(self, name: str) -> bool:
        return self.parameters[name].ndim >= 2 and not name.endswith("bias")

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                value = self.master(name)
                parameter.copy_(value if parameter.dtype == torch.float32 else round_half_up(value))

    def _round_model(self) -> None:
        """Take the dtypes of parameters, and the buffers, of a model that transformers loads in bf16."""
        inside = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        with tempfile.TemporaryDirectory() as place, torch.random.fork_rng(devices=[]):
            AutoModelForCausalLM.from_config(copy.deepcopy(inside.config)).save_pretrained(place)
            built = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16)
        dtypes = {name: parameter.dtype for name, parameter in built.named_parameters(remove_duplicate=False)}
        for name, parameter in self.model.named_parameters():
            parameter.data = parameter.data.to(dtypes.get(_own_name(name), torch.bfloat16))
        for path, module in built.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False):
                inside.get_submodule(path)._buffers[leaf] = buffer

    def _takes_total(self) -> bool:
        """Whether the model's loss is divided by the number of tokens that it is given."""
        ids = torch.arange(3, 9)[None]
        batch = {"input_ids": ids, "labels": ids}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            try:
                losses = []
                for total in (7, 9):
                    torch.manual_seed(0)
                    losses.append(self.model(**batch, num_items_in_batch=torch.tensor(total)).loss)
            except TypeError:
                self.model(**batch)
                return False
        return not torch.equal(*losses)

    def _draws_numbers(self) -> bool:
        ids = torch.arange(3, 9)[None]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            self.model(input_ids=ids)
            return not torch.equal(before, torch.get_rng_state())

    def _share(self, batch: Batch, total: int, num_micro_batches: int) -> Tensor:
        """Return a micro-batch's part of a step's loss: of tokens, and of the mean of routers' losses."""
        loss: Tensor
        if num_micro_batches == 1:
            loss = self.model(**batch).loss
            return loss
        if not self._divides:
            loss = self.model(**batch).loss
            count = num_targets(batch)
            return loss if count == total else loss * (count / total)
        items = torch.tensor(total)
        config = self.model.config.get_text_config()
        if not getattr(config, "output_router_logits", False):
            loss = self.model(**batch, num_items_in_batch=items).loss
            return loss
        output = self.model(**without_labels(batch))
        loss = self.model.loss_function(
            output.logits, batch["labels"], output.logits.shape[-1], num_items_in_batch=items
        )
        return loss + config.router_aux_loss_coef * output.aux_loss / num_micro_batches


def as_resident(batch: Batch) -> Batch:
    """Return the arguments by which transformers itself keeps the documents of a row apart."""
    return {**batch, "use_cache": False} if "position_ids" in batch else batch


def without_labels(batch: Batch) -> dict[str, Any]:
    """Return the arguments of a forward that computes no loss."""
    return {key: value for key, value in batch.items() if key != "labels"}


def evaluated(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the logits of an evaluation."""
    with _evaluating(model), torch.no_grad():
        found: Tensor = model(**without_labels(batch)).logits
    return found


def generated(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return a prompt and three tokens that follow."""
    with _evaluating(model):
        return model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _own_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    for part in ("base_model.model.", ".base_layer", ".modules_to_save.default", ".original_module"):
        name = name.replace(part, "", 1)
    return name
