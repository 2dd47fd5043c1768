"""One number of rows says what others take: counts of several sizes from one run are those of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from megatrain.model.profile.anatomy import Anatomy
from megatrain.model.profile.anatomy_cache import anatomy_json
from megatrain.model.profile.count import alike, count_anatomy, count_sizes
from megatrain.model.profile.rows import Rows, most, of_size, prime_beside
from tests.families import FAMILIES

SHARED = Path(__file__).parents[4] / "shared/data/configs"
SIZES = [1, 2, 4, 8, 16, 32, 64]


def differing(left: Anatomy, right: Anatomy) -> list[str]:
    """Return the names of what two counts differ in."""
    first, second = anatomy_json(left), anatomy_json(right)
    assert first.keys() == second.keys()
    return [name for name in first if first[name] != second[name]]


def check(config: PretrainedConfig, sizes: list[int], **shape: Any) -> None:
    found = count_sizes(config, sizes=sizes, **shape)
    for size, anatomy in zip(sizes, found, strict=True):
        assert anatomy.micro_batch_size == size
        assert not differing(anatomy, count_anatomy(config, micro_batch_size=size, **shape)), size


IN_CHUNKS = {"seq_len": 32, "precision": "bf16", "head_chunk_tokens": 16, "is_packed": True}
WHOLE = {"seq_len": 32, "precision": "fp32", "device_type": "cpu"}
"""How the head passes."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "shape"), [("mixtral", IN_CHUNKS), ("llama", WHOLE)])
def test_counts_of_several_sizes_are_those_of_each(name: str, shape: dict[str, Any]) -> None:
    check(FAMILIES[name](), [4, 64], **shape)


@pytest.mark.parity
@pytest.mark.parametrize("name", FAMILIES)
def test_counts_of_every_size_are_those_of_each(name: str) -> None:
    for shape in (IN_CHUNKS, WHOLE):
        check(FAMILIES[name](), SIZES[1:], **shape)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs configs in shared/data next to the repository")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=[] if path.name == "Llama-3.1-8B" else [pytest.mark.parity])
        for path in (sorted(SHARED.iterdir()) if SHARED.is_dir() else [])
    ],
)
def test_counts_of_a_published_model_are_those_of_each(name: str) -> None:
    config = AutoConfig.from_pretrained(SHARED / name)
    (sizes,) = (group for group in alike(config, SIZES, seq_len=4096) if len(group) > 1)
    check(config, [sizes[0], sizes[-1]], seq_len=4096, precision="bf16")


def test_sizes_that_run_other_operations_are_counted_apart() -> None:
    config = FAMILIES["llama"]()
    assert alike(config, SIZES, seq_len=32, head_chunk_tokens=100) == [[1], [2], [4], [8], [16, 32, 64]]
    assert alike(config, SIZES, seq_len=32, head_chunk_tokens=1000) == [[1], [2, 4, 8, 16], [32], [64]]
    assert alike(config, SIZES, seq_len=4096, head_chunk_tokens=1000) == [[1], SIZES[1:]]


def test_what_is_a_multiple_of_the_rows_grows_with_them() -> None:
    prime = prime_beside([67 * 8, 71, 4096])
    assert prime == 73
    rows = Rows(prime, [2, 64])
    assert rows.of(73 * 10).tolist() == [20, 640]
    assert rows.of(4096) == 4096
    peak = most(rows.of(73 * 10), 100, 30)
    assert [of_size({"peak": [peak]}, number) for number in (0, 1)] == [{"peak": [100]}, {"peak": [640]}]
    assert [each.one(73) for each in rows.each()] == [2, 64]


def test_attention_of_many_long_rows_has_more_flops_than_an_integer_holds() -> None:
    """A backward of 64 rows of a million tokens, 16,384 wide: ten products' worth of FLOPs for each pair."""
    each = 10 * (1 << 20) ** 2 * 16_384
    assert each * 64 > 1 << 63
    assert Rows(67, [2, 64]).of(67 * each).tolist() == [2.0 * each, 64.0 * each]
    assert Rows(67, [2]).one(67 * each) == 2 * each
