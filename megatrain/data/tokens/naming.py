"""A rewriter of chat templates, after which each written piece carries the message that it is written for.

A loop over messages sets an owner, which is the current message, and each piece that is written in the loop
is given that owner, unless it already has one from an inner loop, as text of a captured block or a macro has.
Strings are concatenated by functions that keep their traces (`traced`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context, pass_environment
from jinja2.filters import make_attrgetter
from jinja2.visitor import NodeTransformer

from megatrain.data.tokens.traced import Traced, joined, traced_json

GENERATED = 1
"""The owner of what `{% generation %}` writes outside of messages. The owners of message n are 2 n + 2 and,
inside of `{% generation %}`, 2 n + 3."""


class Owned(dict[str, Any]):
    """A message as a template sees it, which knows the owner of what is written for it."""

    owner = 0


@pass_context  # without it, Jinja would replace a call on a constant by its plain text
def _own(_: object, value: object, owner: int, is_generated: bool) -> Traced:
    """Return a value's text, given an owner where it has none yet."""
    text = str(value)
    if not isinstance(text, Traced):
        return Traced(text, ((len(text), owner | is_generated, 0),))
    owners = {0: owner | is_generated, GENERATED: owner | 1}
    return Traced(text, tuple((length, owners.get(of, of), what) for length, of, what in text.runs))


def _enter(value: object, outer: int, *others: object) -> int:
    """Return the owner of what a loop writes: its current message, or else the owner around it."""
    return next((found.owner for found in (value, *others) if isinstance(found, Owned)), outer)


def _fetch(value: object, owner: int, outer: int) -> int:
    """Return the owner after a name has got a value.

    If the loop is over something else, such as indices, the owner is the first message that the loop fetches.
    """
    return _enter(value, owner) if owner == outer else owner


@pass_context
def _concat(_: object, value: object, *others: object) -> str:
    """Concatenate as Jinja's operator does, with traces."""
    return joined([str(part) for part in (value, *others)])


@pass_environment
def _join(environment: Environment, values: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """Join as Jinja's filter does, with traces."""
    if attribute is not None:
        values = map(make_attrgetter(environment, attribute), values)
    return joined([str(value) for value in values], str(d))


_OWN, _ENTER, _FETCH, _CONCAT = (f"megatrain_{name}" for name in ("own", "enter", "fetch", "concat"))


def name_owners(environment: Environment, source: str) -> tuple[Template, bool]:
    """Return a template that names owners, and whether it has `{% generation %}`.

    Args:
        environment: The environment of transformers' templates, which is not changed.
        source: The template's source.

    Raises:
        jinja2.TemplateError: The source is no template.
    """
    tracing = _tracing(environment)
    tree = tracing.parse(source)
    has_generation = any(map(_is_generation, tree.find_all(nodes.CallBlock)))
    named = _Naming().visit(tree)
    named.set_environment(tracing)
    return tracing.from_string(named), has_generation


def _tracing(environment: Environment) -> Environment:
    """Return an environment like transformers', whose templates concatenate traced strings."""
    found = environment.overlay()
    to_json = environment.filters["tojson"]

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON as the filter of transformers does, with traces."""
        text = to_json(value, ensure_ascii, indent, separators, sort_keys)
        return traced_json(text, value, sort_keys=sort_keys, ensure_ascii=ensure_ascii)

    own = {_OWN: _own, _ENTER: _enter, _FETCH: _fetch, _CONCAT: _concat, "join": _join, "tojson": tojson}
    found.filters = {**environment.filters, **own}
    found.concat = lambda parts: joined(list(parts))  # type: ignore[method-assign]
    return found


class _Naming(NodeTransformer):
    """Makes loops over messages write in the name of a message."""

    def __init__(self) -> None:
        self._num_loops = 0
        self._owners: list[nodes.Expr] = [nodes.Const(0)]
        """The expressions that hold the owner in each of the loops around a node."""
        self._is_generated = False

    def visit_For(self, node: nodes.For) -> nodes.For:
        self._num_loops += 1
        name, outer = f"megatrain_owner_{self._num_loops}", self._owners[-1]
        node.iter = self.visit(node.iter)
        node.else_ = self._visited(node.else_)
        self._owners.append(nodes.Name(name, "load"))
        body = self._visited(node.body)
        self._owners.pop()
        first, *others = [nodes.Name(target.name, "load") for target in _names(node.target)]
        node.body = [_assign(name, _filtered(_ENTER, first, outer, *others), node.lineno), *body]
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        self.generic_visit(node)
        if len(self._owners) == 1 or not isinstance(node.target, nodes.Name):
            return [node]
        *_, outer, owner = self._owners
        assert isinstance(owner, nodes.Name)
        fetched = _filtered(_FETCH, nodes.Name(node.target.name, "load"), owner, outer)
        return [node, _assign(owner.name, fetched, node.lineno)]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        """Leave a macro without an owner, since its text is given one where it is called."""
        around, self._owners = self._owners, [nodes.Const(0)]
        self.generic_visit(node)
        self._owners = around
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        if not _is_generation(node):
            return self.generic_visit(node)
        around, self._is_generated = self._is_generated, True
        body = self._visited(node.body)
        self._is_generated = around
        return nodes.Scope(body, lineno=node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        self.generic_visit(node)
        if len(self._owners) > 1 or self._is_generated:
            node.nodes = [
                _filtered(
                    _OWN,
                    nodes.Const(part.data) if isinstance(part, nodes.TemplateData) else part,
                    self._owners[-1],
                    nodes.Const(self._is_generated),
                )
                for part in node.nodes
            ]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _filtered(_CONCAT, *node.nodes)

    def _visited(self, body: Iterable[nodes.Node]) -> list[nodes.Node]:
        return [found for node in body for found in self.visit_list(node)]


def _names(target: nodes.Node) -> list[nodes.Name]:
    """Return the names that a loop assigns."""
    return [target] if isinstance(target, nodes.Name) else list(target.find_all(nodes.Name))


def _is_generation(block: nodes.CallBlock) -> bool:
    return isinstance(block.call.node, nodes.ExtensionAttribute) and "generation" in block.call.node.name


def _filtered(name: str, value: nodes.Expr, *given: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(given), [], None, None)


def _assign(name: str, value: nodes.Expr, line: int) -> nodes.Assign:
    return nodes.Assign(nodes.Name(name, "store"), value, lineno=line)
