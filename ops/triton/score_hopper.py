"""The scorer of Hopper GPUs, with its tensor core instructions scheduled by hand.

Triton waits for a dot before it runs what uses it. Here a tile has two halves of rows with an accumulator each, and the tensor
cores work on one while ReLU, weights and the sum over heads run on the other. Keys arrive by the bulk copy engine.
Everything else, the meaning included, is as in :mod:`score_keys`, whose kernel serves every other device.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Renamed after Triton 3.6.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _finish(dot, weight, target, offset, column, tile, BLOCK: gl.constexpr, HEADS: gl.constexpr):
    """ReLU, weights, sum over heads and store of one half's tile."""
    ROWS: gl.constexpr = dot.shape[1] // HEADS
    dot = gl.maximum(dot, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    logit = gl.sum(dot.reshape([BLOCK, ROWS, HEADS]), axis=2) + 0.0
    n = tile * BLOCK + column
    gl.store(target + (offset[None, :] + n[:, None]), logit)


@gluon.jit
def _fetch(keys, buffers, barriers, tile, count, BLOCK: gl.constexpr, STAGES: gl.constexpr, pred):
    """Starts the copy of the ``count``-th tile of this program."""
    barrier = barriers.index(count % STAGES)
    mbarrier.expect(barrier, BLOCK * 128 * (keys.dtype.primitive_bitwidth // 8), pred=pred)
    tma.async_copy_global_to_shared(keys, [tile * BLOCK, 0], barrier, buffers.index(count % STAGES), pred=pred)


@gluon.jit(do_not_specialize=["window_first", "window_step", "num_rows", "first_key", "num_keys"])
def score_kernel(
    queries,
    weights,
    keys,
    ks,
    ke,
    logits,
    window_first,
    window_step,
    num_rows,
    first_key,
    num_keys,
    logits_stride,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    HALF: gl.constexpr = ROWS // 2
    COLUMNS: gl.constexpr = HALF * HEADS
    WIDE: gl.constexpr = WARPS // 4
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, WIDE], instr_shape=[16, COLUMNS // WIDE, 256 // keys.dtype.primitive_bitwidth]
    )
    # The layout that a half's logits have after the sum over heads.
    shape = gl.sum(gl.zeros([BLOCK, COLUMNS], gl.float32, layout=mma).reshape([BLOCK, HALF, HEADS]), axis=2)
    out: gl.constexpr = shape.type.layout
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])

    block = gl.program_id(0).to(gl.int64)
    begin = gl.program_id(1) * (SPAN * BLOCK)
    end = gl.minimum(begin + SPAN * BLOCK, num_keys)
    # Rows past the last are the last again, in the queries too: they store the same bits to the same place.
    row = gl.minimum(block * ROWS + gl.arange(0, ROWS, layout=flat), num_rows - 1)
    start = gl.load(ks + window_first + row * window_step)
    stop = gl.load(ke + window_first + row * window_step)
    start = gl.minimum(gl.maximum(start, first_key), first_key + num_keys) - first_key
    stop = gl.minimum(gl.maximum(stop, first_key), first_key + num_keys) - first_key
    low = gl.maximum(start, begin)
    high = gl.minimum(stop, end)
    crosses = low < high
    first_tile = gl.min(gl.where(crosses, low, end), axis=0) // BLOCK
    last_tile = (gl.max(gl.where(crosses, high, begin), axis=0) + BLOCK - 1) // BLOCK
    some = gl.max(crosses.to(gl.int32), axis=0) > 0
    if some:
        q = gl.allocate_shared_memory(queries.dtype, [2, COLUMNS, 128], queries.layout)
        k = gl.allocate_shared_memory(keys.dtype, [STAGES, BLOCK, 128], keys.layout)
        barriers = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES + 1):
            mbarrier.init(barriers.index(i), count=1)
        _barrier()
        tiles = last_tile - first_tile
        q_barrier = barriers.index(STAGES)
        mbarrier.expect(q_barrier, 2 * COLUMNS * 128 * (queries.dtype.primitive_bitwidth // 8))
        first_query = (block * (ROWS * HEADS)).to(gl.int32)
        tma.async_copy_global_to_shared(queries, [first_query, 0], q_barrier, q.index(0))
        tma.async_copy_global_to_shared(queries, [first_query + COLUMNS, 0], q_barrier, q.index(1))
        for i in gl.static_range(STAGES - 1):
            _fetch(keys, k, barriers, first_tile + i, i, BLOCK, STAGES, i < tiles)

        place = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, mma))
        weight_a = gl.load(weights + block * (ROWS * HEADS) + place)
        weight_b = gl.load(weights + block * (ROWS * HEADS) + COLUMNS + place)
        column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, out))
        # 32-bit offsets from the first row keep addresses out of registers: the launcher sees to it that they fit.
        origin = logits + block * ROWS * logits_stride
        last = (num_rows - 1 - block * ROWS).to(gl.int32)
        half = gl.arange(0, HALF, layout=gl.SliceLayout(0, out))
        offset_a = gl.minimum(half, last) * logits_stride
        offset_b = gl.minimum(half + HALF, last) * logits_stride

        zero = gl.zeros([BLOCK, COLUMNS], gl.float32, layout=mma)
        mbarrier.wait(q_barrier, 0)
        # First tile: nothing to finish yet. No dot is in flight across the end of an iteration: the assembler would then run one
        # instruction at a time.
        mbarrier.wait(barriers.index(0), 0)
        dot_a = warpgroup_mma(k.index(0), q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
        done_a = warpgroup_mma_wait(0, deps=[dot_a])
        dot_b = warpgroup_mma(k.index(0), q.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
        _fetch(keys, k, barriers, first_tile + STAGES - 1, STAGES - 1, BLOCK, STAGES, STAGES - 1 < tiles)
        _finish(done_a, weight_a, origin, offset_a, column, first_tile, BLOCK, HEADS)
        done_b = warpgroup_mma_wait(0, deps=[dot_b])
        for i in range(1, tiles):
            mbarrier.wait(barriers.index(i % STAGES), (i // STAGES) & 1)
            dot_a = warpgroup_mma(k.index(i % STAGES), q.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
            # Every warp is through with the previous tile's keys: their place takes a new one.
            _barrier()
            _fetch(keys, k, barriers, first_tile + i + STAGES - 1, i + STAGES - 1, BLOCK, STAGES, i + STAGES - 1 < tiles)
            _finish(done_b, weight_b, origin, offset_b, column, first_tile + i - 1, BLOCK, HEADS)
            done_a = warpgroup_mma_wait(0, deps=[dot_a])
            dot_b = warpgroup_mma(k.index(i % STAGES), q.index(1).permute((1, 0)), zero, use_acc=False, is_async=True)
            _finish(done_a, weight_a, origin, offset_a, column, first_tile + i, BLOCK, HEADS)
            done_b = warpgroup_mma_wait(0, deps=[dot_b])
        _finish(done_b, weight_b, origin, offset_b, column, last_tile - 1, BLOCK, HEADS)
        for i in gl.static_range(STAGES + 1):
            mbarrier.invalidate(barriers.index(i))


def descriptor(tensor, rows):
    """A bulk copy descriptor of ``rows`` rows of a dense bf16 or fp8 [n, 128] tensor."""
    element = gl.bfloat16 if tensor.element_size() == 2 else gl.float8e4nv
    layout = gl.NVMMASharedLayout.get_default_for([rows, 128], element)
    return TensorDescriptor.from_tensor(tensor, [rows, 128], layout)
