"""Vectors of a fixed number of elements in a Numba kernel: arithmetic on them emits LLVM instructions.

Every operation is rounded to its type, and nothing is contracted, so a kernel's results are the same on every
machine, whatever vectors it has. Importing this module imports Numba (half a second).

Numba keeps compiled kernels on disk for as long as the kernel's own file is unchanged: after a change here,
touch the files of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
_BYTES = {I8: 1, I16: 2, I32: 4, F32: 4}


class VectorLanes:
    """A vector in a kernel that is being emitted; arithmetic on it emits instructions, rounded one by one."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value

    @classmethod
    def load(cls, builder: ir.IRBuilder, pointer: ir.Value, width: int) -> VectorLanes:
        """Read `width` elements."""
        element = pointer.type.pointee
        vector = builder.bitcast(pointer, ir.VectorType(element, width).as_pointer())
        return cls(builder, builder.load(vector, align=_BYTES[element]))

    def store(self, pointer: ir.Value) -> None:
        """Write all elements."""
        vector = self.builder.bitcast(pointer, self.value.type.as_pointer())
        self.builder.store(self.value, vector, align=_BYTES[pointer.type.pointee])

    @classmethod
    def fill(cls, builder: ir.IRBuilder, scalar: ir.Value, width: int) -> VectorLanes:
        """Repeat a scalar."""
        undefined = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
        first = builder.insert_element(undefined, scalar, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, width), [0] * width)
        return cls(builder, builder.shuffle_vector(first, undefined, zeros))

    def constant(self, value: float) -> VectorLanes:
        """Repeat a number, in the type of these elements."""
        return VectorLanes.fill(self.builder, self._element()(value), self.value.type.count)

    def __add__(self, other: VectorLanes) -> VectorLanes:
        return self._emit(self._prefix() + "add", other)

    def __sub__(self, other: VectorLanes) -> VectorLanes:
        return self._emit(self._prefix() + "sub", other)

    def __mul__(self, other: VectorLanes) -> VectorLanes:
        return self._emit(self._prefix() + "mul", other)

    def __truediv__(self, other: VectorLanes) -> VectorLanes:
        return self._emit("fdiv", other)

    def __xor__(self, other: VectorLanes) -> VectorLanes:
        return self._emit("xor", other)

    def __and__(self, other: VectorLanes) -> VectorLanes:
        return self._emit("and_", other)

    def __or__(self, other: VectorLanes) -> VectorLanes:
        return self._emit("or_", other)

    def __lshift__(self, places: int) -> VectorLanes:
        return self._emit("shl", self.constant(places))

    def __rshift__(self, places: int) -> VectorLanes:
        """Shift zeros in."""
        return self._emit("lshr", self.constant(places))

    def times_plus(self, factor: VectorLanes, addend: VectorLanes) -> VectorLanes:
        """Return self * factor + addend, rounded once."""
        return self._call("fma", factor, addend)

    def divide_by(self, divisor: VectorLanes, reciprocal: VectorLanes) -> VectorLanes:
        """Return the correctly rounded quotient without dividing; for a divisor that many share.

        The remainder of a first quotient is exact, and corrects it. That of an infinite one is nan: it is
        replaced, so that infinity stays infinity. Exact where nothing over- or underflows.

        Args:
            divisor: The divisor, of normal numbers.
            reciprocal: The reciprocal of the divisor, correctly rounded.

        Source: Accelerating Correctly Rounded Floating-Point Division When the Divisor Is Known in Advance
        (Brisebarre, Muller, Raina, 2004), algorithm 1 (Markstein, 1990).
        """
        quotient = self * reciprocal
        remainder = VectorLanes(self.builder, self.builder.fneg(quotient.value)).times_plus(divisor, self)
        lowest = VectorLanes.fill(self.builder, F32(-1e30), self.value.type.count)
        above = self.builder.fcmp_ordered(">", remainder.value, lowest.value)
        finite = VectorLanes(self.builder, self.builder.select(above, remainder.value, lowest.value))
        return finite.times_plus(reciprocal, quotient)

    def sqrt(self) -> VectorLanes:
        """Return the square root, correctly rounded."""
        return self._call("sqrt")

    def where(self, comparison: str, other: VectorLanes, yes: VectorLanes, no: VectorLanes) -> VectorLanes:
        """Return `yes` where these compare so with `other`, `no` elsewhere.

        Args:
            comparison: The comparison, `<`, `>`, `>=` or `==`; of floats, none holds for a NaN.
            other: The vector to compare with.
            yes: The vector for where it holds, of any type.
            no: The vector for elsewhere, of the same type.
        """
        is_float = self._element() == F32
        compare = self.builder.fcmp_ordered if is_float else self.builder.icmp_signed
        mask = compare(comparison, self.value, other.value)
        return VectorLanes(self.builder, self.builder.select(mask, yes.value, no.value))

    def bits(self) -> VectorLanes:
        """Return the bits of fp32 values as integers."""
        return self._convert("bitcast", I32)

    def from_bits(self) -> VectorLanes:
        """Return the fp32 values that have these bits."""
        return self._convert("bitcast", F32)

    def magnitude_bits(self) -> VectorLanes:
        """Return the bits of the magnitudes of fp32 values: they order as the values, NaN above infinity."""
        bits = self.bits()
        return bits & bits.constant(0x7FFFFFFF)

    def narrow(self, element: ir.Type) -> VectorLanes:
        """Return the low bits of integers."""
        return self._convert("trunc", element)

    def extend(self) -> VectorLanes:
        """Return integers with zeros above, to 32 bits."""
        return self._convert("zext", I32)

    def halves(self) -> tuple[VectorLanes, VectorLanes]:
        """Return the lower and the upper half of the elements."""
        half = self.value.type.count // 2
        low, high = (
            ir.Constant(ir.VectorType(I32, half), list(range(first, first + half))) for first in (0, half)
        )
        shuffle = self.builder.shuffle_vector
        return (
            VectorLanes(self.builder, shuffle(self.value, self.value, low)),
            VectorLanes(self.builder, shuffle(self.value, self.value, high)),
        )

    def reduce(self, combine: Callable[[VectorLanes, VectorLanes], VectorLanes]) -> ir.Value:
        """Combine halves until one element is left, so the order does not depend on the machine's vectors."""
        lanes = self
        while lanes.value.type.count > 1:
            lanes = combine(*lanes.halves())
        return self.builder.extract_element(lanes.value, I32(0))

    def largest(self) -> ir.Value:
        """Return the largest of signed integers."""
        return self.reduce(lambda low, high: low.where(">", high, low, high))

    def where_positive(self, yes: VectorLanes, no: VectorLanes) -> VectorLanes:
        """Return `yes` where these are above zero, `no` elsewhere."""
        zeros = ir.Constant(self.value.type, [0.0] * self.value.type.count)
        positive = self.builder.fcmp_ordered(">", self.value, zeros)
        return VectorLanes(self.builder, self.builder.select(positive, yes.value, no.value))

    def widen(self) -> VectorLanes:
        """Return fp32 values: these, or those whose bf16 bits these are."""
        return self if self._element() == F32 else self._high_bits().from_bits()

    def widen_twice(self) -> VectorLanes:
        """Return fp64 values."""
        return self.widen()._convert("fpext", F64)

    def to_bf16(self) -> VectorLanes:
        """Return the bits of these fp32 values in bf16, rounded to nearest, ties to even."""
        bits = self.bits()
        odd = (bits >> 16) & bits.constant(1)
        rounded = (bits + bits.constant(0x7FFF) + odd) >> 16
        return self.where("==", self, rounded, rounded.constant(0x7FC0)).narrow(I16)

    def join(self, remainder: VectorLanes) -> VectorLanes:
        """Return the masters of these working weights, as `store.master.join_master` does."""
        return (self._high_bits() + remainder._convert("sext", I32)).from_bits()

    def split(self) -> tuple[VectorLanes, VectorLanes]:
        """Return working weights and remainders of these masters, as `store.master.split_master` does."""
        bits = self.bits()
        high = (bits + bits.constant(0x8000)) >> 16
        return high.narrow(I16), bits.narrow(I16)

    def _high_bits(self) -> VectorLanes:
        return self.extend() << 16

    def _element(self) -> ir.Type:
        return self.value.type.element

    def _prefix(self) -> str:
        return "" if isinstance(self._element(), ir.IntType) else "f"

    def _emit(self, operation: str, other: VectorLanes) -> VectorLanes:
        return VectorLanes(self.builder, getattr(self.builder, operation)(self.value, other.value))

    def _convert(self, operation: str, element: ir.Type) -> VectorLanes:
        to = ir.VectorType(element, self.value.type.count)
        return VectorLanes(self.builder, getattr(self.builder, operation)(self.value, to))

    def _call(self, function: str, *others: VectorLanes) -> VectorLanes:
        """Call an LLVM intrinsic of one vector type: llvmlite's own methods know scalars only."""
        values = [self.value, *(other.value for other in others)]
        vector = self.value.type
        name = f"llvm.{function}.v{vector.count}{vector.element.intrinsic_name}"
        declared = ir.FunctionType(vector, [vector] * len(values))
        callee = cgutils.get_or_insert_function(self.builder.module, declared, name)
        return VectorLanes(self.builder, self.builder.call(callee, values))


class Arguments:
    """The arguments of an intrinsic by their names, while its code is emitted for vectors of `width`."""

    def __init__(self, builder: ir.IRBuilder, width: int, values: dict[str, ir.Value | None]) -> None:
        self.builder = builder
        self.width = width
        self._values = values

    def __getitem__(self, name: str) -> ir.Value:
        """Return a plain argument, or the address in an array; None for an array that is None."""
        return self._values[name]

    def load(self, name: str) -> VectorLanes:
        """Load a vector from an array."""
        return VectorLanes.load(self.builder, self[name], self.width)

    def store(self, **lanes: VectorLanes) -> None:
        """Store a vector in each of these arrays."""
        for name, vector in lanes.items():
            vector.store(self[name])

    def fill(self, name: str) -> list[VectorLanes]:
        """Repeat each scalar of a tuple."""
        return [
            VectorLanes.fill(self.builder, self.builder.extract_value(self[name], position), self.width)
            for position in range(self[name].type.count)
        ]

    def load_parameter(self) -> VectorLanes:
        """Load parameters in fp32, from `working`, and `remainder` where that is given."""
        working = self.load("working")
        return working if self["remainder"] is None else working.join(self.load("remainder"))

    def store_parameter(self, parameter: VectorLanes) -> None:
        """Store parameters where `load_parameter` loads them."""
        if self["remainder"] is not None:
            parameter, low = parameter.split()
            self.store(remainder=low)
        self.store(working=parameter)


def vector_code(
    plain: str, returns: Any = types.none, **arrays: str | None
) -> Callable[[Callable[[Arguments], Any]], Callable[[int], Any]]:
    """Make a function that emits code into one that returns an intrinsic for vectors of a width.

    Args:
        plain: The names of the plain arguments, which come first.
        returns: The type of what the intrinsic returns.
        arrays: The names of the plain arguments that are the places of the arrays' addresses, one for each
            array; None for the array's beginning.
    """
    names = plain.split()

    def made(code: Callable[[Arguments], Any], width: int) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
            values = dict(zip([*names, *arrays], arguments, strict=True))
            kinds = signature.args[len(names) :]
            for (name, place), kind in zip(arrays.items(), kinds, strict=True):
                if kind == types.none:
                    values[name] = None
                    continue
                array = context.make_array(kind)(context, builder, values[name])
                values[name] = builder.gep(array.data, [I64(0) if place is None else values[place]])
            found = code(Arguments(builder, width, values))
            return context.get_dummy_value() if returns == types.none else found

        def typed(typing: Any, *arguments: Any) -> Any:
            return returns(*arguments), emit

        parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in ("typing", *names, *arrays)]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return intrinsic(typed)

    return lambda code: lambda width: made(code, width)
