"""Compiled blocks: one function per structure, the same gradients, nothing twice, no silent way out."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, GPT2Config, PretrainedConfig

from megatrain.config.read_choice import read_choice
from megatrain.errors import ConfigError
from megatrain.hardware import accelerators
from megatrain.model.blocks import find_blocks
from megatrain.model.places import swapped
from megatrain.stream.engine import Engine
from megatrain.stream.forward.compiled import Compiler, say_how
from megatrain.stream.forward.stream_weights import stream_weights
from megatrain.stream.forward.structure import Fingerprint, NotShareable, places_of
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.runs import family_config

TOLERANCE = 2e-6
"""Relative, in fp32: compiled kernels add in another order."""

Gradients = dict[str, Tensor]


def compile_blocks(engine: Engine, compiler: Compiler) -> None:
    """Put runners in place of the forwards of an engine's blocks."""
    for layer in engine.arrangement.layers:
        layer.inner = compiler.runner(layer.module, layer.inner)
        layer.leave_routers(layer.module)


def streamed(
    config: PretrainedConfig,
    compiler: Compiler | None,
    *,
    activations: str = "recompute",
    prepare: Callable[[Any], None] = lambda model: None,
    num_micro_batches: int = 2,
) -> tuple[Tensor, Gradients]:
    """Run a step of a fresh model, compiled or not; return its loss and gradients."""
    model = make_model(config)
    prepare(model)
    engine = attach_plainly(model, device="checked", activations=activations)
    if compiler is not None:
        compile_blocks(engine, compiler)
    loss = engine.forward_backward(make_batches(num_micro_batches), seeds=list(range(num_micro_batches)))
    return loss, {name: gradient.clone() for name, gradient in engine.named_gradients()}


def assert_close(actual: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients]) -> None:
    """Assert that a step's loss and gradients are equal up to rounding."""
    torch.testing.assert_close(actual[0], expected[0], rtol=TOLERANCE, atol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        error = float((actual[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        assert error < TOLERANCE, f"gradient of {name} is off by {error:.1e}"


def assert_equal(actual: tuple[Tensor, Gradients], expected: tuple[Tensor, Gradients]) -> None:
    """Assert that a step's loss and gradients have the same bits."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List what was warned of."""
    own = [record for record in caplog.records if record.name.startswith("megatrain")]
    return [record.getMessage() for record in own if record.levelno >= logging.WARNING]


# -- structures ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_structures"),
    [
        ("llama", 1),
        ("mixtral", 1),
        ("gpt2", 1),
        ("gemma2", 2),
        ("gemma3_text", 2),
        ("qwen2", 2),
        ("jamba", 3),
    ],
)
def test_one_structure_per_kind_of_layer(family: str, num_structures: int) -> None:
    modules = [block.module for block in find_blocks(make_model(FAMILIES[family]())) if block.module]
    assert len(modules) == 4
    assert len({Fingerprint(module).key for module in modules}) == num_structures


class Layer(nn.Module):
    """A block small enough to see through."""

    count: Tensor

    def __init__(self, layer_idx: int = 0, width: int = 4) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.scale = 2.0
        self.linear = nn.Linear(width, width)
        self.register_buffer("count", torch.zeros(()))
        self.names: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x + self.scale * torch.tanh(self.linear(x))


def test_index_of_the_layer_is_no_part_of_its_structure() -> None:
    assert Fingerprint(Layer(0)).key == Fingerprint(Layer(1)).key
    assert Fingerprint(Layer(0), with_index=True).key != Fingerprint(Layer(1), with_index=True).key


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.eval(),
        lambda layer: setattr(layer, "scale", 3.0),
        lambda layer: setattr(layer, "scale", 2),
        lambda layer: setattr(layer, "names", ["a"]),
        lambda layer: setattr(layer, "linear", nn.Linear(4, 4, bias=False)),
        lambda layer: setattr(layer.linear, "weight", nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))),
        lambda layer: layer.register_buffer("other", torch.zeros(2)),
    ],
)
def test_whatever_may_change_a_result_changes_the_structure(change: Callable[[Layer], Any]) -> None:
    layer, same = Layer(), Layer()
    fingerprint = Fingerprint(layer)
    assert fingerprint.key == Fingerprint(same).key
    assert fingerprint.still_holds()
    change(layer)
    assert Fingerprint(layer).key != Fingerprint(same).key


def test_a_changed_module_is_noticed() -> None:
    layer = Layer()
    fingerprint = Fingerprint(layer)
    layer.linear.register_forward_hook(lambda *_: None)
    assert not fingerprint.still_holds()
    with pytest.raises(NotShareable, match="linear has a hook"):
        Fingerprint(layer)


def test_tied_weights_are_part_of_the_structure() -> None:
    def pair(*, is_tied: bool) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if is_tied:
            module[1].weight = module[0].weight
        return module

    assert Fingerprint(pair(is_tied=True)).key == Fingerprint(pair(is_tied=True)).key
    assert Fingerprint(pair(is_tied=True)).key != Fingerprint(pair(is_tied=False)).key


# -- gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activations", "family"),
    [
        ("recompute", "llama"),
        *(pytest.param("keep", family, marks=pytest.mark.parity) for family in ("gemma2", "qwen3")),
        *(
            pytest.param("recompute", f, marks=pytest.mark.parity)
            for f in ("mixtral", "gemma2", "gpt2", "qwen3")
        ),
        *(pytest.param("keep", family, marks=pytest.mark.parity) for family in ("llama", "mixtral", "gpt2")),
    ],
)
def test_compiled_gradients_equal_uncompiled_ones(
    family: str, activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Slots are poisoned when they are freed, so a weight that autograd saved from a slot would show."""
    compiler = Compiler("aot_eager")
    actual = streamed(FAMILIES[family](), compiler, activations=activations)
    assert_close(actual, streamed(FAMILIES[family](), None, activations=activations))
    assert sum(len(structure.blocks) for structure in compiler.structures) == 4
    assert compiler.num_graphs == len(compiler.structures)
    assert compiler.num_graph_breaks == 0
    assert not warnings_in(caplog)


def test_dropout_draws_the_same_mask_again_in_the_recomputation() -> None:
    """And trying the compiled block draws no random number: the second run has nothing left to try."""
    config = family_config("gpt2", dropout=True)
    compiler = Compiler("aot_eager")
    first = streamed(config, compiler)
    num_graphs = compiler.num_graphs
    assert_equal(streamed(config, compiler), first)
    assert compiler.num_graphs == num_graphs
    assert_equal(streamed(config, Compiler("aot_eager"), activations="keep"), first)


@pytest.mark.parity
def test_frozen_blocks_share_the_structure_of_trained_ones() -> None:
    def freeze(model: Any) -> None:
        model.model.embed_tokens.requires_grad_(False)
        for layer in model.model.layers[:2]:
            layer.requires_grad_(False)

    compiler = Compiler("aot_eager")
    actual = streamed(FAMILIES["llama"](), compiler, prepare=freeze)
    assert_close(actual, streamed(FAMILIES["llama"](), None, prepare=freeze))
    assert len(compiler.structures) == 1
    assert len(compiler.structures[0].shapes) == 3  # frozen; trained after inputs without and with a gradient


@pytest.mark.parity
def test_model_with_adapters_compiles() -> None:
    peft = pytest.importorskip("peft")

    def adapt(model: Any) -> None:
        torch.manual_seed(5)
        peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))

    compiler = Compiler("aot_eager")
    actual = streamed(FAMILIES["llama"](), compiler, prepare=adapt)
    assert_close(actual, streamed(FAMILIES["llama"](), None, prepare=adapt))
    assert [len(structure.blocks) for structure in compiler.structures] == [4]
    assert compiler.num_graphs == 2  # the first block's input has no gradient


def test_layers_that_read_their_index_are_compiled_one_by_one() -> None:
    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) / (self.layer_idx + 1)

    layers, x = [Scaled(number) for number in range(3)], torch.randn(2, 4)
    compiler = Compiler("aot_eager")
    for layer in layers:
        torch.testing.assert_close(compiler.runner(layer)(x), layer(x))
    assert sorted(len(structure.shapes) for structure in compiler.structures) == [0, 1, 1, 1]


@pytest.mark.parity
def test_gpt2_that_scales_by_its_index_is_right() -> None:
    config = GPT2Config(**{**FAMILIES["gpt2"]().to_dict(), "scale_attn_by_inverse_layer_idx": True})
    compiler = Compiler("aot_eager")
    assert_close(streamed(config, compiler), streamed(config, None))
    assert compiler.num_graphs == 4


def test_saved_weights_share_the_memory_that_was_put_in() -> None:
    """What the `keep` policy relies on: a saved weight is known by its storage."""
    layer = Layer(width=8)
    place = torch.randn(8 * 8 + 8)
    tensors = stream_weights([place[:64].view(8, 8), place[64:]], [True, True], lambda grads: None)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    run = Compiler("aot_eager").runner(layer)
    places = [(layer.linear._parameters, "weight"), (layer.linear._parameters, "bias")]
    x = torch.randn(3, 8, requires_grad=True)
    with swapped(places, tensors), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x)
    weights = [tensor for tensor in saved if tensor.numel() == 64]
    assert weights
    for tensor in weights:
        assert tensor.untyped_storage().data_ptr() == place.untyped_storage().data_ptr()


# -- nothing is compiled twice ------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["recompute", pytest.param("keep", marks=pytest.mark.parity)])
def test_nothing_is_compiled_after_the_first_step(activations: str) -> None:
    engine = attach_plainly(
        make_model(FAMILIES["gemma2"]()), device="checked", activations=activations, num_slots=3
    )
    compiler = Compiler("aot_eager")
    compile_blocks(engine, compiler)
    optimizer = engine.adamw(lr=1e-3)
    engine.forward_backward(make_batches(2, seed=0))
    optimizer.step()
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(1, 3):
            engine.forward_backward(make_batches(2, seed=step))
            optimizer.step()
    assert [structure.num_graphs for structure in compiler.structures] == [1, 1]
    assert compiler.num_graph_breaks == 0


def test_micro_batches_in_lockstep_compile_once() -> None:
    """Each in a greenlet of its own, all on the stack of one thread."""
    greenlet = pytest.importorskip("greenlet")
    compiler = Compiler("aot_eager")
    layers = [Layer(number) for number in range(3)]
    runners = [compiler.runner(layer) for layer in layers]
    hub = greenlet.getcurrent()
    results = []

    def forward(x: Tensor) -> None:
        for runner in runners:
            hub.switch()
            x = checkpoint(runner, x, use_reentrant=False)
        results.append(x)

    inputs = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
    micro_batches = [greenlet.greenlet(forward) for _ in inputs]
    for micro_batch, x in zip(micro_batches, inputs, strict=True):
        micro_batch.switch(x)
    while any(micro_batches):
        for micro_batch in micro_batches:
            micro_batch.switch()
    torch.stack([result.sum() for result in results]).sum().backward()
    assert compiler.num_graphs == 1
    for x, result in zip(inputs, results, strict=True):
        expected = x
        for layer in layers:
            expected = layer(expected)
        torch.testing.assert_close(result, expected)
        (gradient,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(x.grad, gradient)


def test_evaluation_takes_one_more_graph_and_generation_none() -> None:
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, device="checked")
    batch = make_batches(1)[0]
    model.eval()
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        tokens = model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False)
    model.train()
    compiler = Compiler("aot_eager")
    compile_blocks(engine, compiler)
    engine.forward_backward([batch])
    assert compiler.num_graphs == 1
    model.eval()
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(**batch, use_cache=False).logits, expected)
    assert compiler.num_graphs == 2
    assert torch.equal(model.generate(batch["input_ids"], max_new_tokens=4, do_sample=False), tokens)
    with torch.inference_mode():
        torch.testing.assert_close(model(**batch, use_cache=False).logits, expected)
    model.train()
    with torch.compiler.set_stance("fail_on_recompile"):
        engine.forward_backward([batch])
    assert all(structure.fault is None for structure in compiler.structures)


# -- ways out -----------------------------------------------------------------------------------------------


def test_every_shape_is_compiled_and_many_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """More than dynamo's own limit; those met before are not compiled again."""
    compiler = Compiler("aot_eager", many_shapes=2)
    layers = [Layer(number) for number in range(2)]
    for rows in (*range(1, 21), 1, 20, 7):
        x = torch.randn(rows, 4)
        for layer in layers:
            torch.testing.assert_close(compiler.runner(layer)(x), layer(x))
    assert compiler.num_graphs == 20
    assert [structure.fault for structure in compiler.structures] == [None]
    (message,) = warnings_in(caplog)
    assert "compiled for each shape of their inputs, more than 2 so far; pad rows to multiples" in message


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_failing_compiler_is_named_once_and_changes_no_bit(
    activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise ValueError("no such kernel")

    config = family_config("gpt2", dropout=True)
    actual = streamed(config, Compiler(fail), activations=activations)
    assert_equal(actual, streamed(config, None, activations=activations))
    (message,) = warnings_in(caplog)
    assert "GPT2Block" in message
    assert "no such kernel" in message


def test_compiler_whose_backward_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise RuntimeError("wrong strides")

    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return lambda *args: tuple(Broken.apply(result) for result in graph(*args))

    layer, x = Layer(), torch.randn(2, 4, requires_grad=True)
    run = Compiler(broken).runner(layer)
    run(x).sum().backward()
    assert layer.linear.weight.grad is not None
    (message,) = warnings_in(caplog)
    assert "wrong strides" in message


def test_hooks_inside_a_block_keep_it_uncompiled(caplog: pytest.LogCaptureFixture) -> None:
    layer, other, seen = Layer(), Layer(1), []
    layer.linear.register_forward_hook(lambda module, args, output: seen.append(module))
    compiler = Compiler("aot_eager")
    for _ in range(2):
        compiler.runner(layer)(torch.randn(2, 4))
    compiler.runner(other)(torch.randn(2, 4))
    assert seen == [layer.linear, layer.linear]
    assert compiler.num_graphs == 1
    assert warnings_in(caplog) == ["blocks of Layer run uncompiled: linear has a hook"]


def test_a_forward_that_keeps_state_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    class Stateful(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x
            return self.linear(x)

    layers = [Stateful(number) for number in range(2)]
    x = torch.randn(2, 4)
    compiler = Compiler("aot_eager")
    for layer in layers:
        compiler.runner(layer)(x)
        assert layer.last is x
    assert compiler.num_graphs == 0
    assert len(warnings_in(caplog)) == 1


def test_a_replaced_forward_is_called_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer()
    run = Compiler("aot_eager").runner(layer, lambda x: x + 1)
    assert torch.equal(run(torch.zeros(1, 4)), torch.ones(1, 4))
    assert len(warnings_in(caplog)) == 1


def test_tied_weights_of_a_block_get_one_gradient() -> None:
    class Tied(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(4, 4)
            self.other.weight = self.linear.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.linear(x))

    layer, x = Tied(), torch.randn(2, 4)
    compiler = Compiler("aot_eager")
    (actual,) = torch.autograd.grad(compiler.runner(layer)(x).sum(), layer.linear.weight)
    (expected,) = torch.autograd.grad(layer(x).sum(), layer.linear.weight)
    torch.testing.assert_close(actual, expected)
    assert compiler.num_graphs == 1


def test_a_buffer_is_written_once_per_call() -> None:
    layer = Layer()
    run = Compiler("aot_eager").runner(layer)
    for number in range(3):
        run(torch.randn(2, 4))
        assert layer.count == number + 1


def test_router_logits_are_collected_once_per_layer() -> None:
    model = make_model(FAMILIES["mixtral"]())
    engine = attach_plainly(model, device="checked")
    compile_blocks(engine, Compiler("aot_eager"))
    output = model(**make_batches(1)[0], output_router_logits=True, use_cache=False)
    assert len(output.router_logits) == 4
    assert len({float(logits.detach().sum()) for logits in output.router_logits}) == 4


def test_a_filled_cache_in_training_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Prefix tuning gives one; an empty one is left out."""

    class Cached(Layer):
        def forward(self, x: Tensor, past_key_values: DynamicCache | None = None) -> Tensor:
            return super().forward(x)

    layer, x = Cached(), torch.randn(2, 4)
    compiler = Compiler("aot_eager")
    run = compiler.runner(layer)
    torch.testing.assert_close(run(x, past_key_values=DynamicCache()), layer(x))
    assert compiler.num_graphs == 1
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
    for _ in range(2):
        run(x, past_key_values=filled)
    (message,) = warnings_in(caplog)
    assert "use_cache=False" in message
    assert compiler.num_graphs == 1


def test_a_long_unrolled_loop_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    class Looped(Layer):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(120):
                x = torch.tanh(x)
            return self.linear(x)

    layer, x = Looped(), torch.randn(2, 4)
    run = Compiler("aot_eager", max_operations=100).runner(layer)
    torch.testing.assert_close(run(x), layer(x))
    (message,) = warnings_in(caplog)
    assert "too long to compile" in message


def test_a_changed_block_leaves_the_structure_of_the_others() -> None:
    layers, x = [Layer(number) for number in range(2)], torch.randn(2, 4)
    compiler = Compiler("aot_eager")
    runners = [compiler.runner(layer) for layer in layers]
    runners[0](x)
    layers[0].scale = 5.0
    for runner, layer in zip(runners, layers, strict=True):
        torch.testing.assert_close(runner(x), layer(x))
    assert len(compiler.structures) == 2


def test_runner_holds_no_weights() -> None:
    layer = Layer()
    compiler = Compiler("aot_eager")
    compiler.runner(layer)(torch.randn(2, 4))
    held = [held[name] for held, name in places_of(compiler.structures[0].template.module)]
    assert sum(tensor.numel() for tensor in held if tensor is not None) == 0


@pytest.mark.parametrize(
    ("setting", "activations", "expected"),
    [
        ("auto", "recompute", ["cuda", "xpu"]),
        ("auto", "recompute_cheap", []),
        ("on", "recompute", ["cpu", "cuda", "xpu"]),
        ("off", "recompute", []),
    ],
)
def test_auto_compiles_on_accelerators(
    setting: str, activations: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerators, "missing_compiler", lambda: None)
    choice = read_choice(None, {"activations": activations})
    found = [
        kind
        for kind in ("cpu", "cuda", "xpu")
        if choice.is_compiled(setting, can_compile=accelerators.can_compile(torch.device(kind)))
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("lacks", "sentence"),
    [
        ("triton", "layers run uncompiled, since torch.compile needs the package triton; install it"),
        ("cc", "layers run uncompiled, since torch.compile needs a C compiler, by the name of cc, gcc or"),
        ("headers", r"layers run uncompiled, since torch.compile needs Python's headers, nowhere/Python.h"),
        ("", "layers are compiled: that is done in the first step, which takes about a minute longer"),
    ],
)
def test_what_a_compiler_lacks_is_said(
    lacks: str, sentence: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On an accelerator; nothing is said of what was never to be compiled."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if lacks == "triton" else name)
    monkeypatch.setattr(shutil, "which", lambda name: None if lacks == "cc" else name)
    if lacks == "headers":
        monkeypatch.setattr(sysconfig, "get_path", lambda name: "nowhere")
    device = torch.device("cuda")
    compiles = accelerators.can_compile(device)
    assert compiles is (not lacks)
    with caplog.at_level(logging.INFO, logger="megatrain"):
        for kind, setting in (("cuda", "auto"), ("cuda", "off"), ("cpu", "auto")):
            say_how(setting, torch.device(kind), compiles=compiles and (kind, setting) == ("cuda", "auto"))
    (said,) = caplog.messages
    assert said.startswith(sentence)


def test_a_budget_of_what_is_not_compiled_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(FAMILIES["llama"]())
    attach_plainly(model, activation_budget=0.5).detach()
    assert caplog.messages == ["activation_budget is 0.5, but layers are not compiled: it does nothing"]
    with pytest.raises(ConfigError, match=r"is 1\.0, 0\.7, 0\.5 or 0\.3, not 0\.6"):
        attach_plainly(model, activation_budget=0.6)


# -- inductor -----------------------------------------------------------------------------------------------

INDUCTOR_RUN = """
import json
import torch
import megatrain
from megatrain.stream.forward.compiled import Compiler
from tests.families import FAMILIES
from tests.reference import attach_plainly, make_batches, make_model
from tests.stream.forward.test_compiled import compile_blocks, streamed, assert_close, assert_equal

config, compiler = FAMILIES["llama"](), Compiler("inductor")
first = streamed(config, compiler)
assert_close(first, streamed(config, None))
assert_equal(streamed(config, compiler), first)
from torch._dynamo.utils import counters
print(json.dumps({
    "graphs": compiler.num_graphs,
    "faults": [structure.fault for structure in compiler.structures],
    "hits": counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    "gradients": str(sum(float(gradient.double().sum()) for gradient in first[1].values())),
}))
"""


@pytest.mark.parity
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++ on the CPU")
def test_inductor_is_right_and_its_code_is_kept_across_runs(tmp_path: Path) -> None:
    """Gradients within rounding of the uncompiled ones, the same bits in every run and process."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    runs = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", INDUCTOR_RUN],
            env={**environment, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    cold, warm = runs
    assert cold["graphs"] == warm["graphs"] == 1
    assert cold["faults"] == warm["faults"] == [None]
    assert cold["hits"] == 0
    assert warm["hits"] > 0
    assert cold["gradients"] == warm["gradients"]


def test_attach_compiles_and_refuses_what_compiled_layers_cannot_do() -> None:
    """On a CPU only if asked for; a compiled layer hides the products that recompute_cheap keeps."""
    model = make_model(FAMILIES["llama"]())
    engine = attach_plainly(model, compile="auto")
    assert engine.compiler is None
    engine.detach()
    with pytest.raises(ConfigError, match=r"recompute_cheap .* use compile=off"):
        attach_plainly(model, compile="on", activations="recompute_cheap")
    with pytest.raises(ConfigError, match="compile is 'yes'; use auto, on or off"):
        attach_plainly(model, compile="yes")


# -- budgets -----------------------------------------------------------------------------------------------


class Parted:
    """Compiles as inductor does up to its kernels, and keeps the bytes that forwards hand over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of itself
            from torch._inductor import compile_fx as inductor

        self.budgets: set[float] = set()
        whole = inductor.compile_fx

        def lower(graph: Any, inputs: Any, **named: Any) -> Any:
            self.budgets.add(torch._functorch.config.activation_memory_budget)
            return whole(graph, inputs, inner_compile=lambda graph, *_, **__: graph, **named)

        monkeypatch.setattr(inductor, "compile_fx", lower)


@pytest.mark.parametrize("budget", [0.7, pytest.param(0.3, marks=pytest.mark.parity)])
def test_layers_within_a_budget_have_the_same_bits_under_any_policy(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are close to uncompiled ones, and what they save is less."""
    parted = Parted(monkeypatch)
    config = FAMILIES["llama"]()
    found = [
        streamed(config, Compiler(budget=budget), activations=activations)
        for activations in ("keep", "recompute", "offload")
    ]
    assert parted.budgets == {budget}
    for other in found[1:]:
        assert_equal(other, found[0])
    assert_close(found[0], streamed(config, None))
