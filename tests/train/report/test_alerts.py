"""A webhook is told of what was asked for, and a run is none the worse for one that does not answer."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from megatrain.train.report import alerts
from megatrain.train.report.alerts import Alerts

Received = list[dict[str, Any]]


@pytest.fixture
def server() -> Iterator[tuple[str, Received]]:
    """A webhook, and what it has received."""
    received: Received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{made.server_address[1]}/hook", received
    made.shutdown()
    thread.join()
    made.server_close()


def row(event: str, step: int, **values: Any) -> dict[str, Any]:
    return {"event": event, "time": 5.0, "step": step, **values}


def test_only_asked_for_events_arrive_in_order_and_before_the_end(server: tuple[str, Received]) -> None:
    address, received = server
    with Alerts(address, ("evaluation", "error"), run="mine") as told:
        told.tell(row("start", 0))
        told.tell(row("evaluation", 8, name="val", loss=2.5))
        told.tell(row("checkpoint", 8))
        told.tell(row("error", 9, text="no space", exit_code=2))
    assert [message["event"] for message in received] == ["evaluation", "error"]
    assert received[0] | {"content": ""} == {
        "text": "mine: evaluation at step 8: name val, loss 2.5",
        "content": "",
        "run": "mine",
        **row("evaluation", 8, name="val", loss=2.5),
    }
    assert received[1]["content"] == "mine: error at step 9: no space; exit_code 2"


@pytest.mark.parametrize("is_an_address", [True, False])
def test_webhook_that_refuses_is_one_warning_without_its_secret(
    caplog: pytest.LogCaptureFixture, is_an_address: bool
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/secret"
    address = address if is_an_address else "http://[secret/"
    with caplog.at_level(logging.WARNING, logger="megatrain"), Alerts(address, ("end",), run="mine") as told:
        told.tell(row("end", 1))
        told.tell(row("end", 2))
    assert len(caplog.messages) == 1
    host = "http://127.0.0.1" if is_an_address else "an address"
    assert caplog.messages[0].startswith(f"log.webhook: {host} was not told (")
    assert "secret" not in caplog.text


def test_webhook_that_hangs_holds_up_neither_step_nor_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "TIMEOUT_S", 0.3)
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began_s = time.monotonic()
        with Alerts(f"http://127.0.0.1:{silent.getsockname()[1]}/", ("end",), run="mine") as told:
            for step in range(50):
                told.tell(row("end", step))
        assert time.monotonic() - began_s < 10  # 50 timeouts one after the other are 15 s


def test_nobody_is_told_without_an_address() -> None:
    threads = threading.active_count()
    with Alerts(None, ("end",), run="mine") as told:
        told.tell(row("end", 1))
        assert threading.active_count() == threads
