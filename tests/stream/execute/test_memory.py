"""Bytes as the system sees them: host state per parameter, device memory tracked from outside."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from megatrain.errors import CapacityError
from megatrain.stream.lanes import EmulatedLanes, EmulatedMachine
from tests.forks import run_script
from tests.reference import Resident, attach_plainly, make_batches, make_model
from tests.stream.runs import HYPER, assert_same_steps

HOST_PROBE = """
import gc, json, sys
import torch
from transformers import LlamaConfig
import megatrain
from megatrain.hardware import resident_bytes
from tests.reference import attach_plainly

def held():
    gc.collect()
    return resident_bytes()

def shape(**sizes):
    return LlamaConfig(num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False, **sizes)

def load(**sizes):
    return megatrain.load(config=shape(**sizes), seed=0, precision="bf16")

def grown(engine):
    for block in engine.host.blocks:
        for plane in (*block.planes.values(), block.gradient, block.accumulator):
            if plane is not None:
                plane.fill_(0)
    return held() - before

ids = torch.randint(0, 64, (1, 8))
tiny = load(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2)
warm = attach_plainly(tiny, precision="bf16")
optimizer = warm.adamw()
warm.forward_backward([{"input_ids": ids, "labels": ids}])
optimizer.step()
warm.detach()
del tiny, warm, optimizer
before = held()
width = int(sys.argv[1])
model = load(vocab_size=8192, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=4)
numel = sum(parameter.numel() for parameter in model.parameters())
found = []
for max_grad_norm in (None, 1.0):
    engine = attach_plainly(model, precision="bf16")
    optimizer = engine.adamw(max_grad_norm=max_grad_norm)
    found.append({"grown": grown(engine) / numel, "planned": engine.host_bytes / numel})
    engine.detach()
    del engine, optimizer
print(json.dumps({"numel": numel, "found": found}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parity
@pytest.mark.parametrize(("width", "least"), [(512, 25_000_000), (2048, 300_000_000)])
def test_host_state_has_the_promised_size(width: int, least: int) -> None:
    """RssAnon + RssShmem of a process that touches every plane of so many parameters, within 3 %."""
    done = run_script(HOST_PROBE, str(width))
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["numel"] >= least
    for found, bytes_per_parameter in zip(result["found"], (12.0, 14.0), strict=True):
        assert found["planned"] == pytest.approx(bytes_per_parameter, rel=1e-3)
        assert found["grown"] == pytest.approx(bytes_per_parameter, rel=0.03)


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of storages that operations have made and nobody has dropped yet."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if storage.data_ptr() and (
                    storage.data_ptr() not in given or storage.data_ptr() in self._live
                ):
                    self._live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return result


def deep_config(num_blocks: int) -> LlamaConfig:
    """Make a model whose bytes are nearly all in its blocks."""
    return LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_slots", "num_blocks"), [(1, 25), (2, 35)])
def test_a_model_ten_times_larger_than_the_device_trains(num_slots: int, num_blocks: int) -> None:
    """The budget holds the slots, one gradient buffer and the resident blocks; the rest is activations."""
    model = make_model(deep_config(num_blocks))
    reference = Resident(model, **HYPER)
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    resident = sum(parameter.nbytes for parameter in model.parameters()) - num_blocks * block
    budget = num_slots * block + block + 2 * resident
    assert sum(parameter.nbytes for parameter in model.parameters()) >= 10 * budget
    engine = attach_plainly(
        model, device=EmulatedLanes(EmulatedMachine(device_bytes=budget)), num_slots=num_slots
    )
    optimizer = engine.adamw(**HYPER, max_grad_norm=0.5)
    assert_same_steps(engine, optimizer, reference, steps=1)
    batch = make_batches(1, rows=1, tokens=8)
    with LiveStorages() as made:
        engine.forward_backward(batch)
        optimizer.step()
    assert engine.device_bytes_peak == budget
    hidden = 8 * 64 * 4
    activations = (
        num_blocks * hidden + 40 * hidden
    )  # boundaries, and the inside of one block with its mask and logits
    assert made.peak <= block + activations, "more than one block's gradients and the activations"
    assert made.peak >= block, "the tracker sees a block's gradients"
    engine.detach()


def test_a_budget_one_byte_too_small_is_refused_before_anything_is_allocated() -> None:
    model = make_model(deep_config(4))
    block = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    resident = sum(parameter.nbytes for parameter in model.parameters()) - 4 * block
    lanes = EmulatedLanes(EmulatedMachine(device_bytes=2 * block + block + 2 * resident - 1))
    with pytest.raises(CapacityError, match="device memory"):
        attach_plainly(model, device=lanes)
    assert lanes.device_bytes == 0
    assert not any("forward" in module.__dict__ for module in model.modules())
    lanes.close()
