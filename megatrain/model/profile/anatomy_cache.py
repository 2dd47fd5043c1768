"""Counts of models, kept on disk: a model that was counted once is planned without torch or transformers.

An entry is one JSON file. Its name is a hash of everything that a count depends on: the configuration byte
for byte, the shape of the batch, the versions of what builds and runs the model, and the code that counts.
It is written whole or not at all, holds the hash of what is in it, and one that is damaged is counted anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatrain.errors import OutputError
from megatrain.files import write_bytes_durably
from megatrain.layout.block_bytes import BlockBytes
from megatrain.model.profile.anatomy import Anatomy, CompiledKeep, ExpertsPart, Fragment, LateBytes, Layer
from megatrain.model.profile.cost import Cost
from megatrain.versions import versions_of

_log = logging.getLogger(__name__)

_BUILDERS = (
    "megatrain",
    "torch",
    "transformers",
    "kernels",
    "flash-attn",
    "flash-linear-attention",
    "causal-conv1d",
    "mamba-ssm",
    "liger-kernel",
    "peft",
)
"""Packages whose version, or absence, may change what a model's own modules run."""

_MOST_ENTRIES = 1024


class KeptCounts:
    """A folder of counts."""

    def __init__(self, folder: Path) -> None:
        """Keep counts in a folder; it is made when there is something to keep."""
        self._folder = folder

    def load(self, key: str, *, for_s: float | None = None) -> Any:
        """Return what was kept under a key of `key_of`; None if there is nothing, or it is damaged.

        Args:
            key: The name of the entry.
            for_s: Seconds for which it is good; None: for ever.
        """
        file = self._file(key)
        try:
            if for_s is not None and time.time() - file.stat().st_mtime > for_s:
                return None
            entry = json.loads(file.read_bytes())
            if entry["sha256"] != _hash(_text(entry["body"])):
                raise ValueError("its hash is of something else")
        except FileNotFoundError:
            return None
        except OSError as error:
            _log.warning("%s cannot be read (%s), so the model is counted anew", file, error.strerror)
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            _log.warning("%s is damaged, so the model is counted anew", file)
            return None
        return entry["body"]

    def has(self, key: str) -> bool:
        """Whether something was kept under a key, sound or damaged."""
        return self._file(key).exists()

    def save(self, key: str, body: Any) -> None:
        """Keep plain values under a key; those that were kept first go when there are many."""
        entry = _text({"sha256": _hash(_text(body)), "body": body})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_bytes_durably(self._file(key), entry.encode())
            kept = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for old in kept[:-_MOST_ENTRIES]:
                old.unlink(missing_ok=True)
        except (OSError, OutputError) as error:
            _log.warning(
                "the count of the model cannot be kept in %s (%s); it is made again the next time",
                self._folder,
                getattr(error, "strerror", error),
            )

    def _file(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def key_of(config: bytes, **shape: object) -> str:
    """Return the key of a count: a hash of all that it depends on.

    Args:
        config: The model's config.json.
        shape: The other values that the count depends on, as plain values.
    """
    return _hash(_text({"config": hashlib.sha256(config).hexdigest(), "shape": shape, "code": _code()}))


@cache
def _code() -> dict[str, str]:
    """Return the versions of what builds and runs a model, and a hash of the code that counts it."""
    found = {"python": platform.python_version(), **versions_of(_BUILDERS)}
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    files = [file for folder in ("layout", "model") for file in (root / folder).rglob("*.py")]
    for file in sorted([*files, root / "config" / "policies.py"]):
        source = file.read_bytes()
        digest.update(f"{file.relative_to(root)} {len(source)}\n".encode() + source)
    return {**found, "source": digest.hexdigest()}


def anatomy_json(anatomy: Anatomy) -> dict[str, Any]:
    """Return an anatomy as plain values; layers that differ in nothing but names are written once."""
    values = {name: getattr(anatomy, name) for name in Anatomy.__dataclass_fields__}
    kinds: dict[str, int] = {}
    layers = []
    for layer in anatomy.layers:
        names = [fragment.name for fragment in layer.fragments]
        kind = _text(asdict(replace(layer, fragments=tuple(replace(f, name="") for f in layer.fragments))))
        layers.append([kinds.setdefault(kind, len(kinds)), names])
    return {
        **values,
        "kinds": [json.loads(kind) for kind in kinds],
        "layers": layers,
        "outer": [asdict(fragment) for fragment in anatomy.outer],
        "head_forward": asdict(anatomy.head_forward),
        "head_backward": asdict(anatomy.head_backward),
        "warnings": list(anatomy.warnings),
    }


def read_anatomy(body: Mapping[str, Any]) -> Anatomy:
    """Return the anatomy that `anatomy_json` made these plain values of."""
    values = dict(body)
    kinds = [_layer(kind) for kind in values.pop("kinds")]
    layers = []
    for kind, names in values["layers"]:
        parts = zip(kinds[kind].fragments, names, strict=True)
        layers.append(replace(kinds[kind], fragments=tuple(replace(part, name=name) for part, name in parts)))
    values |= {
        "layers": tuple(layers),
        "outer": tuple(_fragment(part) for part in values["outer"]),
        "head_forward": Cost(**values["head_forward"]),
        "head_backward": Cost(**values["head_backward"]),
        "warnings": tuple(values["warnings"]),
    }
    return Anatomy(**values)


def _layer(raw: Mapping[str, Any]) -> Layer:
    changed = {
        "fragments": tuple(_fragment(part) for part in raw["fragments"]),
        "forward": Cost(**raw["forward"]),
        "backward": Cost(**raw["backward"]),
        "collect_bytes": {policy: tuple(sizes) for policy, sizes in raw["collect_bytes"].items()},
        "made_bytes": tuple(raw["made_bytes"]),
        "compiled": tuple(CompiledKeep(**{**k, "again": Cost(**k["again"])}) for k in raw["compiled"]),
        "again": Cost(**raw["again"]),
        "kept_sizes": tuple(raw["kept_sizes"]),
        "reruns": {policy: Cost(**cost) for policy, cost in raw["reruns"].items()},
        "late": {
            policy: LateBytes(**{**late, "collect_bytes": tuple(late["collect_bytes"])})
            for policy, late in raw["late"].items()
        },
        "experts": None if raw["experts"] is None else _experts(raw["experts"]),
    }
    return Layer(**{**raw, **changed})


def _experts(raw: Mapping[str, Any]) -> ExpertsPart:
    changed = {
        "first": BlockBytes(**raw["first"]),
        "second": BlockBytes(**raw["second"]),
        "widths": tuple(raw["widths"]),
        "main": _fragment(raw["main"]),
        "behind": None if raw["behind"] is None else _fragment(raw["behind"]),
        "beside": _layer(raw["beside"]),
    }
    return ExpertsPart(**{**raw, **changed})


def _fragment(raw: Mapping[str, Any]) -> Fragment:
    return Fragment(**{**raw, "sizes": BlockBytes(**raw["sizes"]), "forward": Cost(**raw["forward"])})


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
