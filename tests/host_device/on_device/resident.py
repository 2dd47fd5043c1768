"""The resident reference on the test device: the same kernels in the same order as a streamed run's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.model.shares import count_targets
from megatrain.stream.forward.passes import to_device
from tests.host_device.device import TYPE
from tests.reference import Batch, Resident, loss_in_step


class ResidentOnDevice(Resident):
    """Computes gradients on the device, and updates fp32 masters on the host."""

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.there: Any = copy.deepcopy(self.model).to(TYPE)
        self.there.tie_weights()  # a new kind of device makes new parameters, which are not tied

    def forward_backward(self, batches: Sequence[Batch], seeds: Sequence[int] | None = None) -> Tensor:
        """Run ordinary gradient accumulation, as the reference on the CPU does."""
        total = sum(count_targets(batch) for batch in batches)
        trained = {name: p for name, p in self.there.named_parameters() if p.requires_grad}
        sums: dict[str, Tensor] = {}
        losses = []
        for number, batch in enumerate(batches):
            if seeds is not None:
                torch.manual_seed(seeds[number])
            self.there.zero_grad()
            there = to_device(batch, torch.device(TYPE))
            loss = loss_in_step(self.there, there, torch.tensor(total, device=TYPE), len(batches))
            loss.backward()
            losses.append(loss.detach())
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    gradient = parameter.grad.float()
                    sums[name] = sums[name] + gradient if name in sums else gradient.clone()
        if len(batches) > 1:
            sums = {name: value.to(trained[name].dtype).float() for name, value in sums.items()}
        self.sums = {name: value.cpu() for name, value in sums.items()}
        return functools.reduce(torch.add, losses).cpu()

    def step(self, grad_norm: float, max_grad_norm: float | None) -> None:
        """Update, and take the new weights to the device."""
        super().step(grad_norm, max_grad_norm)
        with torch.no_grad():
            for name, parameter in self.there.named_parameters():
                if name in self.parameters:
                    parameter.copy_(self.parameters[name])
