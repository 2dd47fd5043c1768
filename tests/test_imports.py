"""The folder list is the architecture: imports go one way, and nothing is unpickled, executed or printed.

All is read from the syntax tree, so an import counts wherever it is written: at the top of a module, in a
function, or under TYPE_CHECKING. A name that only an annotation needs is still knowledge of what it names.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatrain"
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}
YAML = "megatrain.config.yaml12"
"""The one reader of YAML, whose loader makes plain values only."""

OWN = "."
"""In `FLOORS`: the folder's own files, which import each other as long as there is no circle."""

FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "megatrain": (
        ("__main__",),
        ("cli",),
        ("__init__",),  # the names that users import
        ("hf", "doctor"),
        ("train",),
        ("stream",),
        ("store", "optim", "plan", "distributed"),
        ("data", "checkpoint", "model"),
        ("layout",),
        ("hardware", "config"),
        ("files", "hub", "recipes", "objective"),
        ("errors", "filesystems", "lazy", "versions"),
    ),
    "megatrain.model": (("profile",), (OWN,), ("weights",)),
    "megatrain.store": ((OWN,), ("drives",)),
    "megatrain.stream": (
        ("attach",),
        (OWN,),
        ("forward",),
        ("activations",),
        ("execute",),
        ("ranks",),
        ("lanes",),
        ("job",),
    ),
    "megatrain.plan": (("search",), ("cost",), ("memory",), ("program",)),
}
"""By folder, what is in it, from the top floor to the lowest. Each imports from later rows only; names in one
row do not import each other: the caller passes what they need."""

MOST_LINES = 500

WITHOUT_SETTINGS = tuple(
    f"megatrain.{part}."
    for part in ("doctor", "stream", "store", "optim", "plan", "checkpoint", "model", "layout", "hardware")
)
SETTINGS_AND_DATA = {"pydantic", "yaml", "typer", "rich", "datasets", "pyarrow"}

PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
EXECUTING = {"eval", "exec", "__import__"}


Graph = Mapping[str, Collection[str]]
"""By module, whom it imports of the package."""


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imported(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of every import, those relative to `module` made absolute."""
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


def imports_of(module: str, source: str, modules: Collection[str]) -> set[str]:
    """Return which of `modules` a source imports; `__init__` where a name is taken from a folder itself."""
    files = {name.removesuffix(".__init__"): name for name in modules}
    found = set()
    for _, name in imported(parsed(source), module):
        while name and name not in files:
            name = name.rpartition(".")[0]
        found.add(files.get(name, module))
    return found - {module}


def graph_of(sources: Mapping[str, str]) -> Graph:
    """Draw who imports whom, file by file."""
    return {module: imports_of(module, source, sources) for module, source in sources.items()}


def circles(graph: Graph) -> list[list[str]]:
    """List the largest sets of nodes that all reach each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        waiting.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
            if other in waiting:
                lowest[node] = min(lowest[node], lowest[other])
        if lowest[node] == number[node]:
            start = waiting.index(node)
            found.append(sorted(waiting[start:]))
            del waiting[start:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return [nodes for nodes in found if len(nodes) > 1]


def folders(graph: Graph) -> list[str]:
    """List the folders of a package whose files are the nodes of `graph`."""
    parts = [name.split(".") for name in graph]
    return sorted({".".join(part[:depth]) for part in parts for depth in range(1, len(part))})


def inside(folder: str, graph: Graph) -> Graph:
    """Draw who imports whom in one folder, each of its own folders as one node."""
    drawn: dict[str, set[str]] = {}
    for module, others in graph.items():
        own = child_of(folder, module)
        if own is not None:
            names = {child_of(folder, other) for other in others} - {None, own}
            drawn.setdefault(own, set()).update(name for name in names if name is not None)
    return drawn


def all_circles(graph: Graph) -> list[str]:
    """List the circles of the whole package by file, and of every folder."""
    found = [f"by file: {', '.join(nodes)}" for nodes in circles(graph)]
    for folder in folders(graph):
        found += [f"in {folder}: {', '.join(nodes)}" for nodes in circles(inside(folder, graph))]
    return found


def child_of(folder: str, module: str) -> str | None:
    """Name what of `folder` a module is or is in; None: it is elsewhere."""
    return module[len(folder) + 1 :].partition(".")[0] if module.startswith(f"{folder}.") else None


def floor_of(folder: str, module: str) -> int | None:
    """Return on which floor of `folder` a module is, 0 at the top; None: on none of the table."""
    name = child_of(folder, module)
    for floor, row in enumerate(FLOORS[folder]):
        if name in row or (OWN in row and module == f"{folder}.{name}"):
            return floor
    return None


def against_the_floors(graph: Graph) -> dict[tuple[str, str], str]:
    """Say of every import that runs upwards, or to an equal, what is wrong with it."""
    found = {}
    for module, others in graph.items():
        for other in others:
            for folder, rows in FLOORS.items():
                own, its = floor_of(folder, module), floor_of(folder, other)
                if own is None or its is None or child_of(folder, module) == child_of(folder, other):
                    continue
                if its < own:
                    found[module, other] = f"{module} imports {other}, which is above it"
                elif its == own and OWN not in rows[own]:
                    found[module, other] = (
                        f"{module} imports {other}, its equal; let the caller pass what it needs"
                    )
    return found


def forbidden(source: str, module: str) -> list[str]:
    """List what a module does that the package must not: print, unpickle, execute text, run remote code."""
    tree = parsed(source)
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
        # a name that is given a value, such as the setting `eval`, is used by nobody there
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            spelled = ast.unparse(node)
            first, dot, rest = spelled.partition(".")
            used = names.get(first, first) + dot + rest
            if used in {f"builtins.{name}" for name in EXECUTING} | EXECUTING:
                problems.append(f"{module}:{node.lineno} uses {spelled}, which executes text")
            if used in ("torch.load", "torch.serialization.load"):
                problems.append(f"{module}:{node.lineno} uses {spelled}, which unpickles; read safetensors")
            if used in SHELLS:
                problems.append(f"{module}:{node.lineno} uses {spelled}, which runs a shell")
            if used.startswith("yaml.") and used.endswith(("load", "load_all")) and module != YAML:
                problems.append(f"{module}:{node.lineno} uses {spelled}; read YAML by {YAML}")
            if used in ("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.unsafe_load"):
                problems.append(f"{module}:{node.lineno} uses {spelled}, which makes objects")
            if used in ("print", "builtins.print") and not module.startswith("megatrain.cli"):
                problems.append(f"{module}:{node.lineno} uses print; log, or return what the command prints")
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and not is_off:
                    problems.append(f"{module}:{node.lineno} sets {keyword.arg} to something else than False")
    return problems


@cache
def modules() -> dict[str, str]:
    """Return the source of every module of the package, by its dotted name."""
    return {
        ".".join(("megatrain", *file.relative_to(PACKAGE).with_suffix("").parts)): file.read_text(
            encoding="utf-8"
        )
        for file in sorted(PACKAGE.rglob("*.py"))
    }


@cache
def package() -> Graph:
    """Draw the package as it is."""
    return graph_of(modules())


def test_imports_go_one_way() -> None:
    """Between the floors of the package, and between those of its folders."""
    lost = [module for module in package() if floor_of("megatrain", module) is None]
    assert not lost, f"on no floor: {lost}; give them a place in FLOORS and in CONTRIBUTING.md"
    problems = against_the_floors(package())
    assert not problems, "\n".join(problems.values())


def test_no_imports_form_a_circle() -> None:
    """Neither of files, whatever folders they are in, nor of what a folder holds."""
    problems = all_circles(package())
    assert not problems, "\n".join(problems)


def test_no_file_is_long() -> None:
    long = [name for name, source in modules().items() if source.count("\n") > MOST_LINES]
    assert not long, f"over {MOST_LINES} lines; look for the second idea inside: {long}"


def test_nothing_is_unpickled_executed_or_printed() -> None:
    problems = [problem for name, source in modules().items() for problem in forbidden(source, name)]
    assert not problems, "\n".join(problems)


def reached_from(module: str, graph: Graph) -> set[str]:
    """Return a module and all that it imports, directly or not."""
    found, left = {module}, [module]
    while left:
        new = set(graph.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


def test_the_engine_needs_no_package_of_the_command_line_and_of_data() -> None:
    """Nor do optimizer, planner and doctor: on a bare machine with a GPU these may be missing."""
    need = {
        module
        for module, source in modules().items()
        if SETTINGS_AND_DATA & {name.partition(".")[0] for _, name in imported(parsed(source), module)}
    }
    assert "megatrain.config.sections.config" in need
    for module in package():
        if module.startswith(WITHOUT_SETTINGS):
            assert not need & reached_from(module, package()), module


def test_every_module_is_read() -> None:
    """The walk sees the package, and not an empty folder."""
    assert {"megatrain.__init__", "megatrain.cli.commands", "megatrain.stream.engine"} <= modules().keys()


def imports_alone(module: str, source: str) -> Graph:
    """Draw the imports of one module of the package, if that were its source."""
    return {module: imports_of(module, source, modules())}


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
        ("megatrain.plan.program.operations", "from megatrain.plan.memory.block_sums import BlockSums"),
        ("megatrain.plan.memory.block_sums", "from megatrain.plan.search.planner import plan"),
        ("megatrain.checkpoint.save", "from megatrain.stream.engine import Engine"),
        ("megatrain.stream.engine", "import megatrain"),
        ("megatrain.stream.engine", "from megatrain import attach"),
        ("megatrain.stream.lanes.base", "from megatrain.stream.execute.slots import Slots"),
        ("megatrain.stream.forward.rounds", "from megatrain.stream.engine import Engine"),
        ("megatrain.stream.forward.rounds", "from ..engine import Engine"),
        ("megatrain.train.loop", "from megatrain.cli import app"),
        ("megatrain.errors", "from megatrain.config import Config"),
        ("megatrain.hardware.memory", "from megatrain.config import Config"),
        ("megatrain.config.yaml12", "from megatrain.hardware import host_memory"),
    ],
)
def test_import_against_the_order_is_found(module: str, source: str) -> None:
    assert len(against_the_floors(imports_alone(module, source))) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.cli", "from megatrain import __version__\nfrom megatrain.train.loop import train"),
        ("megatrain.__init__", "from megatrain.stream.engine import attach"),
        ("megatrain.stream.engine", "from .report import StepReport\nfrom ..plan.program import operations"),
        ("megatrain.stream.engine", "from megatrain.stream.forward.rounds import Rounds"),
        ("megatrain.store.state", "import torch\nfrom megatrain.layout.blocks import Entry"),
        ("megatrain.config.sections.config", "from megatrain.errors import ConfigError"),
        ("megatrain.config.sections.config", "from megatrain.config.yaml12 import dump_yaml"),
        ("megatrain.train.resume.state", "import megatrainer"),
    ],
)
def test_import_along_the_order_is_fine(module: str, source: str) -> None:
    assert against_the_floors(imports_alone(module, source)) == {}


def test_circles_are_found_by_file_and_by_folder() -> None:
    sources = {
        "megatrain.one.a": "from megatrain.one.b import B",
        "megatrain.one.b": "if TYPE_CHECKING:\n    from megatrain.one.a import A",
        "megatrain.two.x.f": "def late():\n    from megatrain.two.y import g",
        "megatrain.two.y.g": "import os",
        "megatrain.two.y.h": "from ..x import e",
        "megatrain.two.x.e": "import megatrain.one.a",
    }
    assert all_circles(graph_of(sources)) == [
        "by file: megatrain.one.a, megatrain.one.b",
        "in megatrain.one: a, b",
        "in megatrain.two: x, y",
    ]


def test_names_of_a_folder_count_as_its_init() -> None:
    sources = {
        "megatrain.lanes.__init__": "from megatrain.lanes.base import Lanes",
        "megatrain.lanes.base": "import os",
        "megatrain.lanes.spec": "from megatrain.lanes import Lanes",
    }
    assert graph_of(sources)["megatrain.lanes.spec"] == {"megatrain.lanes.__init__"}
    assert all_circles(graph_of(sources)) == []
    sources["megatrain.lanes.base"] = "from megatrain.lanes import Lanes"
    assert all_circles(graph_of(sources)) == [
        "by file: megatrain.lanes.__init__, megatrain.lanes.base",
        "in megatrain.lanes: __init__, base",
    ]


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
        "import subprocess\nsubprocess.run(command, shell=True)",
        "import os\nos.system(command)",
        "import yaml\nyaml.safe_load(text)",
        "import yaml as y\ny.load(text, Loader=y.UnsafeLoader)",
    ],
)
def test_forbidden_call_is_found(source: str) -> None:
    assert forbidden(source, "megatrain.stream.engine") != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatrain.cli", "print('hello')"),
        ("megatrain.stream.engine", "model.eval()\nf(trust_remote_code=False)"),
        ("megatrain.stream.engine", "from megatrain.stream.attach.load import load\nload('x')"),
        ("megatrain.stream.engine", "import json\njson.load(file)\nself.load(1)"),
    ],
)
def test_call_that_only_looks_forbidden_is_fine(module: str, source: str) -> None:
    assert forbidden(source, module) == []
