"""The page that follows a run: what it answers, to whom, and that nothing else can be read."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.train.records.directory import RunDirectory
from megatrain.train.report import serve
from megatrain.train.report.collect import RunFiles, read_run
from megatrain.train.report.page import plotly_file
from megatrain.train.report.serve import LiveData, RunServer
from tests.train.report.browser import drawn, needs_browser
from tests.train.report.run_files import write_run


@contextmanager
def serving(run: Path) -> Iterator[RunServer]:
    with RunServer(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: RunServer, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    own = f"127.0.0.1:{server.port}"
    connection.request(method, path, headers={"Host": own if host is None else host})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


@pytest.fixture(autouse=True)
def _is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REST", 0)


def test_long_history_is_not_read_all_the_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "REST", 4)
    now_s = 0.0
    read: list[float] = []

    def slow_read(path: Path) -> RunFiles:
        nonlocal now_s
        read.append(now_s)
        now_s += 2.0
        return read_run(path)

    monkeypatch.setattr(serve, "read_run", slow_read)
    live = LiveData(run, clock=lambda: now_s)
    first = live.get()
    now_s = 9.9  # 2 s to read, and four times as long to rest
    assert live.get() == first
    now_s = 10.0
    live.get()
    assert read == [0.0, 10.0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs/a")


def test_page_and_data_are_served_and_follow_the_run(run: Path) -> None:
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        status, text = get(server, "/")
        assert status == 200
        assert b"<title>a - megatrain</title>" in text
        assert get(server, "/plotly.js") == (200, plotly_file().read_bytes())
        with RunDirectory(run).lock():
            first = json.loads(get(server, "/data.json")[1])
        assert (first["state"], first["columns"]["step"][-1]) == ("running", 20)
        with open(run / "metrics.jsonl", "a") as file:
            file.write('{"step": 21, "loss": 1.5, "tokens": 21504}\n{"step": 22, "lo')
        later = json.loads(get(server, "/data.json?1")[1])
        assert (later["columns"]["step"][-1], later["columns"]["loss"][-1]) == (21, 1.5)


@pytest.mark.parametrize(
    "path",
    [
        "/../env.json",
        "/%2e%2e/secret",
        "/config.yaml",
        "//etc/passwd",
        "/..%2f..%2fsecret",
        "/plotly.js/../config.yaml",
        "http://127.0.0.1/../secret",
        "/data.json/",
        "/report.html",
    ],
)
def test_nothing_else_is_there(run: Path, path: str) -> None:
    (run.parent / "secret").write_text("mine")
    with serving(run) as server:
        assert get(server, path) == (404, b"nothing here\n")


def test_nothing_is_changed_and_no_other_name_is_answered(run: Path) -> None:
    before = {file: file.read_bytes() for file in run.iterdir()}
    with serving(run) as server:
        assert get(server, "/data.json", host="evil.example:80")[0] == 403
        assert get(server, "/", host="")[0] == 403
        for own in (f"localhost:{server.port}", "localhost", "127.0.0.1"):
            assert get(server, "/data.json", host=own)[0] == 200
        for other in (
            "localhost.evil.example",
            "localhost:",
            "localhost:80@evil.example",
            "[::1]",
            "127.0.0.1:x",
        ):
            assert get(server, "/data.json", host=other)[0] == 403
        for method in ("POST", "PUT", "DELETE"):
            assert get(server, "/", method)[0] == 501
    assert {file: file.read_bytes() for file in run.iterdir()} == before


def test_a_policy_lets_the_page_run_its_own_scripts_alone(run: Path) -> None:
    with serving(run) as server:
        for path in ("/", "/data.json", "/plotly.js", "/nothing"):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("GET", path)
            answer = connection.getresponse()
            page = answer.read().decode()
            connection.close()
            headers = dict(answer.getheaders())
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
            assert (policy["default-src"], policy["frame-ancestors"]) == ("'none'", "'none'")
            if path != "/":
                assert "script-src" not in policy
                continue
            inline = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
            hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
            assert policy["script-src"] == " ".join(["'self'", *(f"'sha256-{each}'" for each in hashes)])
            assert len(hashes) == 2
            assert re.findall(r"<script src=\"([^\"]*)\"", page) == ["plotly.js"]
            assert not re.search(r"\son\w+=|javascript:", page.replace("".join(inline), ""))


def test_who_leaves_in_the_middle_of_an_answer_leaves_no_traceback(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(run) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as left:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                left.sendall(f"GET /plotly.js HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
                left.recv(1)
        assert get(server, "/data.json")[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_run_that_goes_away_is_an_answer_and_no_end(run: Path) -> None:
    with serving(run) as server:
        (run / "config.yaml").rename(run / "moved")
        assert get(server, "/data.json")[0] == 503
        (run / "moved").rename(run / "config.yaml")
        assert get(server, "/data.json")[0] == 200


def test_port_in_use_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(run) as server, pytest.raises(SystemExit) as ended:
        main(["ui", str(run), "--port", str(server.port)])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: port {server.port} of 127.0.0.1 cannot be used (Address already in use)")
    assert error.count("\n") == 1


@pytest.mark.parity  # the page is that of the report, which is drawn in every run of the tests
@needs_browser
def test_browser_draws_the_live_page_at_phone_width(run: Path, tmp_path: Path) -> None:
    with serving(run) as server:
        text = drawn(server.address, tmp_path / "profile", width=400)
    assert 'data-drawn="yes"' in text, text[-3000:]
    assert "CONSOLE" not in text
    assert "<h2>Loss</h2>" in text
