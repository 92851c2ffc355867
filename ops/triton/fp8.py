"""float8_e4m3fn bytes to numbers, on GPUs with and without the conversion instruction."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def decode_e4m3(byte, NATIVE: tl.constexpr):
    """uint8 bytes to fp16 values, exactly; 0x7f and 0xff are NaN."""
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    # The exponent and mantissa bits, moved to fp16's place, are the value times 2^-8, subnormals included.
    wide = byte.to(tl.int16)
    moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@functools.lru_cache(None)
def has_native_e4m3(device):
    """Whether Triton converts float8e4nv on this device: NVIDIA from compute capability 8.9 on."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
