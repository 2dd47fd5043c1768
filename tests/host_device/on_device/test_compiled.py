"""Compiled blocks on the test device: traced and differentiated by torch, and run as they are (`aot_eager`).

Nothing is generated for it: inductor has no backend for the device, and has not run there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatrain.hardware.accelerators import can_compile
from megatrain.stream.forward.compiled import Compiler
from tests.host_device.device import TYPE, register
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.forward.test_compiled import assert_close, compile_blocks
from tests.stream.runs import family_config

host = register()
DEVICE = torch.device(TYPE, 0)


def stepped(family: str, compiler: Compiler | None, activations: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Run a step with dropout in lockstep; return its loss and gradients."""
    host.native.delay(2, 0.1, 3e-4, 1e-4)
    engine = attach_plainly(
        make_model(family_config(family, dropout=True)), device=TYPE, activations=activations, lockstep=2
    )
    if compiler is not None:
        compile_blocks(engine, compiler)
    loss = engine.forward_backward(make_batches(2), seeds=[1, 2]).cpu()
    gradients = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    engine.lanes.close()
    return loss, gradients


@pytest.mark.parity
@pytest.mark.parametrize("activations", ["keep", "offload", "recompute"])
@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "gpt2", "qwen3"])
def test_compiled_blocks_give_the_gradients_of_uncompiled_ones(
    family: str, activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = Compiler("aot_eager")
    actual = stepped(family, compiler, activations)
    assert_close(actual, stepped(family, None, activations))
    assert compiler.num_graphs == len(compiler.structures) >= 1
    assert compiler.num_graph_breaks == 0
    assert "uncompiled" not in caplog.text


def test_nothing_compiles_by_default() -> None:
    assert not can_compile(DEVICE)
