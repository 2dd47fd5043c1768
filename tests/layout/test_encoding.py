"""Weights that are encoded: their places behind the others, as codes on the host and values on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megatrain.layout.blocks import ParameterSpec, lay_out
from megatrain.layout.encoding import PART_ALIGNMENT, Encoding, Part, Scratch
from megatrain.store.block_state import BlockState, decoded, view_entry


@dataclass(frozen=True)
class Halves(Encoding):
    """Bytes, and a number that each is a multiple of."""

    numel: int

    @property
    def parts(self) -> dict[str, Part]:
        return {"codes": Part((self.numel,), torch.uint8), "scale": Part((1,), torch.float32)}

    def decode(self, parts: Mapping[str, Tensor], out: Tensor, scratch: Scratch) -> None:
        out.copy_(parts["codes"].float() * parts["scale"])


def spec(
    name: str, numel: int, dtype: torch.dtype, *, trained: bool = False, kept: bool = False
) -> ParameterSpec:
    encoding = Halves(numel) if kept else None
    return ParameterSpec(name=name, shape=(numel,), dtype=dtype, is_trained=trained, encoding=encoding)


BLOCK = [
    spec("kept fp32", 70, torch.float32, kept=True),
    spec("norm", 10, torch.float32),
    spec("kept", 100, torch.bfloat16, kept=True),
    spec("adapter", 64, torch.bfloat16, trained=True),
]


def test_encoded_weights_come_last_and_the_others_lie_as_without_them() -> None:
    layout, plain = lay_out(BLOCK), lay_out([BLOCK[1], BLOCK[3]])
    assert [entry.name for entry in layout.entries] == ["adapter", "norm", "kept fp32", "kept"]
    assert layout.entries[:2] == plain.entries
    assert layout.plain_bytes == plain.working_bytes == plain.kept_bytes == 2 * 64 + 4 * 64
    assert [entry.byte_offset - layout.plain_bytes for entry in layout.encoded] == [0, 4 * 128]
    assert layout.working_bytes == layout.plain_bytes + 4 * 128 + 2 * 128
    assert [entry.codes_offset for entry in layout.encoded] == [0, 2 * PART_ALIGNMENT]
    assert layout.kept_bytes == layout.plain_bytes + 4 * PART_ALIGNMENT
    assert layout == lay_out(BLOCK)
    assert layout != lay_out([*BLOCK[:2], replace(BLOCK[2], encoding=None), BLOCK[3]])


def test_values_are_made_of_the_bytes_of_their_own_codes() -> None:
    layout = lay_out(BLOCK)
    state = BlockState(layout, torch.zeros(layout.kept_bytes, dtype=torch.uint8))
    for number, entry in enumerate(layout.encoded):
        assert entry.encoding is not None
        views = entry.encoding.views(state.codes[entry.codes_offset :])
        views["codes"].copy_(torch.arange(entry.numel))
        views["scale"].fill_(0.5 + number)
    for number, entry in enumerate(layout.encoded):
        expected = torch.arange(entry.numel) * (0.5 + number)
        assert torch.equal(decoded(state.codes, entry), expected.to(entry.dtype))
        assert torch.equal(state.master(entry), expected.to(entry.dtype).float())
        assert state.weight(entry).is_meta
        with pytest.raises(AssertionError, match="is kept in codes"):
            view_entry(state.working, entry)
    assert not state.weight(layout.entries[0]).any()


def test_what_is_trained_is_not_encoded() -> None:
    with pytest.raises(AssertionError, match="what is encoded is frozen"):
        lay_out([spec("kept", 8, torch.bfloat16, trained=True, kept=True)])
