"""Constants of how moments are compressed: what `compressed` and `device_moments` must agree on.

A code is the upper bits of the fp32 number 1 + x / u, less those of 1, where the unit u is set by the largest
of `SCALE_NUMEL` magnitudes. Near zero codes are evenly spaced, further up they are floats: exp_avg has a
sign, 3 bits of exponent and 4 of mantissa, the root of exp_avg_sq 3 and 5. So neighbors are at most 1/16 and
1/32 of a value apart where it is large, and 1/4000 and 1/8000 of the largest near zero.

Numba keeps compiled kernels for as long as their own file is unchanged: after a change here, touch it.

Source: 8-bit Optimizers via Block-wise Quantization (Dettmers et al., 2021) for blocks and nonlinear codes;
ITU-T G.711 (1988), mu-law, for codes that are floats with an offset; https://github.com/skeeto/hash-prospector
for the factors and shifts of the hash, `lowbias32`, to which a second word of key is added between rounds.
"""

from __future__ import annotations

MEAN_SHIFT, ROOT_SHIFT = 19, 18
"""Bits of an fp32 number below those of a code: a mantissa of 4 and of 5 bits stays."""
MEAN_TOP, ROOT_TOP = 247.0, 251.0
"""The values, in units, that the largest codes, 127 and 255, stand for."""
SMALLEST_UNIT = 2.0**-126
"""The smallest unit, whose reciprocal is finite. Moments below it are far below any `eps`."""
HASH_FACTORS = (0x7FEB352D, 0x846CA68B)
HIGH_FACTOR = 0x9E3779B9
"""Spreads the high half of an element's index over the second word of the key."""
ONE_BITS, NAN_BITS = 0x3F800000, 0x7FC00000
"""The bits of 1 and of NaN in fp32."""
