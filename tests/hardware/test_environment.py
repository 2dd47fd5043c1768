"""What libraries read when they start: the command sets it, and the engine warns where it is not set."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from megatrain.errors import warn_once
from megatrain.hardware.determinism import in_full
from megatrain.hardware.environment import set_for_runs, warn_of_unset

NAMES = ("PYTORCH_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS")
CUDA = torch.device("cuda")


def test_what_the_user_has_not_set_is_set() -> None:
    found: dict[str, str] = {}
    set_for_runs(found)
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_has_set_stays(name: str) -> None:
    found = {name: "max_split_size_mb:512", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    held = dict(found)
    set_for_runs(found)
    assert found == held


def test_the_command_sets_it_before_torch_is_there() -> None:
    code = (
        "import json, os, sys; from megatrain.cli import main\n"
        "import megatrain.cli.commands as commands\n"
        "commands.app = lambda **_: print(json.dumps([os.environ.get(n) for n in sys.argv[1:]] "
        "+ ['torch' in sys.modules]))\n"
        "main(['train'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", code, *NAMES]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert json.loads(ended.stdout) == ["expandable_segments:True", "32", False]


def test_the_engine_warns_of_what_it_cannot_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "megatrain"):
        warn_of_unset(torch.device("cpu"))
        assert caplog.text == ""
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        warn_of_unset(CUDA)
    assert "no PYTORCH_ALLOC_CONF=expandable_segments:True, with which" in caplog.text
    assert "MAX_CONNECTIONS" not in caplog.text


@pytest.mark.parametrize("way", ["older", "newer"])
def test_fp32_is_computed_in_full_whatever_the_process_is_set_to(way: str) -> None:
    """TF32 would round the factors to 10 bits; afterwards the setting is the user's again.

    torch's compiler reads the older switch, and torch refuses to where only the newer one was set.
    """
    of_cudnn: Any = torch.backends.cudnn
    libraries: list[Any] = [torch.backends.cuda.matmul, of_cudnn]
    switches: list[Any] = [torch.backends.cuda.matmul, of_cudnn.conv, of_cudnn.rnn]
    held = [switch.fp32_precision for switch in switches], [library.allow_tf32 for library in libraries]
    try:
        for library in libraries if way == "older" else ():
            library.allow_tf32 = True
        for switch in switches:
            switch.fp32_precision = "tf32"
        with in_full(CUDA), in_full(CUDA):
            assert [switch.fp32_precision for switch in switches] == ["ieee"] * 3
            assert [library.allow_tf32 for library in libraries] == [False, False]
        assert [switch.fp32_precision for switch in switches] == ["tf32"] * 3
        if way == "older":
            assert [library.allow_tf32 for library in libraries] == [True, True]
    finally:
        for library, allowed in zip(libraries, held[1], strict=True):
            library.allow_tf32 = allowed
        for switch, precision in zip(switches, held[0], strict=True):
            switch.fp32_precision = precision
