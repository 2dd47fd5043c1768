"""Bytes on the device while a micro-batch is in the head, and where its backward ends: those of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatrain
from megatrain.config.choice import Choice, StepBatch
from megatrain.config.optimizers.registry import DEFAULT
from megatrain.model.head.head import Head
from megatrain.model.profile.count import count_anatomy
from megatrain.plan.memory.device_peaks import DevicePeaks
from megatrain.plan.memory.device_pools import allocated
from megatrain.stream.forward.head_backward import Cut
from megatrain.stream.forward.passes import Pass
from megatrain.stream.lanes.base import InlineLanes
from tests.device_bytes import DeviceBytes
from tests.plan.memory.test_device_pools import CONFIGS
from tests.reference import attach_plainly

TOKENS, TILE, CHUNK = 1024, 256, 128


@pytest.mark.parametrize(
    ("family", "precision", "m", "boundaries", "tile"),
    [
        ("llama", "bf16", 1, "host", TILE),
        ("llama", "fp32", 1, "device", TILE),
        ("gemma2", "bf16", 2, "host", TILE),
        ("qwen2", "bf16", 3, "device", TILE),
        ("llama", "bf16", 2, "host", 0),
        ("gpt2", "fp32", 1, "host", TILE),
    ],
)
def test_predicted_bytes_outside_the_layers_are_those_of_a_run(
    family: str,
    precision: Any,
    m: int,
    boundaries: str,
    tile: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = CONFIGS[family]()
    anatomy = count_anatomy(
        config,
        micro_batch_size=1,
        seq_len=TOKENS,
        precision=precision,
        head_chunk_tokens=CHUNK,
        device_type="cpu",
        tile=tile,
    )
    choice = Choice(
        lockstep=m, activations=("recompute",) * 3, boundaries=boundaries, head_chunk_tokens=CHUNK
    ).with_defaults(3)
    batch = StepBatch(micro_batch_size=1, seq_len=TOKENS, num_micro_batches=m, tile_tokens=tile)
    exact = sum(pool.nbytes for pool in allocated(anatomy, choice, batch, DEFAULT))
    predicted: dict[str, int] = {}
    for moment in DevicePeaks(anatomy, choice, batch, overlaps=False, has_scratch=False).all():
        predicted[moment.name] = max(predicted.get(moment.name, 0), exact + moment.nbytes)

    generator = torch.Generator().manual_seed(0)
    ids: list[Tensor] = [torch.randint(0, 256, (1, TOKENS), generator=generator) for _ in range(m)]
    lanes = InlineLanes()
    measured: dict[str, int] = {}
    with DeviceBytes(lanes) as device:

        def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                found = run(*args, **kwargs)
                measured[name] = max(measured.get(name, 0), device.peak)
                device.peak = 0
                return found

            return noted

        monkeypatch.setattr(Pass, "enter_head", noting("layers", Pass.enter_head))
        monkeypatch.setattr(Head, "_chunked", noting("forward of the head", Head._chunked))
        monkeypatch.setattr(Cut, "go_back", noting("backward of the head", Cut.go_back))
        model = megatrain.load(config=config, precision=precision).train()
        engine = attach_plainly(
            model,
            device=lanes,
            precision=precision,
            num_micro_batches=m,
            lockstep=m,
            activations=choice.activations,
            boundaries=boundaries,
            head_chunk_tokens=CHUNK,
            tile_tokens=tile or None,
        )

        begun: list[bool] = []

        def begin(_: Tensor) -> None:
            device.peak = device.peak if begun else 0
            begun.append(True)

        def embedding(*args: Any, inner: Any = nn.functional.embedding, **kwargs: Any) -> Tensor:
            output: Tensor = inner(*args, **kwargs)
            if output.requires_grad:
                output.register_hook(begin)
            return output

        # a hook on the module would keep the embeddings on the device
        monkeypatch.setattr(nn.functional, "embedding", embedding)
        engine.forward_backward([{"input_ids": each, "labels": each} for each in ids])
        measured["backward of the embedding"] = device.peak
    engine.detach()
    ids_bytes = 16 * TOKENS * m  # on a device, a round's tokens and labels
    # what layers are given, such as masks of windows, counts until the end of the backward
    most = {"forward of the head": 1.01, "backward of the head": 1.01, "backward of the embedding": 1.06}
    most |= {"backward of the embedding": 3} if family == "gemma2" else {}
    for name, times in most.items():
        assert 1 <= predicted[name] / (measured[name] + ids_bytes) <= times, name
