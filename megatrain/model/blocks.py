"""The blocks of a Hugging Face model: the modules that stream, those that stay resident, and refusals.

A streamed block is an element of a ModuleList whose elements are all decoder layers in transformers' own
sense (`GradientCheckpointingLayer`, or a class named in `_no_split_modules`); classes may be mixed. A model
may have several such lists: those of a tower for images, say, come behind those of its language model. All
other parameters belong to resident blocks, one for each largest module that holds no streamed block. A
parameter that several blocks use (tied weights) has one owner: the resident block if one of the users is
resident, and a resident block of its own if all users are streamed.

With fragments, a decoder layer becomes several blocks, each of which streams by itself: one for each large
part of the layer (attention; mlp or experts), entered when a module of it is called. Experts come apart
further, into chunks of whole experts: a block is some rows of one of their matrices.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import getsource, ismethod
from textwrap import dedent

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from megatrain.errors import ModelError
from megatrain.layout.expert_chunks import passing_order
from megatrain.model.experts.apart import BehindExperts, behind_experts, experts_of
from megatrain.model.weights.kept import encoding_of
from megatrain.model.weights.parts import beside_text

_STREAMED_SHARE = 0.05
"""A list of layers with less than this share of the parameters (a small tower) stays resident; the largest of
a language model never does."""

_FRAGMENT_SHARE = 0.1
"""A part of a layer with less than this share of its parameters (a norm) joins a larger part."""

_AFTER_ATTENTION = ("ff", "feed", "mlp")
"""A small part with one of these in its name runs beside the layer's second large part, any other with the
first. A wrong guess costs a fetch, and changes no result."""

_BEFORE_ATTENTION = ("ln_mlp",)
"""Names that say otherwise: of two norms that Falcon runs before attention, the one for the MLP beside it."""


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the module tree where a parameter is looked up: `module._parameters[leaf]`."""

    module: nn.Module
    leaf: str
    name: str
    """The parameter's name, as `model.named_parameters()` gives it (tied names: the first)."""


@dataclass(slots=True)
class Block:
    """One block: the parameters that it owns and the places where they, and borrowed ones, are looked up."""

    name: str
    module: nn.Module | None
    """The decoder layer that the block is, or is a fragment of; None for a part that is always resident."""
    entries: tuple[nn.Module, ...] = ()
    """The parts of the layer that a fragment holds; a call of one of them enters it."""
    caller: nn.Module | None = None
    """The module of an outer block, the embedding or the head, whose own forward alone looks the parameters
    up. Such a block may stream too."""
    is_head: bool = False
    """Whether the block is the head."""
    is_behind: bool = False
    """Whether an outer block is registered behind the layers, as the final norm is: their
    backward is not for it."""
    is_beside: bool = False
    """Whether it is a layer of a tower beside the language model, which rows of text alone do not pass."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    """The places where this block's own parameters are looked up."""
    borrowed: list[Site] = field(default_factory=list)
    """Places inside a streamed module that look up a resident block's parameter."""
    rows: range | None = None
    """The experts whose part of its parameters, rows of their first dimension, it is; None: it has all."""
    keeps_experts_output: bool = False
    """Whether the backward of its layer, whose experts come apart, needs what they return."""

    @property
    def is_streamed(self) -> bool:
        """Whether the block is (a fragment of) a decoder layer, which may pass through the slots."""
        return self.module is not None

    def shape_of(self, parameter: Tensor) -> tuple[int, ...]:
        """Return the shape of what the block has of one of its parameters."""
        shape = tuple(parameter.shape)
        return shape if self.rows is None else (len(self.rows), *shape[1:])


def find_blocks(model: PreTrainedModel, *, fragments: bool = False, expert_chunks: int = 1) -> list[Block]:
    """Split a model into blocks: those of decoder layers in the order of the module tree, then the others.

    The layers of a language model come before those of towers beside it.

    Args:
        model: A Hugging Face model.
        fragments: A claim that each layer is split into its large parts, where it has several and no
            parameter of its own.
        expert_chunks: The number of chunks into which the experts of a layer come apart, where they do;
            such a layer is in no fragments but these, and what is beside them.

    Raises:
        ModelError: The model has no list of decoder layers.
    """
    beside = beside_text(model) if isinstance(model, PreTrainedModel) else set()
    layers = _streamed_layers(model, beside)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers to stream (a ModuleList of "
            "GradientCheckpointingLayer, or of classes in _no_split_modules); it cannot be streamed"
        )
    inner = [Block(name=name, module=module, is_beside=is_beside(module, beside)) for name, module in layers]
    last = [block.name for block in inner if not block.is_beside][-1:] or [inner[-1].name]
    inner.sort(key=lambda block: block.is_beside)
    blocks = {id(block.module): block for block in inner}
    users: dict[int, list[Block]] = {}
    sites: dict[int, list[tuple[Block, Site]]] = {}
    names: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = (name, parameter)
    resident: dict[str, Block] = {}
    owners = _owners(model, blocks)
    is_behind = False
    for path, module in model.named_modules():
        owner = owners[path]
        is_behind = is_behind or path in last
        if isinstance(owner, str):
            new = Block(name=owner or "model", module=None, is_behind=is_behind)
            owner = resident.setdefault(owner, new)
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            if owner not in users.setdefault(id(parameter), []):
                users[id(parameter)].append(owner)
            sites.setdefault(id(parameter), []).append((owner, Site(module, leaf, names[id(parameter)][0])))
    shared = Block(name="shared", module=None)
    for key, (name, parameter) in names.items():
        owner = _choose_owner(users[key], shared)
        owner.parameters[name] = parameter
        for user, site in sites[key]:
            if user is not owner and user.is_streamed:
                user.borrowed.append(site)
            owner.sites.append(site)
    outer = [block for block in [*resident.values(), shared] if block.parameters]
    borrowed = {site.name for block in inner for site in block.borrowed}
    for block in outer:
        if not borrowed & block.parameters.keys():
            _mark_caller(model, block)
    behind = behind_experts(model) if expert_chunks > 1 else {}
    parts = (
        _apart(block, expert_chunks, behind) or (_split(block) if fragments else [block]) for block in inner
    )
    return [*(part for of_layer in parts for part in of_layer), *outer]


def is_beside(module: nn.Module, beside: set[int]) -> bool:
    """Whether a layer is of a tower: all of its parameters are among those of `beside_text`."""
    return bool(beside) and {id(parameter) for parameter in module.parameters()} <= beside


def _mark_caller(model: PreTrainedModel, block: Block) -> None:
    """Note which module's forward looks all parameters of an outer block up, if it is one of the ends."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    modules = {id(site.module): site.module for site in block.sites}
    for is_head, module in enumerate(ends):
        if module is not None and ends[0] is not ends[1] and list(modules) == [id(module)]:
            block.caller, block.is_head = module, bool(is_head)


def ends_of(blocks: Sequence[Block]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """List the outer blocks that may stream: embeddings, and heads."""
    embeddings, heads = (
        tuple(n for n, block in enumerate(blocks) if block.caller is not None and block.is_head is is_head)
        for is_head in (False, True)
    )
    return embeddings, heads


def group_layers(blocks: Sequence[Block]) -> list[list[int]]:
    """Return the blocks of each decoder layer, in the order in which the forward enters them first.

    Chunks of experts are passed from the last to the first, so that the backward passes them in order.
    """
    layers: dict[int, list[int]] = {}
    for index, block in enumerate(blocks):
        if block.module is not None:
            layers.setdefault(id(block.module), []).append(index)
    return [_in_passing_order(blocks, layer) for layer in layers.values()]


def _in_passing_order(blocks: Sequence[Block], layer: list[int]) -> list[int]:
    chunks = num_chunks(blocks, layer)
    return [layer[place] for place in passing_order(chunks, len(layer))] if chunks else layer


def num_together(blocks: Sequence[Block], layer: Sequence[int]) -> tuple[int, int]:
    """Return how many blocks of a layer, and how many of its sums, are on the device together."""
    if not num_chunks(blocks, layer):
        return len(layer), len(layer)
    return 3, 2  # what is beside the experts, and the two matrices of a chunk; the gradients of these


def _first_row(block: Block) -> int:
    return -1 if block.rows is None else block.rows.start


def num_chunks(blocks: Sequence[Block], layer: Sequence[int]) -> int:
    """Return the number of chunks in which a layer's experts stream; 0: they do not come apart."""
    return len({_first_row(blocks[index]) for index in layer if blocks[index].rows is not None})


def _apart(layer: Block, expert_chunks: int, behind: Mapping[str, BehindExperts]) -> list[Block] | None:
    """Split a layer into its experts, in parts of each matrix, and what is beside them; None: it stays whole.

    What the layer calls behind its experts is a block of its own, which is entered then.
    """
    module = layer.module
    assert module is not None
    experts = experts_of(module) if expert_chunks > 1 else None
    found = behind.get(type(module).__name__)
    chunks = [] if experts is None else experts.chunks(expert_chunks)
    if experts is None or found is None or len(chunks) < 2:
        return None
    matrices = [experts.module.get_parameter(name) for name in experts.matrices]
    if any(encoding_of(matrix) is not None for matrix in matrices):
        return None  # codes are decoded block by block
    names = {id(parameter): name for name, parameter in layer.parameters.items()}
    if not all(id(matrix) in names for matrix in matrices):
        return None  # another layer has them too
    later = tuple(module.get_submodule(name) for name in sorted(found.modules))
    main = Block(
        layer.name,
        module,
        is_beside=layer.is_beside,
        borrowed=layer.borrowed,
        keeps_experts_output=found.saves_output,
    )
    tail = Block(f"{layer.name}.behind", module, entries=later, is_beside=layer.is_beside)
    inside = {id(module) for each in later for module in each.modules()}
    for site in layer.sites:
        parameter = layer.parameters[site.name]
        if not any(parameter is matrix for matrix in matrices):
            owner = tail if id(site.module) in inside else main
            owner.sites.append(site)
            owner.parameters[site.name] = parameter
    parts = [
        Block(
            f"{layer.name}.{leaf}[{rows.start}:{rows.stop}]",
            module,
            is_beside=layer.is_beside,
            rows=rows,
            parameters={names[id(matrix)]: matrix},
        )
        for leaf, matrix in zip(experts.matrices, matrices, strict=True)
        for rows in chunks
    ]
    return [main, *parts, *([tail] if tail.parameters else [])]


def _split(layer: Block) -> list[Block]:
    """Split a layer into fragments, in the order in which its parts are registered; [layer] if it has one."""
    module = layer.module
    assert module is not None
    inside = {name: set(map(id, child.modules())) for name, child in module.named_children()}

    def part_of(site: Site) -> str | None:
        return next((name for name, held in inside.items() if id(site.module) in held), None)

    parts: dict[str, dict[str, nn.Parameter]] = {}
    for site in layer.sites:
        name = part_of(site)
        if name is None or type(module.get_submodule(name)).forward is nn.Module.forward:
            return [layer]  # a parameter of the layer itself, or a container that is never called
        if _has_called_methods(module, name):
            return [layer]  # nobody would notice that the part is entered
        parts.setdefault(name, {})[site.name] = layer.parameters[site.name]
    sizes = {name: sum(p.numel() for p in held.values()) for name, held in parts.items()}
    large = [name for name in parts if sizes[name] >= _FRAGMENT_SHARE * sum(sizes.values())]
    owned = [name for held in parts.values() for name in held]
    if len(large) < 2 or len(set(owned)) < len(owned):
        return [layer]
    fragments = {
        name: Block(
            name=f"{layer.name}.{name}",
            module=module,
            entries=(module.get_submodule(name),),
            is_beside=layer.is_beside,
        )
        for name in large
    }
    for name, held in parts.items():
        marks = () if name in _BEFORE_ATTENTION else _AFTER_ATTENTION
        second = any(mark in name.lower() for mark in marks)
        fragment = fragments.get(name) or fragments[large[1 if second else 0]]
        if name not in fragments:
            fragment.entries += (module.get_submodule(name),)
        fragment.parameters.update(held)
    for attribute in ("sites", "borrowed"):
        for site in getattr(layer, attribute):
            name = part_of(site)
            owner = next(
                (f for f in fragments.values() if name and module.get_submodule(name) in f.entries), None
            )
            if owner is None:
                return [layer]
            getattr(owner, attribute).append(site)
    return list(fragments.values())


def _has_called_methods(layer: nn.Module, name: str) -> bool:
    """Whether a layer's code calls other methods of a part than its forward, or modules inside it."""
    part, kind = layer.get_submodule(name), type(layer)
    reads = _reads_of_parts(kind)  # type: ignore[arg-type]  # mypy takes a class's hash for that of an instance
    read = (getattr(part, leaf, None) for of, leaf in reads if of == name)
    return any(ismethod(value) or isinstance(value, nn.Module) for value in read)


@cache
def _reads_of_parts(kind: type[nn.Module]) -> frozenset[tuple[str, str]]:
    """Find each `self.part.name` in the code of a class, as (part, name); `forward` is what a call runs."""
    try:
        tree = ast.parse(dedent(getsource(kind)))
    except (OSError, TypeError):  # a class without a file: what goes past its parts is found in the step
        return frozenset()
    return frozenset(
        (node.value.attr, node.attr)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name != "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr != "forward"
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "self"
    )


def _choose_owner(users: list[Block], shared: Block) -> Block:
    if len(users) == 1:
        return users[0]
    return next((user for user in users if not user.is_streamed), shared)


def _streamed_layers(model: PreTrainedModel, beside: set[int]) -> list[tuple[str, nn.Module]]:
    no_split = {
        name
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
        for name in (module._no_split_modules or ())
    }

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in no_split

    candidates = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(is_layer(element) for element in module)
    ]
    outermost = [
        (path, module)
        for path, module in candidates
        if not any(path.startswith(other + ".") for other, _ in candidates if other != path)
    ]
    sizes = {path: sum(p.numel() for p in module.parameters()) for path, module in outermost}
    total = sum(p.numel() for p in model.parameters())
    of_text = [path for path, module in outermost if not is_beside(module, beside)]
    largest = max((sizes[path] for path in of_text or sizes), default=0)
    layers: dict[int, tuple[str, nn.Module]] = {}
    for path, module in outermost:
        if sizes[path] == largest or sizes[path] >= _STREAMED_SHARE * total:
            for index, element in enumerate(module):
                layers.setdefault(id(element), (f"{path}.{index}", element))
    return list(layers.values())


def _owners(model: PreTrainedModel, blocks: dict[int, Block]) -> dict[str, Block | str]:
    """Map each module path to its streamed block, or to the path of the resident block that it belongs to."""
    inside: dict[str, Block] = {}
    streamed_paths = []
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in blocks:
            inside[path] = blocks[id(module)]
            streamed_paths.append(path)
    ancestors = {""}
    for path in streamed_paths:
        parts = path.split(".")
        ancestors.update(".".join(parts[:end]) for end in range(1, len(parts)))
    owners: dict[str, Block | str] = {}
    for path, _ in model.named_modules():
        parts = path.split(".") if path else []
        prefixes = [".".join(parts[:end]) for end in range(len(parts) + 1)]
        block = next((inside[prefix] for prefix in prefixes if prefix in inside), None)
        if block is not None:
            owners[path] = block
        else:
            owners[path] = next((prefix for prefix in prefixes if prefix not in ancestors), path)
    return owners


def outer_of(blocks: Sequence[Block]) -> list[int]:
    """List the blocks that are no part of a decoder layer."""
    return [index for index, block in enumerate(blocks) if not block.is_streamed]
