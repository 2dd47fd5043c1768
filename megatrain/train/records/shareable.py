"""Settings and records that a user may show to others, without addresses of webhooks and home directories.

They are in reports, plans, environments and manifests of checkpoints. `config.yaml` of a run has the settings
as they were given, for this user alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

_Value = TypeVar("_Value")


def shareable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that may be shown: of an address only the host, and `~` for the home directory."""
    log = config.get("log")
    if isinstance(log, Mapping) and log.get("webhook"):
        config = {**config, "log": {**log, "webhook": f"{host_of(str(log['webhook']))}/..."}}
    return without_home(dict(config))


def host_of(address: str) -> str:
    """Return the part of an address that is no secret."""
    with suppress(ValueError):  # the address was written by hand
        parts = urlsplit(address)
        if parts.hostname is not None:
            return f"{parts.scheme}://{parts.hostname}"
    return "an address"


def without_home(value: _Value) -> _Value:
    """Return plain values with `~` in place of the user's home directory in texts."""
    try:
        home = Path.home()
    except RuntimeError:  # a user may have no home, as in some containers
        return value
    names = {str(home), str(home.resolve())} - {"/"}
    if not names:
        return value
    # It must be no part of a longer name: /home/ann is not in /home/anna, and /root is not in /data/root.
    home_alone = rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?![\w-]|\.[\w.-])"
    return _replaced(value, re.compile(home_alone))


def _replaced(value: Any, home: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return home.sub("~", value)
    if isinstance(value, Mapping):
        return {_replaced(key, home): _replaced(each, home) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replaced(each, home) for each in value]
    return value
