"""AdamW with moments of 16 or 8 bits as Numba kernels: serial, without the GIL, one pass over memory each.

Not exact: moments are rounded when they are stored. The update of a step uses them as they were before that,
in fp32, with the operations of `kernels`. What holds bit for bit is that a result depends on the gradients
and on `AdamWStep.noise` alone: on no thread, task, order of blocks, or place (`device_moments` computes the
same on a device), and on no earlier random number, so a run resumes where it was.

Rounding is stochastic and unbiased: up with a probability of the distance to the value below. To the nearest,
exp_avg_sq would stop to change, since a step changes it by less than half of what two codes are apart.

bf16: both moments are bf16 values; one above the largest of these may become infinity.
int8: codes of 8 bits with a scale per block (`codes`), rounded so that the moment itself, not its root, is
unbiased. A positive exp_avg_sq has a code of at least 1, or an update would be divided by eps. There is no
table, no root and no division in a code: codes that are roots trained alike, and took twice as long to make.
An infinity or a NaN makes its whole block NaN in the next step.

Source: Revisiting BFloat16 Training (Zamirai et al., 2020) for stochastic rounding; `codes` has those of the
codes and of the hash.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types

from megatrain.config.optimizers.optimizer import SCALE_NUMEL
from megatrain.optim.adamw.codes import (
    HASH_FACTORS,
    HIGH_FACTOR,
    MEAN_SHIFT,
    MEAN_TOP,
    NAN_BITS,
    ONE_BITS,
    ROOT_SHIFT,
    ROOT_TOP,
    SMALLEST_UNIT,
)
from megatrain.optim.adamw.kernels import TILE, moments, parameter_vector
from megatrain.optim.kernels import WIDTH, compile_kernel
from megatrain.optim.vectors import F32, I8, I16, I32, I64, Arguments, VectorLanes, vector_code


def _random_bits(arguments: Arguments) -> VectorLanes:
    """Return 32 random bits for each of `WIDTH` elements, from the key and the index in the parameter.

    `noise` has two words of key, and the index of the arrays' first element in its parameter; with that,
    `index` is a multiple of `WIDTH`.
    """
    builder, index = arguments.builder, arguments["index"]
    first, second, base = (builder.extract_value(arguments["noise"], position) for position in range(3))
    index = builder.add(index, base)
    high = builder.mul(builder.trunc(builder.lshr(index, I64(32)), I32), I32(HIGH_FACTOR))
    second = builder.add(builder.trunc(second, I32), high)
    low = VectorLanes.fill(builder, builder.trunc(index, I32), WIDTH)
    steps = VectorLanes(builder, ir.Constant(low.value.type, list(range(WIDTH))))
    x = (low + steps) ^ VectorLanes.fill(builder, builder.trunc(first, I32), WIDTH)
    x = x ^ (x >> 16)
    x = x * x.constant(HASH_FACTORS[0])
    x = x ^ (x >> 15)
    x = x + VectorLanes.fill(builder, second, WIDTH)
    x = x * x.constant(HASH_FACTORS[1])
    return x ^ (x >> 16)


def _round_to_bf16(value: VectorLanes, noise: VectorLanes) -> VectorLanes:
    """Return the bits of one of the two bf16 neighbors; a bf16 value stays, and any NaN becomes one NaN."""
    rounded = (value.bits() + noise) >> 16
    return value.where("==", value, rounded, rounded.constant(NAN_BITS >> 16)).narrow(I16)


def _floats(codes: VectorLanes, shift: int) -> VectorLanes:
    """Return what codes without a sign stand for, in units; exact."""
    numbers = ((codes << shift) + codes.constant(ONE_BITS)).from_bits()
    return numbers - numbers.constant(1.0)


def _decode_mean(codes: VectorLanes, unit: VectorLanes) -> VectorLanes:
    codes = codes.extend()
    value = _floats(codes & codes.constant(0x7F), MEAN_SHIFT) * unit
    sign = (codes & codes.constant(0x80)) << 24
    return (value.bits() | sign).from_bits()


def _decode_square(codes: VectorLanes, unit: VectorLanes) -> VectorLanes:
    root = _floats(codes.extend(), ROOT_SHIFT) * unit
    return root * root


def _mean_codes(mean: VectorLanes, inverse: VectorLanes, random: VectorLanes) -> VectorLanes:
    """Return the codes of exp_avg: 7 bits and the sign. The upper 19 of the random bits round.

    A NaN among the numbers has the largest code, whatever its bits.
    """
    zero = mean.constant(0.0)
    number = mean.magnitude_bits().from_bits() * inverse + mean.constant(1.0)
    code = (number.magnitude_bits() - random.constant(ONE_BITS) + (random >> (32 - MEAN_SHIFT))) >> MEAN_SHIFT
    code = code.where("<", code.constant(0x7F), code, code.constant(0x7F))
    sign = mean.where("<", zero, code.constant(0x80), code.constant(0))
    return (code | sign).narrow(I8)


def _root_codes(root: VectorLanes, inverse: VectorLanes, random: VectorLanes) -> VectorLanes:
    """Return the codes of exp_avg_sq, whose roots these are. The lower 16 of the random bits round.

    Up with the probability that squares ask for, (x^2 - low^2) / (high^2 - low^2).
    """
    scaled = root * inverse
    one = root.constant(1.0)
    floor = ((scaled + one).magnitude_bits() - random.constant(ONE_BITS)) >> ROOT_SHIFT
    low, high = _floats(floor, ROOT_SHIFT), _floats(floor + floor.constant(1), ROOT_SHIFT)
    # the middles of 2^16 parts of 0 to 1: the random bits are a mantissa
    share = ((random << 7) & random.constant(0x7FFF80) | random.constant(ONE_BITS + 0x40)).from_bits() - one
    is_up = (high - low) * (high + low) * share
    code = floor + is_up.where("<", (scaled - low) * (scaled + low), floor.constant(1), floor.constant(0))
    least = root.where(">", root.constant(0.0), floor.constant(1), floor.constant(0))
    code = code.where("<", least, least, code)
    return code.where("<", code.constant(0xFF), code, code.constant(0xFF)).narrow(I8)


@vector_code(
    "index offset scalars noise",
    denominators="offset",
    means="offset",
    exp_avg="index",
    exp_avg_sq="index",
    gradient="index",
)
def _rounded_moments(arguments: Arguments) -> None:
    """Update moments at `index`, stored in bf16, and in fp32 at `offset`."""
    mean, square, _, denominator = moments(
        arguments.load("gradient").widen(),
        arguments.load("exp_avg").widen(),
        arguments.load("exp_avg_sq").widen(),
        arguments.fill("scalars"),
    )
    arguments.store(denominators=denominator, means=mean)
    random = _random_bits(arguments)
    arguments.store(
        exp_avg=_round_to_bf16(mean, random >> 16),
        exp_avg_sq=_round_to_bf16(square, random & random.constant(0xFFFF)),
    )


@vector_code(
    "index offset scalars units",
    denominators="offset",
    means="offset",
    roots="offset",
    peaks=None,
    exp_avg="index",
    exp_avg_sq="index",
    gradient="index",
)
def _decoded_moments(arguments: Arguments) -> None:
    """Update moments of codes at `index`, and leave them in fp32 at `offset`.

    `peaks` keeps the largest magnitudes of means and roots in each of `WIDTH` lanes.
    """
    builder, peaks = arguments.builder, arguments["peaks"]
    mean_unit, root_unit = arguments.fill("units")
    mean, _, root, denominator = moments(
        arguments.load("gradient").widen(),
        _decode_mean(arguments.load("exp_avg"), mean_unit),
        _decode_square(arguments.load("exp_avg_sq"), root_unit),
        arguments.fill("scalars"),
    )
    arguments.store(denominators=denominator, means=mean, roots=root)
    for place, value in ((peaks, mean), (builder.gep(peaks, [I32(WIDTH)]), root)):
        largest, bits = VectorLanes.load(builder, place, WIDTH), value.magnitude_bits()
        bits.where(">", largest, bits, largest).store(place)


@vector_code("index", returns=types.float32, peaks="index")
def _peak(arguments: Arguments) -> ir.Value:
    """Return the largest of `WIDTH` magnitudes at `peaks[index:]`, which are set to zero."""
    builder, lanes = arguments.builder, arguments.load("peaks")
    arguments.store(peaks=lanes.constant(0))
    bits = lanes.largest()
    is_nan = builder.icmp_signed(">", bits, I32(0x7F800000))
    return builder.bitcast(builder.select(is_nan, I32(NAN_BITS), bits), F32)


@vector_code(
    "index offset noise inverses", means="offset", roots="offset", exp_avg="index", exp_avg_sq="index"
)
def _encoded_moments(arguments: Arguments) -> None:
    """Store codes at `index` of the moments at `offset`."""
    mean_inverse, root_inverse = arguments.fill("inverses")
    random = _random_bits(arguments)
    arguments.store(
        exp_avg=_mean_codes(arguments.load("means"), mean_inverse, random),
        exp_avg_sq=_root_codes(arguments.load("roots"), root_inverse, random),
    )


_rounded_vector, _decoded_vector = _rounded_moments(WIDTH), _decoded_moments(WIDTH)
_encoded_vector, _peak_of = _encoded_moments(WIDTH), _peak(WIDTH)


@compile_kernel
def update_bf16(  # type: ignore[no-untyped-def]
    scalars, noise, working, remainder, exp_avg, exp_avg_sq, gradient, start, stop
):
    """Apply AdamW to elements [start, stop), in place, with moments in bf16.

    Args:
        scalars: The nine factors of `AdamWStep.scalars`, as for `kernels.update`.
        noise: The two words of key of `AdamWStep.noise`, and the arrays' first index in their parameter.
        working: float32 masters, or the bits of bf16 working weights as int16.
        remainder: None, or the int16 remainders that go with bf16 working weights.
        exp_avg: bf16 bits as int16.
        exp_avg_sq: bf16 bits as int16.
        gradient: float32, or bf16 bits as int16.
        start: The index of the first element, a multiple of `WIDTH`.
        stop: The index one past the last element, a multiple of `WIDTH`.
    """
    denominators, means = np.empty(TILE, np.float32), np.empty(TILE, np.float32)
    for first in range(start, stop, TILE):
        last = min(first + TILE, stop)
        for index in range(first, last, WIDTH):
            _rounded_vector(
                index, index - first, scalars, noise, denominators, means, exp_avg, exp_avg_sq, gradient
            )
        for index in range(first, last, WIDTH):
            parameter_vector(
                index, index - first, index - first, scalars, denominators, means, working, remainder
            )


@compile_kernel
def update_int8(  # type: ignore[no-untyped-def]
    scalars,
    noise,
    working,
    remainder,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    gradient,
    start,
    stop,
):
    """Apply AdamW to elements [start, stop), in place, with moments in codes of 8 bits.

    Args:
        scalars: The nine factors of `AdamWStep.scalars`, as for `kernels.update`.
        noise: The two words of key and the arrays' first index in their parameter, as for `update_bf16`.
        working: The float32 masters, or the bits of bf16 working weights, as for `update_bf16`.
        remainder: None, or the int16 remainders that go with bf16 working weights, as for `update_bf16`.
        exp_avg: uint8, a sign and 7 bits.
        exp_avg_sq: uint8.
        exp_avg_scale: float32, one per `SCALE_NUMEL` elements: the unit of exp_avg.
        exp_avg_sq_scale: float32, one per `SCALE_NUMEL` elements: the unit of the root of exp_avg_sq.
        gradient: float32, or bf16 bits as int16, as for `update_bf16`.
        start: The index of the first element, a multiple of `SCALE_NUMEL`.
        stop: The index one past the last element: a multiple of `SCALE_NUMEL`, or of `WIDTH` at the end.
    """
    one, least = np.float32(1), np.float32(SMALLEST_UNIT)
    denominators = np.empty(SCALE_NUMEL, np.float32)
    means, roots = np.empty(SCALE_NUMEL, np.float32), np.empty(SCALE_NUMEL, np.float32)
    peaks = np.zeros(2 * WIDTH, np.int32)
    for first in range(start, stop, SCALE_NUMEL):
        last = min(first + SCALE_NUMEL, stop)
        block = first // SCALE_NUMEL
        units = (exp_avg_scale[block], exp_avg_sq_scale[block])
        for index in range(first, last, WIDTH):
            _decoded_vector(
                index,
                index - first,
                scalars,
                units,
                denominators,
                means,
                roots,
                peaks,
                exp_avg,
                exp_avg_sq,
                gradient,
            )
        mean_unit = _peak_of(0, peaks) / np.float32(MEAN_TOP)
        root_unit = _peak_of(WIDTH, peaks) / np.float32(ROOT_TOP)
        mean_unit = least if mean_unit < least else mean_unit
        root_unit = least if root_unit < least else root_unit
        exp_avg_scale[block], exp_avg_sq_scale[block] = mean_unit, root_unit
        inverses = (one / mean_unit, one / root_unit)
        for index in range(first, last, WIDTH):
            parameter_vector(
                index, index - first, index - first, scalars, denominators, means, working, remainder
            )
        for index in range(first, last, WIDTH):
            _encoded_vector(index, index - first, noise, inverses, means, roots, exp_avg, exp_avg_sq)
