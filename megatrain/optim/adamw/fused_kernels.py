"""AdamW on flat planes as one Triton kernel, with the bits of `kernels` and `compressed` on the host.

Every element of every plane is read once and written once. What the exactness rests on, beside what `device`
says of NaNs:

1. Fused multiply-adds are `tl.fma`, and whoever launches the kernel forbids the compiler to make others.
2. `tl.div_rn` and `tl.sqrt_rn` are correctly rounded, denormals included. `/` and `tl.sqrt` are not: they are
   approximations.
3. Planes in bf16 are read and written as their bits; all rounding to them is arithmetic on integers.

Importing this module imports Triton. None of it has ever run on a GPU.
"""

# No postponed annotations: Triton reads those of constants.

import triton
import triton.language as tl

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.optim.adamw import codes

COLUMNS = tl.constexpr(SCALE_NUMEL)
"""A row of a tile: the elements that share a scale."""
_MEAN_SHIFT, _MEAN_TOP = tl.constexpr(codes.MEAN_SHIFT), tl.constexpr(codes.MEAN_TOP)
_ROOT_SHIFT, _ROOT_TOP = tl.constexpr(codes.ROOT_SHIFT), tl.constexpr(codes.ROOT_TOP)
_SMALLEST_UNIT = tl.constexpr(codes.SMALLEST_UNIT)
_FACTOR1, _FACTOR2 = tl.constexpr(codes.HASH_FACTORS[0]), tl.constexpr(codes.HASH_FACTORS[1])
_HIGH_FACTOR = tl.constexpr(codes.HIGH_FACTOR)
_ONE, _NAN = tl.constexpr(codes.ONE_BITS), tl.constexpr(codes.NAN_BITS)


@triton.jit
def _bits(values):  # type: ignore[no-untyped-def]
    """Return the bits of fp32 values."""
    return values.to(tl.uint32, bitcast=True)


@triton.jit
def _floats(bits):  # type: ignore[no-untyped-def]
    """Return the fp32 values that have these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrow(bits):  # type: ignore[no-untyped-def]
    """Return the low 16 bits, as planes have them."""
    return bits.to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _high(halves):  # type: ignore[no-untyped-def]
    """Return bits with those of int16 values at their top."""
    return halves.to(tl.uint16, bitcast=True).to(tl.uint32) << 16


@triton.jit
def _plus(a, b):  # type: ignore[no-untyped-def]
    """Add integers mod 2^32."""
    return tl.add(a, b, sanitize_overflow=False)


@triton.jit
def _times(a, b):  # type: ignore[no-untyped-def]
    """Multiply integers mod 2^32."""
    return tl.mul(a, b, sanitize_overflow=False)


@triton.jit
def widen(values):  # type: ignore[no-untyped-def]
    """Return fp32 values: these, or those whose bf16 bits these are."""
    if values.dtype == tl.int16:
        return _floats(_high(values))
    else:
        return values


@triton.jit
def random_bits(first, second, index):  # type: ignore[no-untyped-def]
    """Return 32 random bits for each index of an element in its parameter, as `compressed` draws them."""
    key = _plus(second.to(tl.uint32, bitcast=True), _times((index >> 32).to(tl.uint32), _HIGH_FACTOR))
    x = index.to(tl.uint32) ^ first.to(tl.uint32, bitcast=True)
    x = x ^ (x >> 16)
    x = _times(x, _FACTOR1)
    x = x ^ (x >> 15)
    x = _plus(x, key)
    x = _times(x, _FACTOR2)
    return x ^ (x >> 16)


@triton.jit
def _decoded(magnitudes, shift):  # type: ignore[no-untyped-def]
    """Return what codes without a sign stand for, in units; exact."""
    return _floats((magnitudes << shift) + _ONE) - 1.0


@triton.jit
def _unit(magnitudes, top):  # type: ignore[no-untyped-def]
    """Return the unit of each row, from the bits of its elements' magnitudes."""
    peaks = _floats(tl.max(magnitudes.to(tl.int32, bitcast=True), axis=1))
    units = tl.div_rn(peaks, top)
    units = tl.where(units < _SMALLEST_UNIT, _SMALLEST_UNIT, units)
    return tl.where(units == units, units, _floats(tl.full(units.shape, _NAN, tl.uint32)))


@triton.jit
def _mean_codes(mean, inverse, random):  # type: ignore[no-untyped-def]
    number = _floats(_bits(mean) & 0x7FFFFFFF) * inverse + 1.0
    code = ((_bits(number) & 0x7FFFFFFF) - _ONE + (random >> (32 - _MEAN_SHIFT))) >> _MEAN_SHIFT
    return tl.minimum(code, 0x7F) | tl.where(mean < 0, 0x80, 0).to(tl.uint32)


@triton.jit
def _root_codes(root, inverse, random):  # type: ignore[no-untyped-def]
    scaled = root * inverse
    floor = ((_bits(scaled + 1.0) & 0x7FFFFFFF) - _ONE) >> _ROOT_SHIFT
    low, high = _decoded(floor, _ROOT_SHIFT), _decoded(floor + 1, _ROOT_SHIFT)
    share = _floats(((random << 7) & 0x7FFF80) | (_ONE + 0x40)) - 1.0
    is_up = (high - low) * (high + low) * share < (scaled - low) * (scaled + low)
    code = tl.maximum(floor + is_up.to(tl.uint32), (root > 0).to(tl.uint32))
    return tl.minimum(code, 0xFF)


@triton.jit
def _rounded_to_bf16(values, random):  # type: ignore[no-untyped-def]
    """Return one of the two bf16 neighbors; any NaN becomes one NaN."""
    rounded = _plus(_bits(values), random) >> 16
    return _narrow(tl.where(values == values, rounded, _NAN >> 16))


@triton.jit(do_not_specialize=["first", "second", "base"])
def update(  # type: ignore[no-untyped-def]
    working,
    remainder,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    gradient,
    numel,
    grad_scale,
    decay,
    weight1,
    beta2,
    weight2,
    correction2_sqrt,
    eps,
    step_size,
    first,
    second,
    base,
    IS_FROM_MEAN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Apply AdamW to the elements of planes, in place: a program takes `ROWS` rows of `COLUMNS` elements.

    Args:
        working: float32 masters, or the bits of bf16 working weights as int16.
        remainder: None, or the int16 remainders that go with bf16 working weights.
        exp_avg: float32, bf16 bits as int16, or uint8 codes.
        exp_avg_sq: float32, bf16 bits as int16, or uint8 codes, as `exp_avg`.
        exp_avg_scale: None, or with codes float32: one for each row.
        exp_avg_sq_scale: None, or with codes float32: one for each row.
        gradient: float32, or bf16 bits as int16.
        numel: The number of elements of the planes.
        grad_scale: The factor on the gradient; this and the factors that follow are of `AdamWStep.scalars`.
        decay: The factor on the weight.
        weight1: The factor on the difference between the gradient and the mean.
        beta2: The factor on the mean of squares.
        weight2: The factor on the squared gradient.
        correction2_sqrt: The divisor of the root of the mean of squares.
        eps: The number that is added to the denominator.
        step_size: The factor on the mean, which is negative.
        first: The first word of the key of `AdamWStep.noise`, as a signed integer.
        second: The second word of that key, as a signed integer.
        base: The index of the first element in its parameter.
        IS_FROM_MEAN: Whether `weight1` is positive.
        ROWS: The number of rows of a program, a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = place < numel
    has_codes: tl.constexpr = exp_avg.dtype.element_ty == tl.uint8
    g = widen(tl.load(gradient + place, mask=mask, other=0)) * grad_scale
    m = tl.load(exp_avg + place, mask=mask, other=0)
    v = tl.load(exp_avg_sq + place, mask=mask, other=0)
    if has_codes:
        has_row = row * COLUMNS < numel
        mean_unit = tl.load(exp_avg_scale + row, mask=has_row, other=0)[:, None]
        root_unit = tl.load(exp_avg_sq_scale + row, mask=has_row, other=0)[:, None]
        sign = (m.to(tl.uint32) & 0x80) << 24
        m = _floats(_bits(_decoded(m.to(tl.uint32) & 0x7F, _MEAN_SHIFT) * mean_unit) | sign)
        root = _decoded(v.to(tl.uint32), _ROOT_SHIFT) * root_unit
        v = root * root
    else:
        m, v = widen(m), widen(v)

    m = tl.fma(weight1, g - m, m if IS_FROM_MEAN else g)
    v = tl.fma(weight2 * g, g, v * beta2)
    root = tl.sqrt_rn(v)
    denominator = tl.div_rn(root, correction2_sqrt) + eps
    change = tl.div_rn(step_size * m, denominator)

    w = tl.load(working + place, mask=mask, other=0)
    if remainder is None:
        tl.store(working + place, w * decay + change, mask=mask)
    else:
        low = tl.load(remainder + place, mask=mask, other=0).to(tl.int32).to(tl.uint32, bitcast=True)
        master = _floats(_plus(_high(w), low)) * decay + change
        bits = tl.where(master == master, _bits(master), _NAN)
        tl.store(working + place, _narrow(_plus(bits, 0x8000) >> 16), mask=mask)
        tl.store(remainder + place, _narrow(bits), mask=mask)

    if has_codes:
        random = random_bits(first, second, place + base)
        mean_unit = _unit(tl.where(mask, _bits(m) & 0x7FFFFFFF, 0), _MEAN_TOP)
        root_unit = _unit(tl.where(mask, _bits(root) & 0x7FFFFFFF, 0), _ROOT_TOP)
        tl.store(exp_avg_scale + row, mean_unit, mask=has_row)
        tl.store(exp_avg_sq_scale + row, root_unit, mask=has_row)
        mean_code = _mean_codes(m, tl.div_rn(1.0, mean_unit)[:, None], random)
        root_code = _root_codes(root, tl.div_rn(1.0, root_unit)[:, None], random)
        tl.store(exp_avg + place, mean_code.to(tl.uint8), mask=mask)
        tl.store(exp_avg_sq + place, root_code.to(tl.uint8), mask=mask)
    elif exp_avg.dtype.element_ty == tl.int16:
        random = random_bits(first, second, place + base)
        tl.store(exp_avg + place, _rounded_to_bf16(m, random >> 16), mask=mask)
        tl.store(exp_avg_sq + place, _rounded_to_bf16(v, random & 0xFFFF), mask=mask)
    else:
        tl.store(exp_avg + place, m, mask=mask)
        tl.store(exp_avg_sq + place, v, mask=mask)
