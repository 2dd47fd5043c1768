"""When two blocks may run through one compiled function, and the template that stands for all of them.

Two modules have the same structure if their trees of submodules have the same classes, the same parameters
and buffers by name, shape, dtype and tying, and equal plain attributes. The index of a layer is left out: it
says where a key-value cache is written, and caches never reach a compiled block. A template holds an index
that cannot be read, so a model that does read it is noticed, and its layers are kept apart.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.model.places import Place

_OF_TORCH = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_INDEX_NAMES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "block_idx", "block_index"})
_LABELS = frozenset({"target_name"})
"""Keys in dictionaries of modules whose values are for messages; PEFT notes a module's path in one."""

_ROOT_ONLY = frozenset({"forward"})  # the root's forward is overridden by the engine, which calls the class's
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CAPTURING = "transformers.utils.output_capturing"
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, enum.Enum)
_SMALL_TENSOR = 64


class IndexWasRead(Exception):
    """A forward reads the index of its layer, so what it computes may depend on it."""


class NotShareable(Exception):
    """A module that cannot be stood in for by another one; the message says why."""


Capture = Callable[[Any, Any, Any], Any]
"""A forward hook of transformers that collects outputs of submodules, such as the logits of a router."""


class _AnyIndex:
    """Stands for the index of a layer in a template; may be passed on but not looked at."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise IndexWasRead


for _operation in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "int", "float", "index", "str", "repr", "format"),
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "divmod", "round"),
):
    setattr(_AnyIndex, f"__{_operation}__", _refuse)

_ANY_INDEX = _AnyIndex()
_NO_TENSOR = nn.Parameter(torch.empty(0), requires_grad=False)


class Fingerprint:
    """A module's structure as a key, and whether the module still has it."""

    def __init__(self, module: nn.Module, *, with_index: bool = False) -> None:
        """Read the structure of `module`; `with_index` counts the index of a layer in.

        Raises:
            NotShareable: Another module cannot stand in for it.
        """
        self._with_index = with_index
        self._seen: dict[int, int] = {}
        self._tensors: dict[int, int] = {}
        self._held: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[Any, int]] = []
        self.captures: list[Capture] = []
        """Hooks that collect outputs, in the order of the tree."""
        self.key: Hashable = self._describe_module(module, "")

    def still_holds(self) -> bool:
        """Whether no attribute, submodule or hook was set, added or removed since."""
        return all(held.get(name) is value for held, name, value in self._held) and all(
            len(sized) == size for sized, size in self._sizes
        )

    def _describe_module(self, module: nn.Module, path: str) -> Hashable:
        if id(module) in self._seen:
            return ("again", self._seen[id(module)])
        self._seen[id(module)] = len(self._seen)
        own = vars(module)
        self._sizes.append((own, len(own)))
        self._watch(own, "training")
        attributes = []
        for name, value in own.items():
            if name in _OF_TORCH or (not path and name in _ROOT_ONLY):
                continue
            self._watch(own, name)
            if self._with_index or name not in _INDEX_NAMES:
                attributes.append((name, _describe(value, f"{path}{name}")))
        children = []
        self._sizes.append((module._modules, len(module._modules)))
        for name, child in module._modules.items():
            self._watch(module._modules, name)
            described = None if child is None else self._describe_module(child, f"{path}{name}.")
            children.append((name, described))
        return (
            type(module),
            module.training,
            tuple(sorted(attributes)),
            self._describe_tensors(module._parameters),
            self._describe_tensors(module._buffers),
            self._describe_hooks(own, path),
            tuple(children),
        )

    def _watch(self, held: dict[str, Any], name: str) -> None:
        self._held.append((held, name, held[name]))

    def _describe_tensors(self, held: Any) -> Hashable:
        self._sizes.append((held, len(held)))
        described: list[tuple[Hashable, ...]] = []
        for name, tensor in held.items():
            if tensor is None:
                self._watch(held, name)
                described.append((name, None))
            else:
                number = self._tensors.setdefault(id(tensor), len(self._tensors))
                described.append((name, tensor.shape, tensor.dtype, number))
        return tuple(described)

    def _describe_hooks(self, own: dict[str, Any], path: str) -> Hashable:
        hooks = []
        for kind in _HOOKS:
            self._sizes.append((own[kind], len(own[kind])))
            if not path:
                continue  # called around the forward that is compiled
            for hook in own[kind].values():
                what = _captured(hook)
                if what is None:
                    raise NotShareable(f"{path.rstrip('.')} has a hook")
                self.captures.append(hook)
                hooks.append(what)
        return tuple(hooks)


def _captured(hook: Any) -> tuple[str, int] | None:
    """Read what a hook of transformers collects: a key, and the position in a tuple of outputs."""
    if getattr(hook, "__module__", None) != _CAPTURING or not isinstance(hook, types.FunctionType):
        return None
    cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    if not {"key", "index"} <= cells.keys() or cells["key"].cell_contents == "hidden_states":
        return None
    return cells["key"].cell_contents, cells["index"].cell_contents


def _describe(value: Any, name: str) -> Hashable:
    """Describe an attribute so that equal descriptions compute the same."""
    if value is None or isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(_describe(item, name) for item in value))
    if isinstance(value, dict):
        items = [(key, item) for key, item in value.items() if key not in _LABELS]
        return (type(value), tuple((_describe(key, name), _describe(item, name)) for key, item in items))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(_describe(item, name) for item in value))
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
        return (functools.partial, *(_describe(part, name) for part in parts))
    if isinstance(value, Tensor) and value.device.type == "cpu" and value.numel() <= _SMALL_TENSOR:
        return (Tensor, value.shape, value.dtype, value.requires_grad, str(value.tolist()))
    if isinstance(value, nn.Module):
        raise NotShareable(f"{name} is a module that is not registered as a submodule")
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        raise NotShareable(f"{name} is a method bound to one module")
    return ("object", id(value))  # kept alive by the fingerprint that holds it


class Template:
    """A copy of a module's tree without its tensors, which are put in for each call."""

    def __init__(self, module: nn.Module, *, with_index: bool = False) -> None:
        """Copy the tree of `module`; attributes are shared with it, tensors and hooks are not held."""
        self._captured: list[tuple[int, Any]] = []
        self._num_captures = 0
        self.module = self._copy(module, {}, with_index)
        vars(self.module).pop("forward", None)
        self.places = list(places_of(self.module))
        buffers = {id(child._buffers) for child in self.module.modules()}
        self.is_buffer = [id(held) in buffers for held, _ in self.places]
        for held, name in self.places:
            held[name] = _NO_TENSOR

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[tuple[int, Any]]]:
        """Run the class's forward; return its output and (number of the capture, captured value) pairs."""
        captured = self._captured = []
        output = type(self.module).forward(self.module, *args, **kwargs)
        self._captured = []
        return output, captured

    def contents(self) -> list[Any]:
        """Return what a forward must leave as it is: every attribute, submodule and buffer."""
        return [
            value
            for child in self.module.modules()
            for held in (vars(child), child._modules, child._buffers)
            for value in held.values()
        ]

    def _copy(self, module: nn.Module, copies: dict[int, nn.Module], with_index: bool) -> nn.Module:
        if id(module) in copies:
            return copies[id(module)]
        new = type(module).__new__(type(module))
        is_root, copies[id(module)] = not copies, new
        own = vars(new)
        own.update(vars(module))
        for name in _OF_TORCH.intersection(own):
            if isinstance(own[name], (dict, set)):
                own[name] = own[name].copy()
        if not with_index:
            own.update(dict.fromkeys(_INDEX_NAMES.intersection(own), _ANY_INDEX))
        for name in own:
            if name in _OF_TORCH and "_hooks" in name and isinstance(own[name], dict):
                own[name].clear()
        if not is_root:
            for hook in module._forward_hooks.values():
                self._capture(new, hook)
        for name, child in module._modules.items():
            if child is not None:
                new._modules[name] = self._copy(child, copies, with_index)
        return new

    def _capture(self, module: nn.Module, hook: Any) -> None:
        """Return what `hook` would collect from the forward instead: a side effect would break the graph."""
        number, (_, index) = self._num_captures, _captured(hook) or ("", 0)
        self._num_captures += 1

        def capture(_: nn.Module, args: Any, output: Any) -> None:
            value = output[index] if isinstance(output, tuple) else output
            if value is not None:
                self._captured.append((number, value))

        module.register_forward_hook(capture)


def places_of(module: nn.Module) -> Iterator[Place]:
    """Yield where every parameter and buffer of a module tree is looked up, in a fixed order."""
    for child in module.modules():
        tensors: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
        for held in tensors:
            yield from ((held, name) for name, tensor in held.items() if tensor is not None)
