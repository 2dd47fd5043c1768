"""What `megatrain export` writes: adapters, merged models, shards; and what it sends to a hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.cli import main
from megatrain.errors import OutputError
from megatrain.train.loop import train
from megatrain.train.outputs.export import export_run
from megatrain.train.outputs.push import push
from tests.reference import assert_same_bits
from tests.train.project import make_config
from tests.train.test_adapters import base, config_of  # noqa: F401 - a fixture

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def run(base: Path) -> Path:  # noqa: F811
    """A short run with adapters."""
    sections: dict[str, Any] = {
        "train": {"steps": 2},
        "optim": {"warmup_steps": 0},
        "checkpoint": {"every": 1},
    }
    sections["data"] = {"chat_template": "plain"}
    train(config_of(base, "exported", **sections))
    return base / "exported"


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_adapters_alone_are_what_is_written_by_default(run: Path, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert not {"config.json", "model.safetensors"} & names
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: peft" in card
    assert "Adapters of rank 4 (LoRA). Trained with" in card
    newest, older = tensors_of(tmp_path / "out"), run / "checkpoints/step-00000001"
    export_run(older, tmp_path / "older")
    assert any(
        not torch.equal(tensor, newest[name]) for name, tensor in tensors_of(tmp_path / "older").items()
    )


def test_a_merged_model_stands_alone(run: Path, base: Path, tmp_path: Path) -> None:  # noqa: F811
    import peft

    main_ok(["export", str(run), str(tmp_path / "out"), "--merge", "--max-shard-size", "20KB"])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors.index.json", "tokenizer.json"} <= names
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: transformers" in card
    assert "(LoRA), merged into the base. Trained with" in card
    chat = [{"role": "user", "content": "hello"}]
    told = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    assert told.endswith("### User:\nhello\n### Assistant:\n"), "who uses the model needs its template"
    assert not any("adapter" in name or "partial" in name for name in names)
    assert all(file.stat().st_size < 24_000 for file in (tmp_path / "out").glob("*.safetensors"))
    ids = torch.arange(3, 19)[None]
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(model, run / "hf").eval()(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()(ids).logits
    torch.testing.assert_close(merged, apart, atol=0.05, rtol=0)  # the base is bf16, and so is the sum
    plain = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)(ids).logits
    assert not torch.allclose(plain, apart, atol=0.05)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == 300


def main_ok(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, None)


def test_a_whole_model_is_split_into_other_shards(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"steps": 1}, optim={"warmup_steps": 0})
    train(config)
    export_run(tmp_path / "run", tmp_path / "plain")
    export_run(tmp_path / "run", tmp_path / "shards", max_shard_bytes=40_000)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    plain, shards = tensors_of(tmp_path / "plain"), tensors_of(tmp_path / "shards")
    assert plain.keys() == shards.keys()
    for name, tensor in plain.items():
        assert_same_bits(shards[name], tensor, name)
    assert (tmp_path / "shards/config.json").read_text() == (tmp_path / "plain/config.json").read_text()
    with pytest.raises(Exception, match="has nothing to merge; leave --merge out"):
        export_run(tmp_path / "run", tmp_path / "merged", merges=True)


def test_shards_of_adapters_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="adapters are one file"):
        export_run(run, tmp_path / "out", max_shard_bytes=40_000)
    assert not list(tmp_path.iterdir())


class Hub(BaseHTTPRequestHandler):
    """Stands in for the hub: repositories are made, small files are taken as they are."""

    made: list[dict[str, Any]]
    files: dict[str, str]

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """Answer what the client asks for in an upload."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        answer: Any = {}
        if self.path == "/api/repos/create":
            Hub.made.append(json.loads(body))
            answer = {"url": "https://huggingface.co/org/name"}
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            answer = {
                "files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    Hub.files[line["value"]["path"]] = line["value"]["content"]
            answer = {
                "commitUrl": "https://huggingface.co/org/name/commit/0",
                "commitOid": "0" * 40,
                "pullRequestUrl": None,
            }
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def do_GET(self) -> None:
        """Know of no file."""
        self.send_response(404)
        self.end_headers()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.made, Hub.files = [], {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    inner = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: inner(endpoint=address, token="hf_none"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_push_sends_every_file_with_the_card(run: Path, tmp_path: Path, hub: type[Hub]) -> None:
    export_run(run, tmp_path / "out")
    push(tmp_path / "out", "org/name")
    [made] = hub.made
    assert (made["organization"], made["name"]) == ("org", "name")
    assert made.get("private") is True or made.get("visibility") == "private"
    sent = set(hub.files)
    assert sent == {path.name for path in (tmp_path / "out").iterdir()}
    assert "README.md" in sent


def test_a_hub_that_is_away_leaves_the_model_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OutputError, match=r"HF_HUB_OFFLINE is set.*send it later with: hf upload org/name"):
        push(tmp_path, "org/name")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    inner = huggingface_hub.HfApi
    monkeypatch.setattr(
        huggingface_hub, "HfApi", lambda: inner(endpoint="http://127.0.0.1:9", token="hf_none")
    )
    with pytest.raises(OutputError, match=r"has not taken org/name: .*send it later with"):
        push(tmp_path, "org/name")
    with pytest.raises(Exception, match="give a repository of the hub as org/name"):
        push(tmp_path, "name")
