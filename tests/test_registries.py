"""What a policy, an operation kind, an objective or an optimizer is called is compared in its registry alone.

Elsewhere code asks an attribute or calls a method; a comparison with a name is a stripe of a feature through
a file that should not know it. All is read from the syntax tree. `COUNTED` is a ratchet: it holds how many
lines of a module compare with names today, and a change that removes one shortens it.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from megatrain.config.policies import POLICY_NAMES
from megatrain.objective.registry import OBJECTIVES
from tests.test_imports import modules, parsed


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Features of one sort."""

    names: Collection[str] = ()
    """The strings that users write for them."""
    classes: Collection[str] = ()
    """Enumerations whose members they are, and classes of which they are subclasses or instances."""
    home: str
    """The module of `classes`: a class of the same name that comes from elsewhere is another one."""
    registries: Collection[str]
    """Modules, or packages, that may compare with their names."""


SUBJECTS = {
    "policies": Subject(
        names=POLICY_NAMES,
        classes=["Policy"],
        home="megatrain.config.policies",
        registries=["megatrain.config.policies"],
    ),
    "kinds": Subject(  # strings such as "read" and "save" are names of many things
        classes=["Operation"],
        home="megatrain.plan.program",
        registries=["megatrain.plan.program.features"],
    ),
    "objectives": Subject(
        names=OBJECTIVES,
        classes=["Objective"],
        home="megatrain",
        registries=["megatrain.objective"],
    ),
    "optimizers": Subject(
        names=["adamw", "signsgd", "muon"],
        classes=["Optimizer"],
        home="megatrain.config.optimizers",
        registries=["megatrain.config.optimizers"],
    ),
}

MODULES = {place.rpartition(".")[2] for subject in SUBJECTS.values() for place in subject.registries}
"""Last parts of the registries' names, by which a constant of theirs may be read: `policies.KEEP`."""

NOT_OURS = "megatrain.config.foreign"
"""Tables of what other trainers call things."""

COUNTED: dict[str, dict[str, int]] = {
    "policies": {},
    "kinds": {},
    "objectives": {},
    "optimizers": {},
}
"""By subject and module, the lines that compare. It only ever gets shorter."""


def is_in(module: str, places: Collection[str]) -> bool:
    """Whether a module is one of some, or in a package among them."""
    return any(f"{module}.".startswith(f"{place}.") for place in places)


def spelled(node: ast.expr) -> str:
    """Return a dotted name's last part."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def elements(node: ast.AST) -> list[ast.expr]:
    """Return what a collection lists, of a dictionary its keys."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return node.elts
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    return []


READ = (ast.ImportFrom, ast.Compare, ast.match_case, ast.Call, ast.Dict, ast.Tuple, ast.List, ast.Set)


@cache
def nodes(source: str) -> list[ast.AST]:
    """Return what of a source is looked at."""
    return [node for node in ast.walk(parsed(source)) if isinstance(node, READ)]


def taken(source: str) -> Iterator[tuple[str, str, str]]:
    """Yield each name that a module imports from another, what it is called there, and the other module."""
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, alias.name, node.module or "") for alias in node.names)


@cache
def members(subject: str) -> set[str]:
    """Return the names of subclasses and module-wide instances of a subject's classes, wherever they are."""
    found = set(SUBJECTS[subject].classes)
    while True:
        before = len(found)
        for name, source in modules().items():
            if is_in(name, [SUBJECTS[subject].home]):
                tree = parsed(source)
                ours = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
                ours |= {name for name, _, where in taken(source) if is_in(where, ["megatrain"])}
                for node in tree.body:
                    if isinstance(node, ast.ClassDef) and found & ours & {*map(spelled, node.bases)}:
                        found.add(node.name)
                    if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
                        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                        found |= {spelled(at) for at in targets if spelled(node.value.func) in found}
        if len(found) == before:
            return found - set(SUBJECTS[subject].classes)


def local_names(source: str, subject: Subject) -> set[str]:
    """Return what a module calls those of a subject's classes that it takes from their home."""
    return {
        name
        for name, its_name, where in taken(source)
        if its_name in subject.classes and is_in(where, [subject.home])
    }


def places(module: str, source: str, name: str) -> Iterator[int]:
    """Yield the line of every comparison with, and every collection of, names of one subject."""
    subject = SUBJECTS[name]
    if is_in(module, [*subject.registries, NOT_OURS]):
        return
    enumerations, known = local_names(source, subject), members(name)

    def is_named(node: ast.AST | None) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "value":
            return is_named(node.value)
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and node.value in subject.names
        if isinstance(node, ast.Attribute) and spelled(node.value) in enumerations:
            return True
        if isinstance(node, ast.Attribute) and spelled(node.value) in MODULES:
            return node.attr in known
        return isinstance(node, ast.Name) and node.id in known

    for node in nodes(source):
        listed = elements(node)
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            among = [one for operand in operands for one in elements(operand)]
            found = any(map(is_named, [*operands, *among]))
        elif isinstance(node, ast.match_case):
            patterns = [*ast.walk(node.pattern)]
            found = any(
                is_named(one.value if isinstance(one, ast.MatchValue) else one.cls)
                for one in patterns
                if isinstance(one, ast.MatchValue | ast.MatchClass)
            )
        elif isinstance(node, ast.Call) and spelled(node.func) in ("isinstance", "issubclass"):
            found = any(is_named(one) for one in ast.walk(node.args[-1]))
        elif isinstance(node, ast.Dict):
            found = bool(listed) and all(map(is_named, listed))
        else:  # one that is used in a comparison by its own name
            found = len(listed) > 1 and all(map(is_named, listed))
        if found:
            yield node.pattern.lineno if isinstance(node, ast.match_case) else getattr(node, "lineno", 0)


def counted(name: str) -> dict[str, int]:
    """Return in how many lines each module has such places."""
    found = Counter({module: len({*places(module, source, name)}) for module, source in modules().items()})
    return dict(sorted((+found).items()))


@pytest.mark.parametrize("name", SUBJECTS)
def test_names_are_compared_in_their_registry_alone(name: str) -> None:
    found = counted(name)
    more = {module: n for module, n in found.items() if n > COUNTED[name].get(module, 0)}
    lines = [
        f"{module}:{line}" for module in more for line in sorted({*places(module, modules()[module], name)})
    ]
    assert not more, f"ask {name} an attribute, or call a method, instead of comparing names: {lines}"
    assert found == COUNTED[name], "there are fewer than COUNTED says: shorten it"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("policies", "policy == 'keep'"),
        ("policies", "'recompute_cheap' in choice.activations"),
        ("policies", "policy in ('keep', other)"),
        ("policies", "AGAIN = frozenset({'recompute', 'drop_boundary'})"),
        ("policies", "source = {'offload': 'keep'}.get(policy, policy)"),
        ("policies", "match policy:\n    case 'keep' | 'offload':\n        pass"),
        ("policies", "from megatrain.config.policies import KEEP\npolicy is not KEEP"),
        ("policies", "from megatrain.config import policies\npolicy == policies.KEEP"),
        ("kinds", "type(operation) is Hold"),
        ("kinds", "isinstance(operation, Hold)"),
        ("kinds", "PAIR = (Hold, Add)"),
        ("kinds", "WORK = {Hold: hold}"),
        ("kinds", "match operation:\n    case Add() if it:\n        pass"),
        ("objectives", "config.train.loss != 'sft'"),
        ("optimizers", "name == 'adamw'"),
    ],
)
def test_a_comparison_is_found(name: str, source: str) -> None:
    assert len({*places("megatrain.anywhere", source, name)}) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("policies", "Choice(activations='recompute')"),
        ("policies", "activations = ('keep',) * num_layers"),
        ("policies", "if policy.is_recomputed:\n    pass"),
        ("policies", "report = {'offload': 1, 'fetch': 2}"),
        ("kinds", "Hold(block=block)"),
        ("kinds", "from megatrain.plan.search.verdict import Kind\nkind is Kind.HOLD"),
        ("kinds", "direction == 'read'"),
        ("objectives", "loss == before"),
    ],
)
def test_what_compares_no_name_is_fine(name: str, source: str) -> None:
    assert not [*places("megatrain.anywhere", source, name)]


def test_subclasses_and_instances_of_a_class_are_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """As features come to be objects: a class each, or an instance in the module of the registry."""
    sources = {
        "megatrain.plan.program.operations": "class Operation: pass\nclass Hold(Operation): pass",
        "megatrain.plan.program.more": (
            "from megatrain.plan.program.operations import Hold, Operation\n"
            "class Kept(Hold): pass\nALL: Operation = Operation()"
        ),
    }
    monkeypatch.setattr("tests.test_registries.modules", lambda: sources)
    members.cache_clear()
    for found in (
        "isinstance(it, Hold | Kept)",
        "kind is Kept",
        "it is not ALL",
        "match it:\n case Kept(): ...",
    ):
        assert [*places("megatrain.anywhere", found, "kinds")], found
    assert not [*places("megatrain.anywhere", "isinstance(it, Operation)", "kinds")]
    members.cache_clear()
