"""What is asked of the Hugging Face hub, and how often, where nobody answers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from megatrain import hub
from megatrain.data.read.arrow_rows import hub_revision, read_hub
from megatrain.data.read.files import is_of_hub
from megatrain.data.tokenizer import load_tokenizer
from megatrain.errors import DataError, MegatrainError, ModelError
from megatrain.hub import is_hub_reached, may_be_on_hub
from megatrain.model.weights.files import model_directory
from megatrain.model.weights.skeleton import read_config
from megatrain.stream.attach.load import load
from megatrain.train.outputs.sample import sample

NEVER = ("/no/model", "./model", "../model", "~/model", "a/b/c", "runs/mine", "runs", "", "-x", "a b")
PERHAPS = ("gpt2", "org/name", "org/name-7B_v1.5", "other/mine")

ASKS: dict[str, Callable[[str], object]] = {
    "configuration": read_config,
    "weights": model_directory,
    "model": load,
    "tokenizer": load_tokenizer,
    "sample": lambda name: sample(name, "Once"),
    "rows": lambda name: list(read_hub(name)),
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory with runs, and a process that has asked nobody yet."""
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    is_hub_reached.cache_clear()
    hub_revision.cache_clear()
    yield
    is_hub_reached.cache_clear()
    hub_revision.cache_clear()


@pytest.fixture(params=["closes", "is silent"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[socket.socket]]:
    """Stand for a hub that takes connections and answers none; return those that it got."""
    taken: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                taken.append(connection)
                if request.param == "closes":
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(hub, "_WAIT_S", 0.2)
        yield taken
        server.shutdown(socket.SHUT_RDWR)
        for connection in taken:
            connection.close()


def test_a_mistyped_path_is_no_name_of_the_hub() -> None:
    assert [name for name in NEVER if may_be_on_hub(name)] == []
    assert [name for name in PERHAPS if not may_be_on_hub(name)] == []
    assert not may_be_on_hub(Path("org/name"))
    assert not is_of_hub("runs/mine")
    assert is_of_hub("org/name")


@pytest.mark.parametrize("ask", [name for name in ASKS if name != "rows"])
def test_nobody_is_asked_for_a_path(ask: str, calls: list[socket.socket]) -> None:
    for name in ("runs/mine", "./model", "~/model"):
        with pytest.raises(MegatrainError, match=r"not a directory|does not exist|no model directory"):
            ASKS[ask](name)
    assert calls == []


def test_a_hub_that_does_not_answer_is_asked_once(calls: list[socket.socket]) -> None:
    """Whatever of a model or of data is asked for."""
    for what, ask in ASKS.items():
        with pytest.raises(DataError if what == "rows" else ModelError, match="was not reached") as caught:
            ask("org/name")
        assert "org/name is no local directory, and" in str(caught.value)
        assert "\n" not in str(caught.value)
    until_s = time.monotonic() + 30
    while not calls and time.monotonic() < until_s:  # a connection may wait for the thread that takes it
        time.sleep(0.01)
    assert len(calls) == 1
