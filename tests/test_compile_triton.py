"""The indexer's Triton kernels, compiled ahead of time for every supported GPU; on Hopper none may touch local memory.

Compiling needs no GPU. A spill, a stack frame or a local load in a Hopper kernel fails the test; a planted kernel that spills
shows that the check sees one.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

HOPPER = GPUTarget("cuda", 90, 32)
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": HOPPER,
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@triton.jit
def spilling_kernel(x, y, N: tl.constexpr):
    """More values alive at once than a thread has registers."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(x + N + i)
    c = tl.load(x + 2 * N + i)
    scan = tl.cumsum(a, axis=0)
    tl.debug_barrier()
    tl.store(y + i, scan * b + c + tl.sum(a, axis=0) * tl.cumsum(b, axis=0) + tl.cumsum(c, axis=0) * a)


def compile_kernel(kernel, types, constants, target, aligned=(), source=ASTSource, **options):
    """A compiled kernel; pointers and the integers named in ``aligned`` are multiples of 16."""
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    pairs = [(i,) for i, n in enumerate(names) if signature[n].startswith("*") and aligned is not None or n in (aligned or ())]
    attributes = {p: [["tt.divisibility", 16]] for p in pairs}
    code = source(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attributes)
    if target.backend == "hip":
        options.pop("maxnreg", None)
    return triton.compile(code, target=target, options=options)


def _dump(flag, path):
    return subprocess.run([TOOLS / "cuobjdump", flag, path], capture_output=True, text=True, check=True).stdout


def local_memory(compiled):
    """Bytes of stack and local memory, and local loads and stores, of a compiled Hopper kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = _dump("-res-usage", file.name), _dump("-sass", file.name)
    stack, local = map(int, re.search(r"STACK:(\d+) .*LOCAL:(\d+)", usage).groups())
    return stack, local, len(re.findall(r"\b(?:LDL|STL)\b", code))


INTEGERS = (
    "first_row num_rows row_step q_row_stride q_head_stride scale_row_stride scale_head_stride weight_row_stride "
    "weight_head_stride window_first window_step first_key num_keys logits_stride total num_requests table_width num_blocks "
    "table_stride max_keys max_local world interleave gathered_stride key_stride num_columns num_words k keep_first keep_last "
    "out_step"
).split()
COMMON = dict.fromkeys(INTEGERS, "i32") | {
    "weight_scale": "fp32",
    "page_stride": "i64",
    "num_slots": "i64",
    "cache": "*u8",
    "payload": "*u8",
    "scales": "*u8",
    "packed": "*u8",
    "gathered": "*i32",
    "gathered_scales": "*u8",
    "block_table": "*i32",
    "cu_seq_lens": "*i32",
    "token_to_seq": "*i32",
    "all_cu": "*i32",
    "ks": "*i32",
    "ke": "*i32",
    "logits": "*fp32",
    "keys": "*bf16",
    "queries": "*bf16",
    "weights": "*fp32",
    "scaled_weights": "*fp32",
    "out": "*i32",
    "marks": "*u32",
    "lists": "*i32",
    "found": "*i32",
    "slots": "*i64",
    "q": "*u8",
    "q_scale": "*u8",
}


def cases():
    """Name, kernel, types, constants and options as the launchers give them."""
    from sparse_prefill.triton import score_keys, select_keys, stage_keys, store_index_keys

    yield "store", store_index_keys.store_kernel, {}, {"BLOCK": 32, "SCAN": 128}, {"num_warps": 8}, ("page_stride",)
    for aligned in (("page_stride",), None):
        word = "word" if aligned else "byte"
        yield f"stage-{word}", stage_keys.stage_kernel, {}, {}, {"num_warps": 4}, aligned
        yield f"pack-{word}", stage_keys.pack_kernel, {}, {"BLOCK": 64}, {"num_warps": 4}, aligned
    yield "restore-word", stage_keys.restore_kernel, {"payload": "*i32"}, {"WORD": 4}, {"num_warps": 4}, ()
    yield "restore-byte", stage_keys.restore_kernel, {"gathered": "*u8"}, {"WORD": 1}, {"num_warps": 4}, ()
    yield "decode-keys", score_keys.decode_keys_kernel, {}, {}, {"num_warps": 4}, ()
    for heads, padded in ((64, 64), (32, 32), (1, 16), (128, 128)):
        options = {"num_warps": max(4, padded // 8)}
        constants = {"HEADS": heads, "PADDED": padded}
        kernel = score_keys.decode_queries_kernel
        yield f"decode-mxfp4-{heads}", kernel, {}, constants | {"QUANTIZED": True}, options, ("q_row_stride", "q_head_stride")
        types = {"q": "*bf16", "q_scale": "*bf16", "weights": "*bf16"}
        yield f"decode-bf16-{heads}", kernel, types, constants | {"QUANTIZED": False}, options, ("q_row_stride", "q_head_stride")
    config = score_keys.EXACT
    for heads in (16, 32, 64, 128):
        rows = config.columns // heads
        constants = {"HEADS": heads, "ROWS": rows, "BLOCK": config.block_keys, "SPAN": config.span, "STAGES": config.num_stages}
        options = {"num_warps": config.num_warps, "maxnreg": config.max_registers}
        yield f"score-{heads}", score_keys.score_kernel, {}, constants, options, ("logits_stride",)
    yield "fill", score_keys.fill_kernel, {}, {"BLOCK": 4096}, {"num_warps": 4}, ("logits_stride",)
    config = select_keys.SELECT
    for k in (512, 1024, 2048, 4096):
        for keep in (False, True):
            for kernel, (constants, options) in select_keys.launch_options(k, 65536, keep, config).items():
                case = f"{kernel}-{k}-{'keep' if keep else 'top'}"
                yield case, getattr(select_keys, f"{kernel}_kernel"), {}, constants, options, ("logits_stride",)


@pytest.mark.parametrize("name", list(TARGETS))
def test_every_kernel_compiles(name):
    target, seen = TARGETS[name], {}
    for case, kernel, types, constants, options, aligned in cases():
        if name == "sm_90" and case.startswith("score-"):
            continue  # score_hopper serves these
        options = {n: v for n, v in options.items() if v is not None}
        compiled = compile_kernel(kernel, COMMON | types, constants, target, aligned, **options)
        if name == "sm_90":
            seen[case] = local_memory(compiled)
    assert not {case: used for case, used in seen.items() if any(used)}


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_hopper_scorer_compiles_without_spills(heads):
    gluon = pytest.importorskip("triton.experimental.gluon._runtime")
    from triton.experimental.gluon import language as gl

    from sparse_prefill.triton import score_hopper
    from sparse_prefill.triton.score_keys import HOPPER as config
    from sparse_prefill.triton.score_keys import rows_per_tile

    rows = rows_per_tile(config, heads)
    half = rows * heads // 2
    layouts = [gl.NVMMASharedLayout.get_default_for([n, 128], gl.bfloat16) for n in (half, config.block_keys)]
    descriptors = {
        "queries": f"tensordesc<bf16[{half}, 128],{layouts[0]!r}>",
        "keys": f"tensordesc<bf16[{config.block_keys}, 128],{layouts[1]!r}>",
    }
    constants = {
        "HEADS": heads, "ROWS": rows, "BLOCK": config.block_keys, "SPAN": config.span, "STAGES": config.num_stages,
        "WARPS": config.num_warps,
    }  # fmt: skip
    compiled = compile_kernel(
        score_hopper.score_kernel, COMMON | descriptors, constants, HOPPER, ("logits_stride",), gluon.GluonASTSource,
        num_warps=config.num_warps,
    )  # fmt: skip
    assert local_memory(compiled) == (0, 0, 0)
    # One wait a half, not one an instruction: the assembler has not serialized the tensor core's instructions.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = _dump("-sass", file.name)
    assert code.count("WARPGROUP.DEPBAR") < code.count("HGMMA") / 4


def test_check_sees_a_planted_spill():
    compiled = compile_kernel(spilling_kernel, {"x": "*fp32", "y": "*fp32"}, {"N": 8192}, HOPPER, num_warps=4, maxnreg=64)
    assert any(local_memory(compiled))
