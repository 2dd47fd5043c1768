"""What codes and scales are as values, against vectors worked by hand and loops over the definitions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from megatrain.errors import ModelError
from megatrain.model.weights.files import checkpoint_files, read_sources
from megatrain.model.weights.quantised import arithmetic
from megatrain.model.weights.quantised.arithmetic import fp4, powers, unpacked
from megatrain.model.weights.quantised.formats import quantisation_of
from megatrain.model.weights.reading import NonFiniteError, open_weights, read_weights

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def read(place: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Write a checkpoint, and return its tensors as a model reads them."""
    place.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"quantization_config": config}))
    return values_of(place)


def values_of(place: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint of one file, in bf16 what is quantised there."""
    files = checkpoint_files(place)
    sources = read_sources(place, files, quantisation_of(place))
    with open_weights(files[0]) as handle:
        return {key: read_weights({files[0]: handle}, source).clone() for key, source in sources.items()}


FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4"}


def test_two_codes_of_a_byte_are_the_low_bits_and_then_the_high_ones() -> None:
    packed = torch.tensor([[0x21, 0xF7], [0x80, 0x09]], dtype=torch.uint8)
    assert fp4(packed).tolist() == [[0.5, 1.0, 6.0, -6.0], [0.0, -0.0, -0.5, 0.0]]
    assert math.copysign(1, fp4(packed)[1, 1].item()) == -1, "minus zero stays"
    every = torch.arange(256, dtype=torch.uint8)
    expected = [
        [(-1) ** (code >> 3) * E2M1[code & 7] for code in (byte & 15, byte >> 4)] for byte in range(256)
    ]
    assert fp4(every[:, None]).tolist() == expected


def test_scales_of_eight_bits_are_powers_of_two() -> None:
    found = powers(torch.arange(256, dtype=torch.uint8)).double()
    assert found[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert found[255].isnan()


def test_mxfp4_is_transposed_blocks_times_powers(tmp_path: Path) -> None:
    """One expert with two outputs and 64 inputs."""
    blocks = torch.zeros((1, 2, 2, 16), dtype=torch.uint8)
    blocks[0, 0, 0, 0] = 0x72  # 1 and 6
    blocks[0, 0, 1, 15] = 0xB0  # 0 and -1.5
    blocks[0, 1, 0, 3] = 0x0F  # -6 and 0
    scales = torch.tensor([[[127, 130], [120, 0]]], dtype=torch.uint8)
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": scales}
    (found,) = read(tmp_path, tensors, MXFP4).items()
    assert found[0] == "mlp.experts.down_proj"
    assert (found[1].shape, found[1].dtype) == ((1, 64, 2), torch.bfloat16)
    values = {(0, 0): 1.0, (1, 0): 6.0, (63, 0): -12.0, (6, 1): -6 / 128}
    expected = torch.zeros(64, 2)
    for place, value in values.items():
        expected[place] = value
    assert found[1][0].tolist() == expected.tolist()


@given(
    seed=st.integers(0, 2**31), experts=st.integers(1, 3), rows=st.integers(1, 5), groups=st.integers(1, 3)
)
@settings(max_examples=20, deadline=None)
def test_any_mxfp4_is_its_definition(
    tmp_path_factory: pytest.TempPathFactory, seed: int, experts: int, rows: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 252, (experts, rows, groups), generator=generator, dtype=torch.uint8)
    tensors = {"x_blocks": blocks, "x_scales": scales}
    found = read(tmp_path_factory.mktemp("mxfp4"), tensors, MXFP4)["x"]
    for expert in range(experts):
        for row in range(rows):
            for column in range(32 * groups):
                byte = int(blocks[expert, row, column // 32, column % 32 // 2])
                code = byte >> 4 if column % 2 else byte & 15
                value = (
                    (-1) ** (code >> 3)
                    * E2M1[code & 7]
                    * 2.0 ** (int(scales[expert, row, column // 32]) - 127)
                )
                assert float(found[expert, column, row]) == value


@pytest.mark.parametrize("kind", ["F32", "BF16", "U8", "F8_E8M0"])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_fp8_has_a_scale_for_each_block_of_which_the_last_are_smaller(
    tmp_path: Path, kind: str, stack: tuple[int, ...]
) -> None:
    """5 x 7 in blocks of 2 x 3: DeepSeek has 576 x 7168 in blocks of 128 x 128."""
    codes = torch.randn((*stack, 5, 7), generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    grid = torch.randint(
        100, 140, (*stack, 3, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
    )
    scales = {
        "F32": grid.float() * 1.2345e-3,
        "BF16": (grid.float() * 1.2345e-3).bfloat16(),
        "U8": grid,
        "F8_E8M0": grid.view(torch.float8_e8m0fnu),
    }[kind]
    config = {**FP8, "weight_block_size": [2, 3]}
    found = read(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scales}, config)["a.weight"]
    factors = torch.exp2(grid.double() - 127).float() if kind in ("U8", "F8_E8M0") else scales.float()
    for place in torch.cartesian_prod(*(torch.arange(size) for size in codes.shape)).tolist():
        *before, row, column = place
        block = (*before, row // 2, column // 3)
        expected = (codes[tuple(place)].float() * factors[block]).bfloat16()
        assert torch.equal(found[tuple(place)], expected), place


@pytest.mark.parametrize(
    ("method", "shape", "scale"),
    [
        ("fp8", (4, 6), torch.tensor(0.5)),
        ("fp8", (4, 6), torch.tensor([0.5])),
        ("fbgemm_fp8", (4, 6), torch.tensor([[0.5], [1.5], [2.5], [3.5]])),
        ("compressed-tensors", (4, 6), torch.tensor([[0.5], [1.5], [2.5], [3.5]])),
        ("modelopt", (4, 6), torch.tensor(0.75)),
        ("fp8", (2, 4, 6), torch.tensor([0.5, 1.5])),
    ],
)
def test_fp8_may_have_a_scale_for_each_row_or_one(
    tmp_path: Path, method: str, shape: tuple[int, ...], scale: Tensor
) -> None:
    codes = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    config = {"quant_method": method, "quant_algo": "FP8", "format": "float-quantized"}
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.tensor(1.0)}
    found = read(tmp_path, tensors, config)
    assert list(found) == ["a.weight"], "a weight in bf16 has no scale of its inputs"
    factor = scale.view(-1, 1, 1) if len(shape) == 3 else scale
    assert torch.equal(found["a.weight"], (codes.float() * factor).bfloat16())


@pytest.mark.parametrize("named", [[4, 4], "4x4"])
def test_fp8_blocks_of_compressed_tensors_are_as_large_as_they_are_named(
    tmp_path: Path, named: object
) -> None:
    """6 rows in blocks of 4 are 4 and 2; two scales would also divide them into 3 and 3."""
    codes = torch.randn((6, 8), generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": named}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    found = read(tmp_path, {"a.weight": codes, "a.weight_scale": scales}, config)["a.weight"]
    expected = codes.float() * scales.repeat_interleave(4, 0)[:6].repeat_interleave(4, 1)
    assert torch.equal(found, expected.bfloat16())


def test_a_zero_point_of_gptq_whose_code_is_all_ones_is_zero(tmp_path: Path) -> None:
    """Version 1 stores a zero point less one."""
    codes = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]] * 8)
    tensors = {
        "a.qweight": packed(codes, 4).T,
        "a.qzeros": packed(torch.full((1, 8), 15), 4),
        "a.scales": torch.ones((1, 8)).half(),
    }
    found = read(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1})["a.weight"]
    assert torch.equal(found, codes.bfloat16())


def test_fp8_that_are_two_codes_of_four_bits(tmp_path: Path) -> None:
    """DeepSeek's experts in MXFP4 beside matrices in FP8."""
    codes = torch.randint(0, 256, (3, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.tensor([[127, 128], [120, 130], [0, 127]], dtype=torch.uint8)
    tensors = {"a.weight": codes.view(torch.int8), "a.weight_scale_inv": scales}
    found = read(tmp_path, tensors, FP8)["a.weight"]
    expected = fp4(codes).double().view(3, 2, 32) * torch.exp2(scales.double() - 127)[..., None]
    assert torch.equal(found.double(), expected.view(3, 64))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("groups", "is_symmetric"), [(1, True), (3, True), (3, False)])
def test_packed_integers_of_compressed_tensors(
    tmp_path: Path, bits: int, groups: int, is_symmetric: bool
) -> None:
    rows, columns = 5, 12
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=generator)
    scales = torch.rand((rows, groups), generator=generator).bfloat16()
    tensors = {
        "a.weight_packed": packed(codes, bits),
        "a.weight_scale": scales,
        "a.weight_shape": torch.tensor([rows, columns]),
    }
    if not is_symmetric:
        tensors["a.weight_zero_point"] = packed(zeros.T, bits).T
    weights = {"num_bits": bits, "type": "int", "symmetric": is_symmetric}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    found = read(tmp_path, tensors, config)
    of_groups = torch.full_like(zeros, 1 << (bits - 1)) if is_symmetric else zeros
    length = columns // groups
    less = codes - of_groups.repeat_interleave(length, 1)
    expected = (less * scales.float().repeat_interleave(length, 1)).bfloat16()
    assert list(found) == ["a.weight"]
    assert torch.equal(found["a.weight"], expected)


def packed(codes: Tensor, bits: int) -> Tensor:
    """Pack codes along dimension 1 into words, the first one into the lowest bits."""
    per_word = 32 // bits
    words = []
    for row in codes.tolist():
        row += [0] * (-len(row) % per_word)
        parts = [row[start : start + per_word] for start in range(0, len(row), per_word)]
        words.append([sum(code << (bits * place) for place, code in enumerate(part)) for part in parts])
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def test_words_hold_codes_in_any_number_of_bits() -> None:
    codes = torch.randint(0, 16, (3, 13), generator=torch.Generator().manual_seed(0))
    assert torch.equal(unpacked(packed(codes, 4), 4, 13).long(), codes)


@pytest.mark.parametrize("has_order", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_holds_inputs_in_words_and_zeros_less_one(tmp_path: Path, has_order: bool, version: str) -> None:
    inputs, outputs, groups, bits = 16, 8, 2, 4
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, 16, (outputs, groups), generator=generator)
    scales = torch.rand((outputs, groups), generator=generator).half()
    group = torch.arange(inputs) // (inputs // groups)
    if has_order:
        group = group[torch.randperm(inputs, generator=generator)]
    stored = zeros - int(version == "gptq")
    tensors = {
        "a.qweight": packed(codes, bits).T,
        "a.qzeros": packed(stored.T, bits),
        "a.scales": scales.T,
        "a.bias": torch.ones(outputs),
    }
    if has_order:
        tensors["a.g_idx"] = group.int()
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": version}
    found = read(tmp_path, tensors, config)
    expected = ((codes - zeros[:, group]) * scales.float()[:, group]).bfloat16()
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"], expected)


def test_awq_holds_outputs_in_words_in_the_order_of_its_kernel(tmp_path: Path) -> None:
    inputs, outputs, groups = 6, 16, 2
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros = torch.randint(0, 16, (groups, outputs), generator=generator)
    scales = torch.rand((groups, outputs), generator=generator).half()

    def in_words(values: Tensor) -> Tensor:
        """Pack as AutoAWQ does: nibble n of a word has the output 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
        places = [0, 2, 4, 6, 1, 3, 5, 7]
        ordered = values.view(len(values), -1, 8)[:, :, places].flatten(1)
        return packed(ordered, 4)

    tensors = {"a.qweight": in_words(codes), "a.qzeros": in_words(zeros), "a.scales": scales}
    config = {"quant_method": "awq", "bits": 4, "group_size": 3, "version": "gemm"}
    found = read(tmp_path, tensors, config)["a.weight"]
    of_inputs = [row.repeat_interleave(3, 0) for row in (zeros, scales.float())]
    assert torch.equal(found, ((codes - of_inputs[0]) * of_inputs[1]).bfloat16().T)


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4_has_a_scale_in_fp8_for_sixteen_values_and_one_for_all(tmp_path: Path, divides: bool) -> None:
    codes = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    scales = torch.rand((3, 2), generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    whole = torch.tensor([1.7])
    config: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    tensors = {"a.weight": codes, "a.weight_scale": scales, "a.weight_scale_2": whole}
    if divides:
        config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}
        tensors = {"a.weight_packed": codes, "a.weight_scale": scales, "a.weight_global_scale": whole}
    found = read(tmp_path, tensors, config)["a.weight"]
    factors = scales.float() / whole if divides else scales.float() * whole
    assert torch.equal(found, (fp4(codes).float() * factors.repeat_interleave(16, 1)).bfloat16())


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_is_a_table_times_the_largest_value_of_a_block(tmp_path: Path, is_nested: bool) -> None:
    """The high bits come first; with double quantisation the largest values are codes themselves."""
    rows, columns, block = 3, 32, 16
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (rows * columns,), generator=generator)
    table = torch.linspace(-1, 1, 16)
    absmax = torch.rand(rows * columns // block, generator=generator)
    state: dict[str, Any] = {
        "shape": [rows, columns],
        "blocksize": block,
        "quant_type": "nf4",
        "dtype": "bfloat16",
    }
    tensors = {
        "a.weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        "a.weight.absmax": absmax,
        "a.weight.quant_map": table,
    }
    if is_nested:
        state |= {"nested_blocksize": 4, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors["a.weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
        tensors["a.weight.nested_absmax"] = torch.tensor([0.5, 2.0])
        tensors["a.weight.absmax"] = torch.randint(
            0, 256, absmax.shape, generator=generator, dtype=torch.uint8
        )
        of_blocks = tensors["a.weight.nested_quant_map"][tensors["a.weight.absmax"].long()]
        absmax = of_blocks * tensors["a.weight.nested_absmax"].repeat_interleave(4)[: len(absmax)] + 0.25
    text = json.dumps(state).encode()
    tensors["a.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    found = read(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_4bit": True})
    expected = (table[codes] * absmax.repeat_interleave(block)).bfloat16().view(rows, columns)
    assert list(found) == ["a.weight"]
    assert torch.equal(found["a.weight"], expected)


def test_int8_of_bitsandbytes_and_of_compressed_tensors(tmp_path: Path) -> None:
    codes = torch.tensor([[127, -127, 0], [1, 2, -3]], dtype=torch.int8)
    scales = torch.tensor([2.54, 1.27])
    config: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {"a.weight": codes, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = read(tmp_path / "bnb", tensors, config)
    assert list(found) == ["a.weight"]
    assert torch.equal(found["a.weight"], (codes * (scales[:, None] / 127)).bfloat16())
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}}
    tensors = {"a.weight": codes, "a.weight_scale": scales[:, None]}
    found = read(tmp_path / "ct", tensors, config)
    assert torch.equal(found["a.weight"], (codes * scales[:, None]).bfloat16())


def test_a_large_weight_is_the_same_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.randn((40, 24), generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": torch.rand((5, 3))}
    config = {**FP8, "weight_block_size": [8, 8]}
    whole = read(tmp_path, tensors, config)["a.weight"]
    monkeypatch.setattr(arithmetic, "_PIECE", 24 * 7)
    assert torch.equal(read(tmp_path, tensors, config)["a.weight"], whole)


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (torch.tensor([[0x7F, 1]], dtype=torch.uint8).view(torch.float8_e4m3fn), torch.tensor([[1.0]])),
        (torch.ones((1, 2)).to(torch.float8_e4m3fn), torch.tensor([[math.inf]])),
        (torch.full((1, 2), 448.0).to(torch.float8_e4m3fn), torch.tensor([[3e38]])),
        (torch.ones((1, 2)).to(torch.float8_e4m3fn), torch.tensor([[255]], dtype=torch.uint8)),
    ],
    ids=["NaN code", "infinite scale", "too large", "NaN scale"],
)
def test_values_that_are_not_finite_are_refused_by_key(tmp_path: Path, codes: Tensor, scale: Tensor) -> None:
    with pytest.raises(
        NonFiniteError, match=r"model\.safetensors: a\.weight has \d of 2 values that are not"
    ):
        read(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, FP8)


def test_a_scale_of_zero_makes_zeros(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.ones((2, 2)).to(torch.float8_e4m3fn),
        "a.weight_scale_inv": torch.zeros((1, 1)),
    }
    assert read(tmp_path, tensors, FP8)["a.weight"].tolist() == [[0.0, 0.0], [0.0, 0.0]]


_CODES = torch.ones((130, 6)).to(torch.float8_e4m3fn)
_WORDS = torch.zeros((8, 4), dtype=torch.int32)


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (
            {"a.weight": _CODES},
            FP8,
            r"a\.weight is in F8_E4M3, and there are no scales of it \(a\.weight_scale_inv",
        ),
        (
            {"a.weight": _CODES, "a.weight_scale_inv": torch.ones((3, 1))},
            FP8,
            r"weight_scale_inv has shape \[3, 1\], which does not belong to a\.weight of shape \[130, 6\] in "
            r"blocks of 128 x 128",
        ),
        (
            {"a.weight": _CODES, "a.weight_scale_inv": torch.ones((2, 1), dtype=torch.int64)},
            FP8,
            r"a\.weight_scale_inv has dtype I64, which scales never have",
        ),
        (
            {"x_blocks": torch.zeros((1, 2, 3, 16), dtype=torch.uint8)},
            MXFP4,
            r"x_blocks is quantised \(U8\) and lacks x_scales",
        ),
        (
            {
                "x_blocks": torch.zeros((1, 2, 3, 16), dtype=torch.uint8),
                "x_scales": torch.zeros((1, 2, 2), dtype=torch.uint8),
            },
            MXFP4,
            r"x_scales has shape \[1, 2, 2\], and not \[1, 2, 3\]",
        ),
        (
            {
                "x_blocks": torch.zeros((1, 2, 3, 16), dtype=torch.uint8),
                "x_scales": torch.zeros((1, 2, 3), dtype=torch.uint8),
                "x": torch.zeros((1, 96, 2)),
            },
            MXFP4,
            r"x is there twice, quantised and whole; keep one of them",
        ),
        (
            {
                "a.qweight": _WORDS,
                "a.qzeros": torch.zeros((2, 4), dtype=torch.int32),
                "a.scales": torch.ones((2, 32)),
            },
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            r"quantization_config\.version is 'gemv', which is not read",
        ),
        (
            {
                "a.qweight": _WORDS,
                "a.qzeros": torch.zeros((2, 4), dtype=torch.int32),
                "a.scales": torch.ones((2, 30)),
            },
            {"quant_method": "awq", "bits": 4, "version": "gemm"},
            r"a\.scales has shape \[2, 30\], and not \[2, 32\]",
        ),
        (
            {"a.qweight": _WORDS},
            {"quant_method": "gptq", "bits": 3},
            r"quantization_config\.bits is 3, which is not read",
        ),
        (
            {"a.weight": torch.ones((2, 2))},
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
            r"quantization_config\.format is 'marlin-24', which is not read",
        ),
        (
            {"a.weight": torch.ones((2, 2))},
            {"quant_method": "quanto"},
            r"has a quantization_config \(quanto\), and quantised weights are read of mxfp4, .*bytes; give",
        ),
        (
            {"a.weight": torch.ones((2, 2))},
            {"bits": 4},
            r"has a quantization_config, and quantised weights are read",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        read(tmp_path, tensors, config)
