"""MXFP4 inside kernels: E2M1 codes with one UE8M0 scale byte per 32 elements."""

import triton
import triton.language as tl

# Elements of a token, of one scale group, and packed bytes of each. constexpr: kernels read them.
DIM = tl.constexpr(128)
GROUPS = tl.constexpr(4)
GROUP = tl.constexpr(32)
PACKED = tl.constexpr(64)


@triton.jit
def scale_to_float(byte):
    """2^(byte - 127) as fp32 of int32 scale bytes; 0 is the denormal 2^-127 and 255 is NaN."""
    bits = tl.where(byte == 255, 0x7FC00000, tl.where(byte == 0, 0x00400000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_to_float(code):
    """fp32 of int32 E2M1 codes 0..15."""
    magnitude = code & 7
    # Codes from 2 (one) on are an fp32 exponent and its top mantissa bit, shifted; 1 is a half.
    bits = tl.where(magnitude >= 2, (magnitude << 22) + 0x3F000000, magnitude * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def quantize(x, ROWS: tl.constexpr):
    """Codes int32 [ROWS, 128] and scale bytes int32 [ROWS, 4] of fp32 x [ROWS, 128]."""
    groups = tl.reshape(x, [ROWS, GROUPS, GROUP])
    magnitude = groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    # NaN and infinity have the largest magnitude bits, so one integer maximum finds amax and every non-finite element.
    amax = tl.max(magnitude, axis=2)
    finite = amax < 0x7F800000
    amax = tl.maximum(amax, 0x01C00000)  # 6 * 2^-126
    byte = (amax >> 23) - 2 + ((amax & 0x7FFFFF) > 0x400000).to(tl.int32)
    byte = tl.where(finite, byte, 255)
    inverse = (tl.where(finite, 254 - byte, 1) << 23).to(tl.float32, bitcast=True)
    y = tl.abs(groups) * inverse[:, :, None]
    # Midpoints between neighbours; a tie goes to the even code, hence the mix of > and >=.
    code = (
        (y > 0.25).to(tl.int32)
        + (y >= 0.75).to(tl.int32)
        + (y > 1.25).to(tl.int32)
        + (y >= 1.75).to(tl.int32)
        + (y > 2.5).to(tl.int32)
        + (y >= 3.5).to(tl.int32)
        + (y > 5.0).to(tl.int32)
    )
    sign = (groups.to(tl.int32, bitcast=True) >> 28) & 8
    code = tl.where(finite[:, :, None], code | sign, 0)
    return tl.reshape(code, [ROWS, DIM]), byte


@triton.jit
def dequantize(code, byte, ROWS: tl.constexpr):
    """fp32 [ROWS, 128] of codes int32 [ROWS, 128] and scale bytes int32 [ROWS, 4]."""
    value = tl.reshape(e2m1_to_float(code), [ROWS, GROUPS, GROUP]) * scale_to_float(byte)[:, :, None]
    return tl.reshape(value, [ROWS, DIM])


@triton.jit
def pack(code, ROWS: tl.constexpr):
    """Packed bytes uint8 [ROWS, 64] of codes int32 [ROWS, 128]: element 2b in byte b's low nibble."""
    low, high = tl.split(tl.reshape(code, [ROWS, PACKED, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpack(packed, ROWS: tl.constexpr):
    """Codes int32 [ROWS, 128] of packed bytes uint8 [ROWS, 64]."""
    byte = packed.to(tl.int32)
    return tl.reshape(tl.join(byte & 15, byte >> 4), [ROWS, DIM])
