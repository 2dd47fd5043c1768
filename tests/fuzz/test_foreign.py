"""Files of other trainers and lists of data sets of any content are translated or refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random

from megatrain.config.foreign.importing import import_file, import_settings
from megatrain.config.sections.data import DataConfig
from megatrain.config.yaml12 import dump_yaml
from megatrain.data.read.examples import read_examples
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_json, mutated_value

LLAMA_FACTORY = {
    "model_name_or_path": "m",
    "stage": "sft",
    "finetuning_type": "lora",
    "lora_rank": 8,
    "lora_target": "q_proj,v_proj",
    "dataset": "identity,alpaca",
    "template": "llama3",
    "cutoff_len": 2048,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "output_dir": "out",
    "val_size": 0.1,
    "eval_steps": 500,
    "pref_beta": 0.1,
    "report_to": "none",
}
AXOLOTL = {
    "base_model": "m",
    "datasets": [{"path": "a.jsonl", "type": "chat_template", "field_messages": "messages"}],
    "sequence_len": 2048,
    "adapter": "lora",
    "lora_r": 8,
    "lora_target_modules": ["q_proj"],
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "num_epochs": 1,
    "optimizer": "adamw_torch",
    "learning_rate": 2e-4,
    "lr_scheduler": "cosine",
    "warmup_steps": 10,
    "special_tokens": {"pad_token": "<pad>"},
    "bf16": "auto",
    "output_dir": "out",
    "rl": None,
    "val_set_size": 0.05,
}


def translate(folder: Path, random: Random) -> None:
    theirs = random.choice((LLAMA_FACTORY, AXOLOTL))
    if random.random() < 0.1:
        file = folder / "theirs.yaml"
        file.write_bytes(mutated_bytes(random, dump_yaml(theirs).encode()))
        import_file(file).yaml("theirs.yaml")
        return
    changed = mutated_value(random, theirs)
    if isinstance(changed, dict):
        import_settings(changed, source="theirs.yaml").yaml("theirs.yaml")


@counts(sample=1000, soak=50_000)
def test_any_file_of_another_trainer_is_translated_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, partial(translate, tmp_path), tmp_path) > num // 4


ENTRIES = {
    "mine": {"file_name": "rows.jsonl", "columns": {"prompt": "instruction", "response": "output"}},
    "chat": {
        "file_name": "rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations"},
        "tags": {"role_tag": "from", "content_tag": "value"},
        "num_samples": 10,
        "ranking": False,
    },
}


def read_entry(folder: Path, random: Random) -> None:
    (folder / "dataset_info.json").write_bytes(mutated_json(random, ENTRIES))
    path = random.choice((folder, folder / "dataset_info.json"))
    settings = DataConfig(path=str(path), dataset=(random.choice(("mine", "chat")),), seq_len=64)  # type: ignore[arg-type]
    for source in settings.sources:
        assert source.dataset
    list(read_examples(settings))


@counts(sample=1000, soak=50_000)
def test_any_list_of_data_sets_is_read_or_refused(tmp_path: Path, num: int) -> None:
    folder = tmp_path / "inner/most"  # names such as ../.. lead to the directory of the test
    folder.mkdir(parents=True)
    row = {"instruction": "a", "output": "b", "conversations": [{"from": "human", "value": "q"}] * 2}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert attack(num, partial(read_entry, folder), tmp_path) > num // 4
