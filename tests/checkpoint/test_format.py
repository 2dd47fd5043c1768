from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import pytest
import xxhash

from megatrain.checkpoint import format

DIGEST = "0123456789abcdef" * 2
MANIFEST = format.Manifest(
    step=150,
    meta={"rng": {"words": "AAA="}, "cursor": [1, 2.5, None, True], "loss": 0.1 + 0.2, "name": "\u00fc"},
    files=(
        format.FileEntry(name="deep/moments", num_bytes=format.CHUNK_BYTES + 1, digests=(DIGEST, DIGEST)),
        format.FileEntry(name="empty", num_bytes=0, digests=()),
    ),
    chunk_bytes=format.CHUNK_BYTES,
)


def seal(body: Any) -> bytes:
    """Encode any value with a digest that holds, as a hostile or a later writer could."""
    head = json.dumps(body, indent=1).removesuffix("\n}").encode()
    return head + f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()


def test_manifest_comes_back_equal() -> None:
    data = format.encode_manifest(MANIFEST)
    assert format.parse_manifest(data) == MANIFEST
    assert format.encode_manifest(format.parse_manifest(data)) == data


def test_every_flipped_bit_and_every_truncation_is_refused() -> None:
    data = format.encode_manifest(MANIFEST)
    for index in range(len(data)):
        with pytest.raises(format.FormatError):
            format.parse_manifest(data[:index])
        for bit in range(8):
            with pytest.raises(format.FormatError, match=r"MANIFEST\.json") as error:
                format.parse_manifest(data[:index] + bytes([data[index] ^ 1 << bit]) + data[index + 1 :])
            assert not isinstance(error.value, format.NewerFormatError)
    with pytest.raises(format.FormatError):
        format.parse_manifest(data + b"\n")


def test_random_bytes_are_refused() -> None:
    chance = random.Random(0)
    for _ in range(2000):
        with pytest.raises(format.FormatError):
            format.parse_manifest(chance.randbytes(chance.randrange(200)))


def test_newer_version_is_refused_as_newer() -> None:
    with pytest.raises(format.NewerFormatError, match="format version 2, and this megatrain reads 1"):
        format.parse_manifest(seal({"format": 2, "anything": []}))


@pytest.mark.parametrize(
    "name", ["../weights", "a/../../b", "/etc/passwd", "", ".", "a//b", "a/", "MANIFEST.json", "a\0b"]
)
def test_name_that_leaves_the_checkpoint_is_refused(name: str) -> None:
    body = {"format": 1, "step": 1, "chunk_bytes": 64, "meta": {}}
    files = [{"name": name, "bytes": 0, "xxh3_128": []}]
    with pytest.raises(format.FormatError, match="not a relative name"):
        format.parse_manifest(seal({**body, "files": files}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("format", 0),
        ("format", True),
        ("format", "1"),
        ("step", -1),
        ("step", 1.0),
        ("chunk_bytes", 0),
        ("meta", []),
        ("files", {}),
        ("files", [1]),
        ("files", [{"name": "a", "bytes": 1, "xxh3_128": []}]),
        ("files", [{"name": "a", "bytes": -1, "xxh3_128": []}]),
        ("files", [{"name": "a", "bytes": 1, "xxh3_128": ["x"]}]),
        ("files", [{"name": "a", "bytes": 1, "xxh3_128": [1]}]),
        ("files", [{"name": "a", "bytes": 1, "xxh3_128": [DIGEST, DIGEST]}]),
        ("files", [{"name": "a", "bytes": 0, "xxh3_128": [], "more": 1}]),
        ("files", [{"name": "a", "bytes": 0, "xxh3_128": []}] * 2),
        ("more", 1),
    ],
)
def test_member_of_another_type_or_value_is_refused(key: str, value: Any) -> None:
    body: dict[str, Any] = {"format": 1, "step": 1, "chunk_bytes": 64, "meta": {}, "files": []}
    assert format.parse_manifest(seal(body)).step == 1
    with pytest.raises(format.FormatError):
        format.parse_manifest(seal({**body, key: value}))


def test_deep_nesting_is_refused() -> None:
    head = b'{"format": ' + b"[" * 100_000
    tail = f',\n "digest": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode()
    with pytest.raises(format.FormatError, match="not JSON"):
        format.parse_manifest(head + tail)


def test_meta_that_is_just_not_too_deep_to_parse_is_refused() -> None:
    """Python's limit counts frames: 600 deep is parsed, and a function that walks it may fail."""
    for depth, is_taken in ((98, True), (99, False), (600, False)):
        meta = {"deep": json.loads("[" * depth + "1" + "]" * depth)}
        data = format.encode_manifest(format.Manifest(step=1, meta=meta, files=(), chunk_bytes=1))
        if is_taken:
            assert format.parse_manifest(data).meta == meta
        else:
            with pytest.raises(format.FormatError, match="more than 100 deep"):
                format.parse_manifest(data)


@pytest.mark.parametrize("meta", [{"pair": (1, 2)}, {"by_step": {1: "a"}}])
def test_meta_that_would_come_back_different_is_our_mistake(meta: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="plain JSON values"):
        format.encode_manifest(format.Manifest(step=1, meta=meta, files=(), chunk_bytes=1))


def test_directory_names() -> None:
    assert format.directory_name(150) == "step-00000150"
    for step, attempt in ((0, 1), (150, 1), (150, 2), (123_456_789_012, 11)):
        name = format.directory_name(step, attempt)
        assert format.parse_directory_name(name) == (step, attempt)
        assert format.is_leftover(format.temporary_name("tmp", name, "0123abcd"))
        assert not format.is_leftover(name)
    for name in (
        "step-150",
        "step-00000150-1",
        "step-00000150-02",
        "step-000000150",
        "step-0000015x",
        "step-00000150\n",
    ):
        assert format.parse_directory_name(name) is None


def test_finding_and_saving_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from megatrain.checkpoint import tensor_files, format, load, rng, save; "
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
