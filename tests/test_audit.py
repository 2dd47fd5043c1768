"""The audit of packages names what is known, and never fails for want of a network."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tests import audit

CLEAN = (
    '{"dependencies": [{"name": "torch", "version": "2.13", "vulns": []}, '
    '{"name": "megatrain", "skip_reason": "x"}]}'
)
FOUND = (
    '{"dependencies": [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}, '
    '{"id": "CVE-2", "fix_versions": []}]}], "fixes": []}'
)


@pytest.mark.parametrize(
    ("out", "error", "code", "said"),
    [
        (
            CLEAN,
            "No known vulnerabilities found",
            0,
            "audit: no fault is known of 1 packages; 1 are not in the index\n",
        ),
        (
            FOUND,
            "Found 2",
            1,
            "audit: a 1 has CVE-1; mended in 2\naudit: a 1 has CVE-2; mended in no version yet\n",
        ),
        (
            CLEAN.replace('"vulns": []', '"skip_reason": "x"'),
            "",
            0,
            "skipped, since the index knows none of 2 packages\n",
        ),
        ("", "log\nNo module named pip_audit", 0, "an index (No module named pip_audit)\n"),
        ("", "", 0, "audit: skipped, since pip-audit could not ask an index (it said nothing)\n"),
        ("[]", "ConnectionError: pypi.org", 0, "(ConnectionError: pypi.org)\n"),
    ],
)
def test_what_is_known_is_told_and_no_network_is_no_failure(
    out: str,
    error: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = subprocess.CompletedProcess(audit.COMMAND, 1, stdout=out, stderr=error)
    monkeypatch.setattr(audit.subprocess, "run", lambda *_, **__: done)
    assert audit.audit() == code
    assert capsys.readouterr().out.endswith(said)


def test_an_index_that_does_not_answer_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("pip_audit", 1)

    monkeypatch.setattr(audit.subprocess, "run", late)
    assert audit.audit() == 0
    assert capsys.readouterr().out == "audit: skipped, since the index did not answer in time\n"
