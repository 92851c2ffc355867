"""Every kernel of the paged path compiles for every GPU family, without a GPU; on sm_90 it does not spill registers."""

import os

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from aot import SHARED_MEMORY, TARGETS, compile_kernel, stack_bytes  # noqa: E402

from sparse_prefill.triton import attention, fill, regions, stage, unions  # noqa: E402

# Stack bytes of a thread that are accepted. One register may be put aside outside the loops. One warp a row of head_dim 256
# holds [16, 256] fp32 and is fastest all the same: on an H200 4.0 ms, and 5.4 with four warps. fp32 is multiplied without tensor
# cores, to be exact: it is right, not tuned.
SPILLS = {"rows 256": 400, "fp32": 4096}
POINTERS = {
    "pages": "*i32", "indptr": "*i32", "owners": "*i32", "last_page_len": "*i32", "lists": "*i32", "counts": "*i32",
    "bits": "*u8", "table": "*i32", "regions": "*i32", "selected": "*i32", "positions": "*i64", "k_scale": "*fp32",
    "v_scale": "*fp32", "scale_log2": "fp32", "kept": "*i32",
}  # fmt: skip


def types(kernel, **more):
    return {name: "i32" for name in kernel.arg_names} | POINTERS | more


def aligned(kernel):
    """Contiguous tensors of rows of multiples of 16 elements, as engines pass them."""
    return [name for name in kernel.arg_names if name.startswith("stride") or name in ("query", "cache", "lists", "bits", "out")]


def check_spills(compiled, target, name=""):
    if target == "sm_90":
        assert stack_bytes(compiled) <= SPILLS.get(name, 8)


def attention_constants(target, heads, dim, dtype, fp8, many_rows):
    d0, d1 = attention.padded_dims(dim)
    itemsize = 4 if dtype == "fp32" else 2
    walks = attention.walks(dim, itemsize, fp8, many_rows, SHARED_MEMORY[target])
    native = fp8 and target in ("sm_90", "sm_100", "sm_120")
    constants = dict(HEADS=heads, ROWS=8, DIM=dim, D0=d0, D1=d1, FP8=fp8, NATIVE=native, IEEE=dtype == "fp32")
    if not fp8:
        constants |= dict(k_scale=None, v_scale=None)
    return walks, constants


COMMON = [(16, 192, "bf16", False), (3, 128, "fp16", False), (8, 192, "bf16", True), (8, 64, "fp32", False)]
ONLY_HOPPER = [
    (16, 64, "bf16", False), (16, 128, "bf16", False), (16, 256, "bf16", False), (16, 192, "fp16", False),
    (1, 128, "bf16", False), (16, 128, "fp16", True), (16, 96, "bf16", False),
]  # fmt: skip
CASES = [(target, *case) for target in TARGETS for case in COMMON + (ONLY_HOPPER if target == "sm_90" else [])]


@pytest.mark.parametrize("target,heads,dim,dtype,fp8", CASES)
def test_union_kernel(target, heads, dim, dtype, fp8):
    if dtype == "fp32":
        pytest.skip("fp32 is walked row by row")
    kernel = attention._union_kernel
    (walk, _), constants = attention_constants(target, heads, dim, dtype, fp8, True)
    constants["HEADS"] = heads = min(heads, attention.union_heads(SHARED_MEMORY[target]))
    constants |= dict(GROUP=max(triton.next_power_of_2(heads), 2), TOKENS=walk.tokens, STAGES=walk.stages)
    names = types(kernel, query=f"*{dtype}", cache="*u8" if fp8 else f"*{dtype}", out=f"*{dtype}")
    compiled = compile_kernel(kernel, target, names, constants, aligned(kernel), num_warps=walk.warps)
    check_spills(compiled, target, dtype)


@pytest.mark.parametrize("many_rows", [False, True])
@pytest.mark.parametrize("target,heads,dim,dtype,fp8", CASES)
def test_row_kernel(target, many_rows, heads, dim, dtype, fp8):
    kernel = attention._row_kernel
    (_, walk), constants = attention_constants(target, heads, dim, dtype, fp8, many_rows)
    constants |= dict(GROUP=max(triton.next_power_of_2(heads), 16), TOKENS=walk.tokens, STAGES=walk.stages, DECIDED=True)
    names = types(kernel, query=f"*{dtype}", cache="*u8" if fp8 else f"*{dtype}", out=f"*{dtype}")
    compiled = compile_kernel(kernel, target, names, constants, aligned(kernel), num_warps=walk.warps)
    check_spills(compiled, target, f"rows {dim}" if many_rows and dim == 256 else dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("heads,dim", [(h, d) for h in (16, 8) for d in (64, 128, 192, 256)])
def test_hopper_union_kernel(heads, dim, dtype):
    from triton.experimental.gluon import language as gl

    from sparse_prefill.triton import attention_hopper

    kernel = attention_hopper._union_kernel
    d0, d1 = attention.padded_dims(dim)
    group = 16 if heads > 8 else 8
    walk = attention_hopper._WALKS[group // 8, dim]
    atom = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    names = types(kernel, descriptor=f"tensordesc<{dtype}[8, 64],{atom!r}>", words="*i64", query=f"*{dtype}", out=f"*{dtype}")
    constants = dict(HEADS=heads, GROUP=group, D0=d0, D1=d1, TOKENS=walk.tokens, STAGES=walk.stages)
    constants |= attention_hopper.registers(group)
    compiled = compile_kernel(kernel, "sm_90", names, constants, [*aligned(kernel), "words"], num_warps=4, maxnreg=walk.registers)
    check_spills(compiled, "sm_90")
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "cp.async.bulk.tensor" in compiled.asm["ptx"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("slots,few_tiles", [(256, False), (2048, False), (2048, True), (8192, True)])
def test_build_unions(target, slots, few_tiles):
    kernel = unions._build_unions_kernel
    width, warps = unions.BUILD_FEW if few_tiles else unions.BUILD_MANY
    constants = dict(SLOTS=slots, ROWS=8, WIDTH=width, CHUNK=256, COST=unions.UNION_COST, PAD=unions.PADDING)
    compiled = compile_kernel(kernel, target, types(kernel, table="*i64"), constants, num_warps=warps)
    check_spills(compiled, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("one_owner", [False, True])
def test_fill(target, one_owner):
    kernel = fill._fill_prefill_pages_kernel
    constants = dict(BLOCK_SIZE=64, HEADS=16, DIM=192, ONE_OWNER=one_owner, IDS=True, IDS_BLOCK=512, COPY_BLOCK=4096)
    constants |= dict(stride_dim=1, stride_region=1)
    names = types(kernel, query="*bf16", contiguous_query="*bf16")
    check_spills(compile_kernel(kernel, target, names, constants, ["query", "contiguous_query"], num_warps=fill.WARPS), target)
    compile_kernel(fill._store_owners_kernel, target, types(fill._store_owners_kernel), dict(BLOCK=1024))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fp8", [False, True])
def test_stage(target, fp8):
    kernel = stage._stage_prefill_pages_kernel
    constants = dict(WIDTH=384, FP8=fp8, NATIVE=fp8 and target in ("sm_90", "sm_100", "sm_120"), BLOCK=stage.COPY[0])
    names = types(kernel, cache="*u8" if fp8 else "*fp16", out="*bf16")
    check_spills(compile_kernel(kernel, target, names, constants, aligned(kernel), num_warps=stage.COPY[1]), target)


@pytest.mark.parametrize("target", TARGETS)
def test_regions(target):
    kernel = regions._append_own_region_kernel
    check_spills(compile_kernel(kernel, target, types(kernel, out="*i32"), dict(BLOCK=1024)), target)
    kernel = regions._fixup_positions_kernel
    check_spills(compile_kernel(kernel, target, types(kernel), dict(BLOCK=4096), num_warps=16), target)
