"""MXFP4: E2M1 elements, 32 to a group, each group with one UE8M0 scale byte (OCP Microscaling formats, version 1.0)."""

from __future__ import annotations

import torch

HEAD_DIM = 128
GROUP = 32
GROUPS = HEAD_DIM // GROUP
PACKED = HEAD_DIM // 2  # payload bytes a token

# E2M1 magnitudes by code; bit 3 of a nibble is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

# Halfway points between neighbouring magnitudes, and the code that a value exactly on one rounds to (ties to even code).
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """2^(e - 127) as fp32 for UE8M0 bytes e; e = 0 is the denormal 2^-127, e = 255 is NaN."""
    e = scale.to(torch.int32)
    bits = torch.where(e == 0, 1 << 22, e << 23)
    bits = torch.where(e == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """fp32 element values [..., 2*n] of packed bytes [..., n]: element 2b is byte b's low nibble, 2b+1 its high one."""
    # One look-up a byte, not a nibble: a 256 x 2 table.
    codes = torch.arange(256, device=packed.device)
    magnitude = torch.tensor(E2M1, device=packed.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1)
    table = magnitude[nibbles & 7] * (1 - 2 * (nibbles >> 3)).to(torch.float32)
    values = torch.nn.functional.embedding(packed.to(torch.int32).reshape(-1), table)
    return values.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def quantize_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes the last dimension (128) of ``x`` to MXFP4.

    Args:
        x: [..., 128], bf16, fp16 or fp32, any strides.

    Returns:
        ``(packed, scale)``: uint8 [..., 64] with element 2b in byte b's low nibble, and uint8 [..., 4], one UE8M0 byte for 32
        elements. The scale is the smallest power of two under which no element saturates (amax floored at 6 * 2^-126);
        elements round to nearest, ties to even. A group with an infinity or NaN becomes scale 255 (NaN) and zero elements.

    Raises:
        TypeError: ``x`` is no tensor or of another dtype.
        ValueError: its last dimension is not 128.
    """
    from .. import validation

    validation.quantize_mxfp4(x)
    groups = x.to(torch.float32).reshape(*x.shape[:-1], GROUPS, GROUP)
    finite = groups.isfinite().all(dim=-1, keepdim=True)
    groups = torch.where(finite, groups, 0.0)
    amax = groups.abs().amax(dim=-1, keepdim=True).clamp_min(6.0 * 2.0**-126)
    # amax = m * 2^x with 1 <= m < 2, read off its bits: e = x + 125 + (m > 1.5).
    bits = amax.view(torch.int32)
    e = (bits >> 23) - 2 + ((bits & 0x7FFFFF) > 0x400000).to(torch.int32)
    # Two exact steps: e goes up to 253, whose inverse power of two is a denormal.
    inverse = ((254 - e) << 23).view(torch.float32)
    scaled = groups.abs() * torch.where(e == 254, 2.0**-127, inverse)
    # The code is the number of midpoints below the value; a tie goes to the even one of its two codes.
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    for i, midpoint in enumerate(_MIDPOINTS):
        code += (scaled > midpoint) if i % 2 == 0 else (scaled >= midpoint)
    code |= groups.signbit().to(torch.uint8) << 3
    code = code.reshape(*x.shape[:-1], PACKED, 2)
    packed = code[..., 0] | (code[..., 1] << 4)
    scale = torch.where(finite, e, 255).squeeze(-1).to(torch.uint8)
    return packed, scale


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 values [..., 128] of MXFP4 ``packed`` uint8 [..., 64] and ``scale`` uint8 [..., 4]; NaN where a scale is 255."""
    from .. import validation

    validation.dequantize_mxfp4(packed, scale)
    values = unpack_e2m1(packed).reshape(*packed.shape[:-1], GROUPS, GROUP)
    return (values * scale_to_float(scale).unsqueeze(-1)).reshape(*packed.shape[:-1], HEAD_DIM)
