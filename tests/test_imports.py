"""The folder list is the architecture: imports go one way, and nothing is unpickled, executed or printed.

The order of `CONTRIBUTING.md` is enforced on the syntax tree, so an import counts wherever it is written: at
the top of a module, in a function, or under TYPE_CHECKING. A name that only an annotation needs is still
knowledge of what it names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatrain"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("",),  # megatrain/__init__.py: the names that users import
    ("doctor",),
    ("train",),
    ("stream",),
    ("store", "optim", "plan"),
    ("data", "checkpoint", "model"),
    ("layout",),
    ("hardware", "config"),
    ("errors",),
)
"""Parts of the package. Each imports from later rows only; parts in one row do not import each other."""

EQUALS_THAT_MAY = {
    ("hardware", "errors"): "a machine file that cannot be read is a ConfigError, raised where it is read",
    ("config", "errors"): "a setting that cannot run is a ConfigError, raised where the setting is read",
}
"""The pairs of one row that import all the same, each with its reason. A pair that stops doing so must go."""

PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING = {"eval", "exec", "__import__"}

RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}


def part_of(module: str) -> str:
    """Name the part that a dotted name inside the package belongs to; "" is the package itself."""
    part = module.split(".")[1] if "." in module else ""
    return "" if part == "__init__" else part


def imported(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every import of the package, relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def wrong_imports(source: str, module: str, pairs: set[tuple[str, str]]) -> list[str]:
    """List a module's imports that go against the order; add the allowed pairs that it uses to `pairs`."""
    problems = []
    own = part_of(module)
    if own not in RANK:
        return [f"{module} is in no layer; give {own} a place in LAYERS and in CONTRIBUTING.md"]
    for line, name in imported(ast.parse(source), module):
        if name != "megatrain" and not name.startswith("megatrain."):
            continue
        other = part_of(name)
        if other not in RANK:
            other = ""  # a name of the package itself, such as __version__
        if other == own:
            continue
        if (own, other) in EQUALS_THAT_MAY:
            pairs.add((own, other))
        elif RANK[other] == RANK[own]:
            problems.append(f"{module}:{line} imports {name}, its equal; let the caller pass what it needs")
        elif RANK[other] < RANK[own]:
            problems.append(f"{module}:{line} imports {name}, which is above it")
    return problems


def forbidden(source: str, module: str) -> list[str]:
    """List what a module does that the package must not: print, unpickle, execute text, run remote code."""
    tree = ast.parse(source)
    names = {  # what a local name stands for
        alias.asname or alias.name.partition(".")[0]: alias.name
        if alias.asname
        else alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    names |= {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }
    problems = [
        f"{module}:{line} imports {name}, which unpickles"
        for line, name in imported(tree, module)
        if PICKLING.intersection(name.split(".")[:1])
    ]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            spelled = ast.unparse(node)
            first, dot, rest = spelled.partition(".")
            used = names.get(first, first) + dot + rest
            if used in {f"builtins.{name}" for name in EXECUTING} | EXECUTING:
                problems.append(f"{module}:{node.lineno} uses {spelled}, which executes text")
            if used in ("torch.load", "torch.serialization.load"):
                problems.append(f"{module}:{node.lineno} uses {spelled}, which unpickles; read safetensors")
            if used in ("print", "builtins.print") and part_of(module) != "cli":
                problems.append(f"{module}:{node.lineno} uses print; log, or return what cli.py prints")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle") and not is_off:
                    problems.append(f"{module}:{node.lineno} sets {keyword.arg} to something else than False")
    return problems


def modules() -> list[tuple[str, str]]:
    """Return the dotted name and the source of every module of the package."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = ["megatrain", *file.relative_to(PACKAGE).with_suffix("").parts]
        found.append((".".join(parts), file.read_text(encoding="utf-8")))
    return found


def test_imports_go_one_way() -> None:
    pairs: set[tuple[str, str]] = set()
    problems = [problem for name, source in modules() for problem in wrong_imports(source, name, pairs)]
    assert not problems, "\n".join(problems)
    assert pairs == set(EQUALS_THAT_MAY), "an exception is not needed any more"


def test_nothing_is_unpickled_executed_or_printed() -> None:
    problems = [problem for name, source in modules() for problem in forbidden(source, name)]
    assert not problems, "\n".join(problems)


def test_every_module_is_read() -> None:
    """The walk sees the package, and not an empty folder."""
    names = {name for name, _ in modules()}
    assert {"megatrain.__init__", "megatrain.cli", "megatrain.stream.engine"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.store.state", "from megatrain.stream.engine import Engine"),
        ("megatrain.store.state", "import megatrain.stream.engine"),
        ("megatrain.store.state", "from megatrain import train"),
        ("megatrain.store.state", "def late():\n    from megatrain.train.loop import train"),
        ("megatrain.store.state", "if TYPE_CHECKING:\n    from megatrain.stream.engine import Engine"),
        ("megatrain.store.state", "from ..stream import engine"),
        ("megatrain.store.state", "from megatrain.optim import adamw"),
        ("megatrain.plan.program.operations", "from megatrain.store.state import Precision"),
        ("megatrain.checkpoint.save", "from megatrain.stream.engine import Engine"),
        ("megatrain.stream.engine", "import megatrain"),
        ("megatrain.stream.engine", "from megatrain import attach"),
        ("megatrain.train.loop", "from megatrain.cli import app"),
        ("megatrain.errors", "from megatrain.config import Config"),
        ("megatrain.hardware.memory", "from megatrain.config import Config"),
        ("megatrain.config.yaml12", "from megatrain.hardware import host_memory"),
        ("megatrain.leftovers", "import os"),
    ],
)
def test_import_against_the_order_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(source, module, set())) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.cli", "from megatrain import __version__\nfrom megatrain.train.loop import train"),
        ("megatrain.__init__", "from megatrain.stream.engine import attach"),
        ("megatrain.stream.engine", "from .slots import Slots\nfrom ..plan.program import Visit"),
        ("megatrain.store.state", "import torch\nfrom megatrain.layout.blocks import Entry"),
        ("megatrain.config", "from megatrain.errors import ConfigError"),
        ("megatrain.config", "from megatrain.config.yaml12 import dump_yaml"),
        ("megatrain.train.state", "import megatrainer"),
    ],
)
def test_import_along_the_order_is_fine(module: str, source: str) -> None:
    assert wrong_imports(source, module, set()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def late():\n    from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "import torch.serialization\ntorch.serialization.load('x')",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x')",
        "import torch\nread = torch.load",
        "eval('1')",
        "exec('x = 1')",
        "import builtins\nbuiltins.exec('x = 1')",
        "print('hello')",
        "show = print",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=wanted)",
        "f(allow_pickle=True)",
    ],
)
def test_forbidden_call_is_found(source: str) -> None:
    assert forbidden(source, "megatrain.stream.engine") != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.cli", "print('hello')"),
        ("megatrain.stream.engine", "model.eval()\nf(trust_remote_code=False)"),
        ("megatrain.stream.engine", "from megatrain.stream.load import load\nload('x')"),
        ("megatrain.stream.engine", "import json\njson.load(file)\nself.load(1)"),
    ],
)
def test_call_that_only_looks_forbidden_is_fine(module: str, source: str) -> None:
    assert forbidden(source, module) == []
