"""One torch.compile per block structure.

Blocks of one structure run through one compiled function: the forward of a template, with the tensors of the
block that is called put in. Each kind of call is tried once before it is relied on, on copies of the inputs
and out of reach of the checkpoint around the block: compilation that fails half way has already saved tensors
that a recomputation will not find. What may fail does so where nothing depends on it; such blocks then run
uncompiled, and one warning says why. A call and its recomputation always run the same way.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.config.budgets import ALL
from megatrain.errors import ModelError
from megatrain.hardware.accelerators import missing_compiler, vendor_of
from megatrain.model.experts.routes import Router, routers_of, watched
from megatrain.model.places import Place, swapped
from megatrain.model.selective import inside_compiled, keep_from_budget
from megatrain.stream.forward.compiled_calls import aside, differentiable, kind_of, state_of, without_caches
from megatrain.stream.forward.compiled_routes import Lines, ask_visits, lines_of
from megatrain.stream.forward.structure import Fingerprint, IndexWasRead, NotShareable, Template, places_of

_log = logging.getLogger(__name__)

_ANY = 1 << 30

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]


def say_how(setting: str, device: torch.device, *, compiles: bool, budget: float = ALL) -> None:
    """Say at the start what a user would wonder about: a slow first step, or layers that run uncompiled."""
    if compiles:
        _log.info("layers are compiled: that is done in the first step, which takes about a minute longer")
    elif budget != ALL:
        _log.warning("activation_budget is %g, but layers are not compiled: it does nothing", budget)
    if not compiles and setting == "auto" and device.type != "cpu" and vendor_of(device).has_compiler:
        missing = missing_compiler()
        if missing is not None:
            _log.warning(
                "layers run uncompiled, since torch.compile needs %s; install it, or choose compile=off",
                missing,
            )


class _TooLong(Exception):
    """A graph is not worth its compilation."""


@dataclass(slots=True)
class Structure:
    """One structure of blocks, and what is known of compiling it."""

    name: str
    """Class of the blocks, for messages."""
    template: Template
    router_lines: Lines
    """Where its routers choose."""
    run: Callable[..., Any] | None = None
    """The compiled forward of the template."""
    shapes: set[Hashable] = field(default_factory=set)
    """Kinds of calls that were tried and are compiled from then on."""
    reads_index: bool = False
    """Its forward reads the index of its layer: each layer is a structure of its own."""
    is_probed: bool = False
    is_trying: bool = False
    fault: str | None = None
    """Why further kinds of calls run uncompiled."""
    blocks: set[int] = field(default_factory=set)
    """Ids of the modules that run through it."""
    num_graphs: int = 0
    num_graph_breaks: int = 0
    num_unforeseen: int = 0
    """Graphs compiled by a call of a kind that was tried: the forward's flow depends on data."""


class Compiler:
    """Compiles blocks, once for each structure and kind of call."""

    def __init__(
        self,
        backend: str | Backend = "inductor",
        *,
        budget: float = ALL,
        many_shapes: int = 8,
        max_operations: int = 5000,
    ) -> None:
        """Prepare; nothing is compiled before a block is called.

        Args:
            backend: A torch.compile backend by name, or itself.
            budget: What blocks may keep for their backward, as a share of what they would.
            many_shapes: More kinds of calls than that of one structure (shapes of the inputs, with or without
                gradients) are warned of. Each is compiled for its own shape, whatever came before, so that a
                run that goes on from a checkpoint computes with the same code as one that was not stopped.
            max_operations: Longer graphs, which are loops over tokens that were unrolled, are not compiled;
                that can take hours.
        """
        self._backend, self._budget = backend, budget
        self._many_shapes = many_shapes
        self._max_operations = max_operations
        self._structures: dict[Hashable, Structure] = {}
        self._warned: set[tuple[str, str]] = set()
        self.stateful: set[type[nn.Module]] = set()
        """Classes whose forward changes the module."""

    @property
    def structures(self) -> list[Structure]:
        """Every structure met so far."""
        return list(self._structures.values())

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far."""
        return sum(structure.num_graphs for structure in self.structures)

    @property
    def num_graph_breaks(self) -> int:
        """Graph breaks met while compiling."""
        return sum(structure.num_graph_breaks for structure in self.structures)

    def runner(self, module: nn.Module, inner: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Return what to call in place of the module's own forward.

        It takes the tensors that the module holds at the moment of the call, so it belongs where the module's
        forward was called: inside `swapped`, inside the checkpoint. It sees to the module's routers, compiled
        or not.

        Args:
            module: The block.
            inner: The module's own forward; None: that of its class.
        """
        if inner is not None and getattr(inner, "__func__", None) is not type(module).forward:
            self.warn_once(type(module).__name__, "their forward is replaced on the instance")
            return _Watched(inner, routers_of(module))
        return _Runner(self, module)

    def structure_of(self, module: nn.Module, fingerprint: Fingerprint, *, with_index: bool) -> Structure:
        """Find the structure with the fingerprint's key, or make it with a template that is like `module`."""
        if fingerprint.key not in self._structures:
            template = Template(module, with_index=with_index)
            lines = lines_of(routers_of(module))
            structure = Structure(type(module).__name__, template, lines, is_probed=with_index)
            structure.run = self._compile(structure, len(self._structures))
            self._structures[fingerprint.key] = structure
        return self._structures[fingerprint.key]

    def warn_once(self, what: str, reason: str) -> None:
        """Say that blocks run uncompiled, and why."""
        if (what, reason) not in self._warned:
            self._warned.add((what, reason))
            _log.warning("blocks of %s run uncompiled: %s", what, reason)

    def is_ready(
        self, structure: Structure, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a call of this kind runs compiled; a new kind is tried first, with the tensors in place."""
        if kind in structure.shapes:
            return True
        if structure.fault is None and not structure.is_probed:
            self._probe(structure, args, kwargs)
        if structure.fault is None and not structure.reads_index:
            self._try(structure, args, kwargs)
        if structure.fault is not None:
            self.warn_once(structure.name, structure.fault)
        elif not structure.reads_index:
            structure.shapes.add(kind)
            self._note_shapes(structure)
        return kind in structure.shapes

    def _compile(self, structure: Structure, number: int) -> Callable[..., Any]:
        """Make the function that is compiled, with a code object of its own.

        Dynamo keeps what it compiled, and counts it against its limit, per code object.
        """
        forward = structure.template.forward

        def call(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            structure.num_graphs += 1
            if len(graph.graph.nodes) > self._max_operations:
                raise _TooLong(f"a graph of {len(graph.graph.nodes)} operations is too long to compile")
            if not structure.is_trying:
                self._note_unforeseen(structure)
            ask_visits(graph.graph, structure.router_lines)
            graph.recompile()
            return self._lower(graph, inputs)

        code = call.__code__.replace(co_name=f"{structure.name}_{number}")
        own = types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)
        return torch.compile(own, backend=count, dynamic=False)

    def _note_shapes(self, structure: Structure) -> None:
        what = (structure.name, "shapes")
        if len(structure.shapes) > self._many_shapes and what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "blocks of %s are compiled for each shape of their inputs, more than %d so far; pad rows to "
                "multiples of more tokens (pad_to_multiple_of of a trainer's arguments), or pack them",
                structure.name,
                self._many_shapes,
            )

    def _note_unforeseen(self, structure: Structure) -> None:
        structure.num_unforeseen += 1
        what = (structure.name, "unforeseen")
        if structure.num_unforeseen > self._many_shapes and what not in self._warned:
            self._warned.add(what)
            _log.warning(
                "torch.compile makes new code for blocks of %s although their inputs keep their shapes (what "
                "they do depends on the data); switch compile off if that makes steps slow",
                structure.name,
            )

    def _lower(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if callable(self._backend):
            return self._backend(graph, inputs)
        if self._backend == "inductor":
            from torch._inductor.compile_fx import compile_fx

            # Without it kernels are chosen by timing them, and the same run may round differently tomorrow.
            patches: dict[str, Any] = {"deterministic": True}
            if self._budget != ALL:
                patches["joint_custom_post_pass"] = attention_kept()
            with torch._functorch.config.patch(activation_memory_budget=self._budget):
                return compile_fx(graph, inputs, config_patches=patches)  # type: ignore[return-value]
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend(self._backend)(graph, inputs)

    def _probe(self, structure: Structure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the template uncompiled, to see whether it depends on its index or keeps state."""
        template = structure.template
        try:
            with aside(template, args, kwargs) as (own_args, own_kwargs), torch.no_grad():
                before = template.contents()
                template.forward(*own_args, **own_kwargs)
                after = template.contents()
        except IndexWasRead:
            structure.reads_index = True
        else:
            if len(before) != len(after) or any(map(operator.is_not, before, after)):
                structure.fault = "their forward sets attributes of the module"
                self.stateful.add(type(template.module))
        structure.is_probed = True

    def _try(self, structure: Structure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for this kind of call, and run what was compiled once, its backward too."""
        assert structure.run is not None
        start, graphs, breaks = time.perf_counter(), structure.num_graphs, _count_graph_breaks()
        structure.is_trying = True
        try:
            with (
                aside(structure.template, args, kwargs) as (own_args, own_kwargs),
                _no_advice(),
                # dynamo's own limit is 8, after which it runs what it has not compiled yet uncompiled
                torch._dynamo.config.patch(recompile_limit=_ANY, accumulated_recompile_limit=_ANY),
            ):
                results = differentiable(structure.run(*own_args, **own_kwargs))
                weights = [held[name] for held, name in structure.template.places]
                inputs = differentiable([weights, own_args, own_kwargs])
                if results and inputs:
                    ones = [torch.ones_like(result) for result in results]
                    torch.autograd.grad(results, inputs, ones, allow_unused=True)
            if structure.num_graphs == graphs:
                structure.fault = "torch.compile left all of it uncompiled"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler may raise anything; the uncompiled call follows in any case
            cause = getattr(error, "inner_exception", error)
            structure.fault = f"torch.compile failed with {type(cause).__name__}: {_first_line(cause)}"
        finally:
            structure.is_trying = False
        breaks = _count_graph_breaks() - breaks
        structure.num_graph_breaks += breaks
        _log.info(
            "compiled %s in %.1f s: %d graphs, %d graph breaks",
            structure.name,
            time.perf_counter() - start,
            structure.num_graphs - graphs,
            breaks,
        )


class _Watched:
    """Calls a forward that is not compiled."""

    def __init__(self, inner: Callable[..., Any], routers: list[Router]) -> None:
        self._inner = inner
        self._routers = routers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with watched(self._routers):
            return self._inner(*args, **kwargs)


class _Runner:
    """Calls one block, compiled where that is possible."""

    def __init__(self, compiler: Compiler, module: nn.Module) -> None:
        self._compiler = compiler
        self._module = module
        self._routers = routers_of(module)
        self._fingerprint: Fingerprint | None = None
        self._structure: Structure | None = None
        self._places: list[Place] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = without_caches(args, kwargs)
        if given is None:
            if torch.is_grad_enabled():
                self._compiler.warn_once("a model with filled key-value caches", "pass use_cache=False")
            return self._forward(*args, **kwargs)
        if self._fingerprint is None or not self._fingerprint.still_holds():
            self._find_structure(with_index=False)
        structure, fingerprint = self._structure, self._fingerprint
        if structure is None or fingerprint is None:
            return self._forward(*args, **kwargs)
        tensors: list[Any] = [held[name] for held, name in self._places]
        kind = (state_of(tensors), kind_of(given))
        with swapped(structure.template.places, tensors):
            if self._compiler.is_ready(structure, kind, *given):
                output, captured = self._run(structure, *given)
                for number, value in captured:
                    fingerprint.captures[number](None, (), value)
                return output
        if structure.reads_index:
            self._find_structure(with_index=True)
            return self(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with watched(self._routers):
            return type(self._module).forward(self._module, *args, **kwargs)

    @staticmethod
    def _run(structure: Structure, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert structure.run is not None
        try:
            with inside_compiled():
                return structure.run(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise ModelError(
                f"torch.compile failed in a block of {structure.name} that it compiled before "
                f"({_first_line(error)}); switch compile off"
            ) from error

    def _find_structure(self, *, with_index: bool) -> None:
        module = self._module
        self._structure = None
        if type(module) in self._compiler.stateful:
            return
        try:
            self._fingerprint = Fingerprint(module, with_index=with_index)
        except NotShareable as reason:
            self._compiler.warn_once(type(module).__name__, str(reason))
            return
        self._structure = self._compiler.structure_of(module, self._fingerprint, with_index=with_index)
        self._structure.blocks.add(id(module))
        self._places = list(places_of(module))


@functools.cache
def attention_kept() -> Any:
    """Return inductor's form of `keep_from_budget`."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            keep_from_budget(graph)

        def uuid(self) -> str:
            return "megatrain: attention is kept from budgets"

    return Pass()


@contextmanager
def _no_advice() -> Iterator[None]:
    """Keep what a compiler says to authors of models to itself; the uncompiled probe had its say before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _count_graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
