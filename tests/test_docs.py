"""The documentation holds: commands parse, settings, links and names exist, output is the code's own."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer

import megatrain
import megatrain.hf as megatrain_hf
from megatrain.cli import main
from megatrain.cli.page import cli_page
from megatrain.config import Config, build_config, config_keys, load_config
from megatrain.config.yaml12 import parse_yaml
from megatrain.errors import MegatrainError
from megatrain.hardware import load_machine
from megatrain.recipes import recipes
from megatrain.train.shutdown import EXIT_STOPPED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    ROOT.glob("docs/*.md")
)
CONFIGS = [*recipes().values()]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in some languages."""
    return [
        text for language, text in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages
    ]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def code_spans(page: Path) -> set[str]:
    """Return what stands between single backticks."""
    return {" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))}


def commands(page: Path, program: str) -> list[list[str]]:
    """Return the arguments of every line of a shell block that runs `program`."""
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line and Path(line[0]).name == program]


def page_name(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else ""


COMMANDS = [(page, words) for page in PAGES for words in commands(page, "megatrain")]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stand-ins for what the commands call; returns the arguments."""
    importlib.import_module("megatrain.train.resume_point")  # which takes some of them itself
    monkeypatch.setattr("megatrain.data.read.files.check_path", lambda path: None)
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        "megatrain.cli.commands.start_ranks", lambda config, *_, **__: seen.append(("train", config))
    )
    fakes: list[types.ModuleType] = []
    for module, name in (
        ("loop", "train"),
        ("commands.dry_run", "dry_run"),
        ("commands.quickstart", "quickstart"),
        ("outputs.sample", "sample"),
        ("outputs.sample", "open_chat"),
        ("evaluate.chat", "converse"),
        ("commands.evaluate", "evaluate_run"),
        ("outputs.export", "export_run"),
        ("outputs.push", "push"),
        ("commands.trace", "trace"),
        ("commands.trace", "describe"),
        ("planning.plan_run", "plan_run"),
        ("planning.plan_report", "report"),
        ("planning.scale", "plan_scale"),
        ("planning.scale", "scale_report"),
        ("planning.longest.find", "find_longest"),
        ("planning.longest.report", "longest_report"),
        ("report.page", "write_report"),
        ("report.runs", "list_runs"),
        ("report.runs", "show_run"),
        ("report.runs", "compare_runs"),
    ):
        name_of = f"megatrain.train.{module}"
        fake = sys.modules.get(name_of)
        if fake is None or fake not in fakes:
            fake = types.ModuleType(name_of)
            fakes.append(fake)

        def function(*arguments: Any, name: str = name, **_: Any) -> list[Any]:
            seen.append((name, *arguments))
            return []

        setattr(fake, name, function)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    serve = types.ModuleType("megatrain.train.report.serve")
    serve.__dict__.update(RunServer=MagicMock())
    monkeypatch.setitem(sys.modules, serve.__name__, serve)
    importing = types.ModuleType("megatrain.config.foreign.importing")
    importing.__dict__.update(import_file=MagicMock(side_effect=typer.Exit))  # or a file would be written
    monkeypatch.setitem(sys.modules, importing.__name__, importing)
    doctor = types.ModuleType("megatrain.doctor")
    report = types.SimpleNamespace(machine=None, text=str, json=dict, exit_code=lambda strict: 0, save=str)
    doctor.__dict__.update(
        examine=lambda *_, **__: report, keep=None, this_machine=lambda *_: load_machine("cpu-laptop")
    )
    monkeypatch.setitem(sys.modules, "megatrain.doctor", doctor)
    fits = types.SimpleNamespace(fits=True)
    planned = types.SimpleNamespace(plan=fits, space=None, verdict=types.SimpleNamespace(exit_code=0))
    monkeypatch.setattr(
        sys.modules["megatrain.train.planning.plan_run"], "plan_run", lambda *_, **__: planned
    )
    monkeypatch.setattr(
        sys.modules["megatrain.train.planning.scale"], "plan_scale", lambda *_, **__: planned.plan
    )
    longest = types.SimpleNamespace(planned=planned)
    monkeypatch.setattr(
        sys.modules["megatrain.train.planning.longest.find"], "find_longest", lambda *_, **__: longest
    )
    return seen


@pytest.mark.parametrize("path", CONFIGS, ids=page_name)
def test_config_loads_and_has_only_relative_paths(path: Path) -> None:
    config = load_config(path)
    for place in (config.model.path, config.out, *(source.path for source in config.data.sources)):
        assert not Path(place).is_absolute(), place


def test_there_is_a_config_for_fine_tuning_and_one_for_pre_training() -> None:
    assert {load_config(path).model.init for path in CONFIGS} == {"pretrained", "random"}


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: page_name(value) or " ".join(value))
def test_command_parses(
    page: Path,
    words: list[str],
    called: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The real command line, with its library calls replaced; a run gets its checked settings."""
    monkeypatch.chdir(tmp_path)
    for run in ("runs/mine", "RUN"):
        (tmp_path / run).mkdir(parents=True)
        shutil.copy(recipes()["finetune"], tmp_path / run / "config.yaml")
    (tmp_path / "my.jsonl").write_text('{"text": "looked at by data inspect"}')
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    if words[0] == "train" and "--plan-only" not in words:  # which is a plan
        assert isinstance(called[0][1], Config)


def test_every_command_is_shown_in_the_readme() -> None:
    assert {words[0] for page, words in COMMANDS if page.name == "README.md"} >= {"train", "sample", "export"}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {words[0] for words in commands(page, "make")}
    shown |= {span.split()[1] for span in code_spans(page) if re.fullmatch(r"make [a-z]+", span)}
    assert shown <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_setting_exists(page: Path) -> None:
    """A code span that looks like `section.key` or `section.key=value` is a setting."""
    keys = set(config_keys())
    sections = "|".join(key.partition(".")[0] for key in keys if "." in key)
    for span in code_spans(page):
        match = re.fullmatch(rf"((?:{sections})\.[a-z_]+)(?:=.*)?", span)
        if match and not match[1].endswith((".yaml", ".json", ".jsonl", ".py")):
            assert match[1] in keys, span


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert there.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_yaml_block_is_a_part_of_a_configuration(page: Path) -> None:
    for number, block in enumerate(blocks(page, "yaml"), start=1):
        needed = {"model": {"path": "DIR"}, "data": {"path": "my.txt"}}
        build_config({**needed, **parse_yaml(block, source=page.name)}, source=f"{page.name} block {number}")


def test_reference_of_commands_is_what_they_say() -> None:
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert page == cli_page(), "renew it: make pages"
    assert {"train", "runs compare", "ui", "import"} <= set(re.findall(r"^## (.*)$", page, re.MULTILINE))


def test_names_of_the_trainers_in_the_pages_exist() -> None:
    named = {
        alias.name
        for page in PAGES
        for block in blocks(page, "python")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and node.module == "megatrain.hf"
        for alias in node.names
    }
    assert "StreamingSFTTrainer" in named
    assert named <= set(megatrain_hf.__all__)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_block_compiles(page: Path) -> None:
    for number, block in enumerate(blocks(page, "python"), start=1):
        compile(block, f"{page.name} block {number}", "exec")


def test_calls_in_the_pages_fit_the_api() -> None:
    """Names are exported, and arguments are those of the functions."""
    unbound = object()
    functions: dict[str, tuple[Any, tuple[object, ...]]] = {
        "megatrain.load": (megatrain.load, ()),
        "megatrain.attach": (megatrain.attach, ()),
        "engine.adamw": (megatrain.Engine.adamw, (unbound,)),
        "engine.forward_backward": (megatrain.Engine.forward_backward, (unbound,)),
    }
    seen = set()
    pages = (ROOT / "README.md", ROOT / "docs/python.md")
    for block in (block for page in pages for block in blocks(page, "python")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "megatrain":
                assert node.attr in megatrain.__all__
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "engine":
                assert node.attr in members()["Engine"], node.attr
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in functions:
                given = {str(keyword.arg): None for keyword in node.keywords}
                function, own = functions[name]
                inspect.signature(function).bind(*own, *[None] * len(node.args), **given)
                seen.add(name)
    assert seen == set(functions)


def test_exit_codes_are_all_there() -> None:
    def codes(kind: type[MegatrainError]) -> Iterator[int]:
        yield kind.exit_code
        for inner in kind.__subclasses__():
            yield from codes(inner)

    listed = prose(ROOT / "docs/training.md").partition("## Exit codes")[2]
    shown = re.findall(r"^\| (\d+) \| ", listed, re.MULTILINE)
    assert {int(code) for code in shown} == {0, 1, EXIT_STOPPED, *codes(MegatrainError)}
    headings = re.findall(r"^## (\d+): ", prose(ROOT / "docs/troubleshooting.md"), re.MULTILINE)
    assert {int(code) for code in headings} == {int(code) for code in shown} - {0}


def test_memory_table_is_right() -> None:
    rows = re.findall(r"^\| (\d+) B \| (.*) \|$", prose(ROOT / "docs/memory.md"), re.MULTILINE)
    assert len(rows) == 4
    for billions, cells in rows:
        assert cells == " | ".join(f"{int(billions) * nbytes:,} GB" for nbytes in (12, 14, 16))


def test_worked_program_is_what_the_code_prints() -> None:
    page = ROOT / "docs/design.md"
    (example,) = (block for block in blocks(page, "python") if "step_program(" in block)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue() in blocks(page, "text")


def test_loop_in_the_design_is_the_loop_s() -> None:
    loop = (ROOT / "megatrain/train/step.py").read_text(encoding="utf-8")
    (shown,) = (block for block in blocks(ROOT / "docs/design.md", "python") if "run.loader" in block)
    code = " ".join(loop.split())
    for part in shown.split("\n\n"):
        assert " ".join(part.split()) in code


@functools.cache
def members() -> dict[str, set[str]]:
    """Collect the classes of the package, each with the names that it defines or sets on itself."""
    found: dict[str, set[str]] = {}
    for file in (ROOT / "megatrain").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef):
                continue
            names = found.setdefault(node.name, set())
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef):
                    names.add(inner.name)
                elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "self":
                    names.add(inner.attr)
                elif isinstance(inner, (ast.Assign, ast.AnnAssign)):
                    targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
                    names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_names_and_files_of_the_code_exist(page: Path) -> None:
    """`Class.member`, `Class.member(...)`, `test_name` and paths of the repository."""
    classes = members()
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    for span in code_spans(page):
        if match := re.match(r"(_?[A-Z][A-Za-z]+)\.(\w+)\b", span):
            if match[1] in classes:
                assert match[2] in classes[match[1]], span
        elif re.fullmatch(r"test_\w+", span):
            assert f"def {span}(" in tests, span
        elif re.fullmatch(r"(megatrain|tests|benchmarks|docs)/[\w/]+\.\w+", span):
            is_example = page.name == "CONTRIBUTING.md" and span.startswith("tests/store/")
            assert is_example or (ROOT / span).exists(), span


def test_functions_that_the_design_names_exist() -> None:
    """A bare name with an underscore or a capital inside is one of the code's or the tests'."""
    sources = [file for folder in ("megatrain", "tests") for file in (ROOT / folder).rglob("*.py")]
    words = set(re.findall(r"\w+", "".join(file.read_text(encoding="utf-8") for file in sources)))
    named = {
        match[1]
        for span in code_spans(ROOT / "docs/design.md")
        if (match := re.fullmatch(r"(\w+)(\(.*)?", span)) and re.search(r"_|.[A-Z]", match[1])
    }
    assert {"find_blocks", "train_step"} <= named
    assert named <= words
