"""A kind of operation is one class in the file of its feature, which says all that is to be known of it."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import megatrain.plan.program.step  # noqa: F401  (imports every feature)
from megatrain.plan.program.features import roles
from megatrain.plan.program.operations import KINDS, Operation

PACKAGE = Path(__file__).parents[3] / "megatrain"
FEATURES = PACKAGE / "plan" / "program" / "features"
SOURCES = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def kinds_of(path: Path) -> set[str]:
    """List the classes of a feature's file that have a label."""
    return {
        node.name
        for node in SOURCES[path].body
        if isinstance(node, ast.ClassDef)
        for target in ast.walk(node)
        if isinstance(target, ast.Name) and target.id == "label" and isinstance(target.ctx, ast.Store)
    }


def test_a_kind_of_operation_is_in_two_files_at_most() -> None:
    """In that of its feature, and in one that makes it, or whose methods its work calls."""
    files = defaultdict(set)
    for path in FEATURES.glob("*.py"):
        module = f"megatrain.plan.program.features.{path.stem}"
        for kind in kinds_of(path):
            files[module, kind].add(path)
    assert len(files) >= len(KINDS) > 25
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    assert node.module != "megatrain.plan.program.features" or alias.name == "roles"
                    if (node.module, alias.name) in files:
                        files[node.module, alias.name].add(path)
    wide = {kind: sorted(path.name for path in found) for kind, found in files.items() if len(found) > 2}
    assert not wide


def test_kinds_have_few_fields() -> None:
    """None is a bag of what others need."""
    shared = {field.name for field in fields(Operation)}
    for kind in KINDS.values():
        assert len({field.name for field in fields(kind)} - shared) <= 8, kind
    assert not [role for role in vars(roles).values() if isinstance(role, type) and hasattr(role, "label")]
