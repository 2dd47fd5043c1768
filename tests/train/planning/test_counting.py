"""Counts are kept: a model that was counted once is planned without torch, by the same numbers."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from megatrain.config import build_config
from megatrain.model.profile import anatomy_cache
from megatrain.model.profile import count as counting_code
from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.anatomy_cache import anatomy_json, key_of, read_anatomy
from megatrain.model.weights.skeleton import read_config
from megatrain.train.planning import counting
from megatrain.train.planning.counting import PlannedModel, count_once, shape_of
from tests.families import FAMILIES
from tests.forks import run_script
from tests.plan.anatomies import llama_like
from tests.train.project import decided

CONFIG = decided(
    build_config(
        {"model": {"path": "none"}, "data": {"path": "none", "seq_len": 64}, "train": {"precision": "bf16"}}
    )
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    FAMILIES["llama"]().save_pretrained(folder)
    return folder


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was counted, in closed form."""
    seen: list[dict[str, Any]] = []

    def count(config: object, **shape: Any) -> Anatomy:
        seen.append(shape)
        return llama_like(**{key: shape[key] for key in ("micro_batch_size", "seq_len", "precision")})

    monkeypatch.setattr(counting_code, "count_anatomy", count)
    monkeypatch.setattr(counting, "_COUNTED", {})
    return seen


def planned(place: Path, tmp_path: Path) -> PlannedModel:
    return PlannedModel(str(place), tmp_path / "cache" / "counts", lambda doing: None)


def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_COUNTED", {})


def values(anatomy: Anatomy) -> dict[str, Any]:
    """Anatomies are equal if they are one; what is in them can be compared."""
    return {name: getattr(anatomy, name) for name in Anatomy.__dataclass_fields__}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_kept_count_is_the_count(family: str) -> None:
    model_config = FAMILIES[family]()
    anatomy = count_once(model_config, shape_of(CONFIG, "cuda"))
    body = json.loads(json.dumps(anatomy_json(anatomy)))
    assert values(read_anatomy(body)) == values(anatomy)
    assert len(body["kinds"]) < len(anatomy.layers), "layers that are alike are written once"


def test_a_copy_of_a_model_is_not_counted_again(
    model: Path, tmp_path: Path, counted: list[dict[str, Any]]
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    first, again = (count_once(read_config(place), shape_of(CONFIG, "cuda")) for place in (model, copy))
    assert again is first
    assert len(counted) == 1


def test_packed_rows_are_counted_as_such(
    model: Path, tmp_path: Path, counted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the data turned out to be goes before what was asked for."""
    asked = {**CONFIG.model_dump(), "data": {**CONFIG.data.model_dump(), "packing": "best_fit"}}
    for config, packing, is_packed in (
        (CONFIG, None, False),
        (CONFIG, "best_fit", True),
        (CONFIG.model_validate(asked), None, True),
        (CONFIG.model_validate(asked), "pad", False),
    ):
        anew(monkeypatch)
        counted.clear()
        folder = tmp_path / f"{packing}-{is_packed}"
        PlannedModel(str(model), folder, lambda doing: None, packing=packing).count(config, "cuda")
        assert [shape.get("is_packed", False) for shape in counted] == [is_packed]


@pytest.mark.parametrize("attention", ["varlen", None])
def test_attention_within_documents_is_counted_by_their_length(
    model: Path, tmp_path: Path, counted: list[dict[str, Any]], attention: str | None
) -> None:
    """A mask covers whole rows, however long the documents are."""
    settings = CONFIG.model_dump()
    settings["model"]["attn_implementation"] = attention
    config = CONFIG.model_validate(settings)
    shape: dict[str, Any] = {"packing": "best_fit", "document_len": 16}
    PlannedModel(str(model), tmp_path / "kept", lambda doing: None, **shape).count(config, "cpu")
    assert [shape.get("document_len") for shape in counted] == [16 if attention else None]


def test_a_model_is_counted_once(
    model: Path, tmp_path: Path, counted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(model, tmp_path).count(CONFIG, "cuda")
    anew(monkeypatch)
    second = planned(model, tmp_path).count(CONFIG, "cuda")
    assert values(first) == values(second)
    assert len(counted) == 1


@pytest.mark.parametrize("changed", ["seq_len", "precision", "device_type", "config", "torch", "source"])
def test_what_a_count_depends_on_makes_another(
    model: Path,
    tmp_path: Path,
    counted: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    changed: str,
) -> None:
    planned(model, tmp_path).count(CONFIG, "cuda")
    anew(monkeypatch)
    options: dict[str, Any] = {"seq_len": 32, "precision": "fp32"}
    options = {key: value for key, value in options.items() if key == changed}
    if changed == "config":
        file = model / "config.json"
        file.write_text(file.read_text().replace('"vocab_size": 128', '"vocab_size": 256'))
    if changed in ("torch", "source"):
        code = {**anatomy_cache._code(), changed: "another"}
        monkeypatch.setattr(anatomy_cache, "_code", lambda: code)
    planned(model, tmp_path).count(CONFIG, "cpu" if changed == "device_type" else "cuda", **options)
    assert len(counted) == 2


def spoil_text(text: str) -> str:
    return text[: len(text) // 2]


def spoil_number(text: str) -> str:
    return text.replace('"num_params":', '"num_params":1', 1)


def spoil_shape(text: str) -> str:
    return "[1, 2]"


def spoil_encoding(text: str) -> str:
    return "\udcff" + text


@pytest.mark.parametrize("spoil", [spoil_text, spoil_number, spoil_shape, spoil_encoding])
def test_a_damaged_entry_is_counted_anew_and_named(
    model: Path,
    tmp_path: Path,
    counted: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Any,
) -> None:
    first = planned(model, tmp_path).count(CONFIG, "cuda")
    anew(monkeypatch)
    (file,) = (tmp_path / "cache" / "counts").glob("*.json")
    file.write_text(spoil(file.read_text()), errors="surrogateescape")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        second = planned(model, tmp_path).count(CONFIG, "cuda")
    assert values(first) == values(second)
    assert len(counted) == 2
    assert str(file) in caplog.text
    anew(monkeypatch)
    planned(model, tmp_path).count(CONFIG, "cuda")
    assert len(counted) == 2, "the entry is whole again"


def test_a_folder_that_cannot_be_written_costs_a_warning(
    model: Path, tmp_path: Path, counted: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        planned(model, tmp_path).count(CONFIG, "cuda")
    assert len(counted) == 1
    assert "cannot be kept" in caplog.text


def test_what_a_count_warns_of_is_said_of_a_kept_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    config: MixtralConfig = FAMILIES["mixtral"]()
    config.output_router_logits = True
    config.save_pretrained(folder)
    monkeypatch.setattr(counting, "_COUNTED", {})
    planned(folder, tmp_path).count(CONFIG, "cuda")
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="megatrain"):
        planned(folder, tmp_path).count(CONFIG, "cuda")
    assert "router loss" in caplog.text


def test_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy_cache, "_MOST_ENTRIES", 3)
    store = anatomy_cache.KeptCounts(tmp_path)
    keys = [key_of(b"{}", number=number) for number in range(5)]
    for key in keys:
        store.save(key, {"value": key})
    assert store.load(keys[-1]) == {"value": keys[-1]}
    assert len(list(tmp_path.iterdir())) == 3


def test_a_plan_of_a_kept_count_loads_neither_torch_nor_transformers(model: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from megatrain.cli import main\n"
        "given = ['train.micro_batch_size=1', 'train.activation_budget=1.0', 'train.compile=off',\n"
        "    'memory.activations=recompute', 'memory.lockstep=1', 'memory.num_slots=2']\n"
        "for machine in (['rtx-4090', '--json'], ['4xrtx-4090']):\n"
        "    try:\n"
        f"        main(['plan', '--model', {str(model)!r}, '--machine', *machine, *given])\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, ended.code\n"
        "heavy = {'torch', 'transformers', 'numba', 'datasets', 'numpy', 'rich'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3])}
    first = run_script(f"import os; os.environ['XDG_CACHE_HOME'] = {str(tmp_path)!r}\n{code}")
    again = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    (first_json, first_ranks), (json_again, ranks_again) = (
        done.stdout.split("\n model ", 1) for done in (first, again)
    )
    outputs = [json.loads(first_json), json.loads(json_again)]
    assert "torch" in first.stderr.splitlines()[-1]
    assert again.stderr.splitlines()[-1] == "[]"
    assert first_ranks == ranks_again
    for same in ("model", "checkpoint_bytes", "batch", "limits"):
        assert outputs[0][same] == outputs[1][same]


def test_a_change_of_the_counting_code_makes_another_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model" / "profile" / "anatomy_cache.py"
    file.parent.mkdir(parents=True)
    policies = tmp_path / "config" / "policies.py"  # what each of them runs again is counted too
    policies.parent.mkdir()
    policies.write_text("")
    monkeypatch.setattr(anatomy_cache, "__file__", str(file))
    keys = []
    for source in ("a = 1\n", "a = 2\n"):
        file.write_text(source)
        anatomy_cache._code.cache_clear()
        keys.append(key_of(b"{}", seq_len=1))
    anatomy_cache._code.cache_clear()
    assert keys[0] != keys[1]
