"""The examples of docs/huggingface.md run, beside a tiny model and a few rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.hf.setups import tiny, tokenizer
from tests.test_docs import ROOT, blocks

pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")

EXAMPLES = blocks(ROOT / "docs/huggingface.md", "python")


@pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning"
)  # TRL sets it
@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")  # Trainer's default, on a CPU
@pytest.mark.parametrize(
    "number",
    [
        number if number == len(EXAMPLES) - 1 else pytest.param(number, marks=pytest.mark.parity)
        for number in range(len(EXAMPLES))
    ],
)
def test_example_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny().save_pretrained("path/to/model")
    tokenizer().save_pretrained("path/to/model")
    rows = [{"prompt": f"{n} {n + 1}", "completion": f" {n + 2} {n + 3} {n + 4}"} for n in range(3, 19)]
    pairs = [{**row, "chosen": row["completion"], "rejected": " 3 4"} for row in rows]
    for name, lines in (("train.jsonl", rows), ("pairs.jsonl", pairs)):
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    # What the page says to add on a machine without a GPU.
    arguments = r'(SFTConfig|DPOConfig|GRPOConfig|TrainingArguments)\(\s*("[^"]+")'
    example = re.sub(arguments, r"\1(\2, use_cpu=True", EXAMPLES[number])
    exec(compile(example, f"example {number}", "exec"), {})
