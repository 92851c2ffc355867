"""Every check of arguments. One function per op, with the op's name and arguments, run before its kernel and its fake.

Shapes may be symbolic, so a check never branches on one: :func:`_require` raises at once where the condition is known and asks
the compiler to assert it where it is not.
"""

from __future__ import annotations

import torch

_INDEX = (torch.int32, torch.int64)
_INT32 = (torch.int32,)
_BYTE = (torch.uint8,)
_HALF = (torch.bfloat16, torch.float16)
_FLOAT = (torch.bfloat16, torch.float16, torch.float32)
_COPIED = (*_FLOAT, torch.int16, torch.uint16)  # moved bit for bit, never computed with
_FP8 = (torch.uint8, torch.float8_e4m3fn)
# Attention backends, and those of each device type, the one "auto" means first.
BACKENDS = ("auto", "torch", "triton", "flashinfer")
_DEVICE_BACKENDS = {"cpu": ("torch",), "cuda": ("triton", "flashinfer"), "meta": ("torch", "triton", "flashinfer")}
PRECISIONS = ("exact", "fast")
LAYOUTS = ("preshuffled64",)


def _require(condition, message):
    """Raises ValueError(message()) unless ``condition`` holds."""
    if torch.compiler.is_dynamo_compiling():
        # A public function being traced. What can't be decided here, a size the graph leaves open, the op's fake asserts.
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        if not guard_or_true(condition):
            raise ValueError(message())
    elif type(condition) is bool:
        if not condition:
            raise ValueError(message())
    else:
        torch._check_value(condition, message)


def shape_text(tensor) -> str:
    return "[" + ", ".join(str(size) for size in tensor.shape) + "]"


def is_tensor(op, name, value):
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} was {type(value).__name__}, must be a torch.Tensor")


def is_int(op, name, value, least=None):
    """Refuses what is no int (symbolic ints are) and, where known, what is less than ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} was {value!r} of type {type(value).__name__}, must be an int")
    if least is not None:
        _require(value >= least, lambda: f"{op}: {name} was {value}, must be at least {least}")


def is_number(op, name, value):
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} was {value!r} of type {type(value).__name__}, must be a number")


def one_of(op, name, value, allowed):
    if not isinstance(value, str):
        raise TypeError(f"{op}: {name} was {value!r} of type {type(value).__name__}, must be a str")
    if value not in allowed:
        raise ValueError(f"{op}: {name} was {value!r}, must be one of {', '.join(map(repr, allowed))}")


def _tensor(op, name, tensor, dtypes, dims, device=None):
    if not isinstance(tensor, torch.Tensor):
        is_tensor(op, name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} was {tensor.dtype}, must be {allowed}")
    if tensor.dim() != dims:
        raise ValueError(f"{op}: {name} had {tensor.dim()} dimensions {shape_text(tensor)}, must have {dims}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{op}: {name} was on {tensor.device}, must be on {device} like the op's other tensors")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{op}: {name} was a tensor that requires grad under grad mode, must not require grad: the op is for inference"
            " only, call it under torch.no_grad() or torch.inference_mode()"
        )


def _size(op, name, tensor, dim, size, why):
    have = tensor.shape[dim]
    _require(have == size, lambda: f"{op}: {name} was {shape_text(tensor)}, must have size {size} in dimension {dim} ({why})")


def _at_least(op, name, tensor, size, why):
    have = tensor.shape[0]
    _require(have >= size, lambda: f"{op}: {name} was {shape_text(tensor)}, must have at least {size} entries ({why})")


def _unit_stride(op, name, tensor):
    stride = tensor.stride(-1)
    if not (type(stride) is int and stride == 1):
        # A dimension of one element has no stride to speak of.
        size = tensor.shape[-1]
        condition = stride == 1 if type(stride) is not int else size <= 1
        _require(condition, lambda: f"{op}: {name} had stride {stride} in its last dimension, must be 1")


def _contiguous(op, name, tensor):
    """A flat buffer: one dimension, dense."""
    _unit_stride(op, name, tensor)


def _dense(op, name, tensor, strides):
    """The strides of pages as stage_keys returns them; a dimension of one entry has any, and no pages have any."""
    if type(tensor.shape[0]) is int and tensor.shape[0] == 0:
        return
    for size, stride, dense in zip(tensor.shape, tensor.stride(), strides, strict=True):
        if (type(size) is int and size <= 1) or (type(stride) is int and stride == dense):
            continue
        _require(
            stride == dense,
            lambda: f"{op}: {name} had strides {tuple(tensor.stride())}, must be contiguous, as stage_keys returns it",
        )


def _index_cache(op, name, cache, device=None):
    _tensor(op, name, cache, _BYTE, 3, device)
    if tuple(cache.shape[1:]) != (64, 68):
        raise ValueError(f"{op}: {name} was {shape_text(cache)}, must be [num_blocks, 64, 68]")
    if cache.stride(2) != 1 or cache.stride(1) != 68:
        raise ValueError(f"{op}: {name} had strides {tuple(cache.stride())}, must be (page stride, 68, 1)")
    blocks, stride = cache.shape[0], cache.stride(0)
    if not (type(blocks) is int and blocks <= 1):
        _require(stride >= 4352, lambda: f"{op}: {name} had page stride {stride}, must be at least 4352 bytes")


def _kv_cache(op, name, cache, dtypes, device=None):
    _tensor(op, name, cache, dtypes, 4, device)
    heads, tokens, width = cache.shape[1:]
    _require(
        heads == 1,
        lambda: (
            f"{op}: {name} was {shape_text(cache)}, must be one KV group [blocks, 1, tokens, 2*dim]: slice it as cache[:, g:g+1]"
        ),
    )
    _require(
        tokens % 8 == 0,
        lambda: f"{op}: {name} had {tokens} tokens a block, must be a multiple of 8",
    )
    _require(width % 2 == 0, lambda: f"{op}: {name} had last dimension {width}, must be even (K, then V)")
    _unit_stride(op, name, cache)
    block, row = cache.stride(0), cache.stride(2)
    _require(row >= width, lambda: f"{op}: {name} had token stride {row}, must be at least 2*dim = {width}")
    _require(
        block % (8 * row) == 0,
        lambda: f"{op}: {name} had block stride {block}, must be a multiple of 8 token strides ({8 * row})",
    )


def _scale(op, name, scale, device):
    _tensor(op, name, scale, (torch.float32,), scale.dim() if isinstance(scale, torch.Tensor) else 1, device)
    if scale.numel() != 1:
        raise ValueError(f"{op}: {name} was {shape_text(scale)}, must hold one element")


def _kv_scales(op, cache, k_scale, v_scale):
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            _scale(op, name, scale, cache.device)
        elif cache.dtype in _FP8:
            raise ValueError(f"{op}: {name} was None, must be given for a float8_e4m3fn cache")


# Aliasing: checked on real tensors only, by the kernels.


def _span(tensor):
    """First and one-past-last byte a tensor may touch, relative to its storage."""
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    extent = 1
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        extent += (n - 1) * stride
    return first, first + extent * size


def _rows_apart(a, b):
    """Whether two tensors are column slices of rows of one common stride, with no column in common."""
    if a.dim() < 2 or b.dim() < 2 or a.element_size() != b.element_size():
        return False
    stride = a.stride(0)
    if stride != b.stride(0) or stride <= 0:
        return False
    spans = []
    for tensor in (a, b):
        inner = 1 + sum((n - 1) * s for n, s in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
        start = tensor.storage_offset() % stride
        if start + inner > stride:
            return False
        spans.append((start, start + inner))
    return spans[0][1] <= spans[1][0] or spans[1][1] <= spans[0][0]


def refuse_overlap(op, name, tensor, mutated_name, mutated):
    """Refuses a tensor that shares memory with one the op writes."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() != mutated.untyped_storage().data_ptr() or not (tensor.numel() and mutated.numel()):
        return
    (first, last), (begin, end) = _span(tensor), _span(mutated)
    if last <= begin or end <= first or _rows_apart(tensor, mutated):
        return
    raise ValueError(f"{op}: {name} was a tensor that overlaps {mutated_name}, must not share memory with what is written")


def refuse_internal_overlap(op, name, tensor):
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{op}: {name} was expanded (strides {tuple(tensor.stride())}), must have distinct memory for each element"
            )


# Public functions without an op of their own.


def quantize_mxfp4(x):
    op = "quantize_mxfp4"
    is_tensor(op, "x", x)
    _tensor(op, "x", x, _FLOAT, max(x.dim(), 1))
    _size(op, "x", x, -1, 128, "the index head dimension")


def dequantize_mxfp4(packed, scale):
    op = "dequantize_mxfp4"
    is_tensor(op, "packed", packed)
    _tensor(op, "packed", packed, _BYTE, max(packed.dim(), 1))
    _tensor(op, "scale", scale, _BYTE, packed.dim(), packed.device)
    _size(op, "packed", packed, -1, 64, "128 elements, two a byte")
    _size(op, "scale", scale, -1, 4, "one byte for 32 elements")
    for dim in range(packed.dim() - 1):
        _size(op, "scale", scale, dim, packed.shape[dim], "as in packed")


def layout(op, value):
    one_of(op, "layout", value, LAYOUTS)


# The ops.


def store_index_keys(keys, cache, slot_mapping):
    op = "store_index_keys"
    _index_cache(op, "cache", cache)
    _tensor(op, "keys", keys, (torch.bfloat16,), 2, cache.device)
    _size(op, "keys", keys, 1, 128, "the index head dimension")
    _unit_stride(op, "keys", keys)
    _tensor(op, "slot_mapping", slot_mapping, _INDEX, 1, cache.device)
    _size(op, "slot_mapping", slot_mapping, 0, keys.shape[0], "one slot a key")


def _block_table(op, cache, block_table, cu_name, cu):
    _tensor(op, "block_table", block_table, _INT32, 2, cache.device)
    _tensor(op, cu_name, cu, _INT32, 1, cache.device)
    _size(op, cu_name, cu, 0, block_table.shape[0] + 1, "one more than block_table has requests")


def stage_keys(cache, block_table, cu_seq_lens, token_to_seq):
    op = "stage_keys"
    _index_cache(op, "cache", cache)
    _block_table(op, cache, block_table, "cu_seq_lens", cu_seq_lens)
    _tensor(op, "token_to_seq", token_to_seq, _INT32, 1, cache.device)


def pack_keys(cache, block_table, local_cu_seq_lens, max_local_keys):
    op = "pack_keys"
    _index_cache(op, "cache", cache)
    _block_table(op, cache, block_table, "local_cu_seq_lens", local_cu_seq_lens)
    is_int(op, "max_local_keys", max_local_keys, 0)


def restore_keys(gathered, token_to_seq, cu_seq_lens, all_cu, world, interleave):
    op = "restore_keys"
    _tensor(op, "gathered", gathered, _BYTE, 2)
    _size(op, "gathered", gathered, 1, 68, "bytes a key")
    is_int(op, "world", world, 1)
    is_int(op, "interleave", interleave, 1)
    rows = gathered.shape[0]
    _require(
        rows % world == 0,
        lambda: f"{op}: gathered was {shape_text(gathered)}, must have a multiple of world = {world} rows",
    )
    _tensor(op, "token_to_seq", token_to_seq, _INT32, 1, gathered.device)
    _tensor(op, "cu_seq_lens", cu_seq_lens, _INT32, 1, gathered.device)
    _at_least(op, "cu_seq_lens", cu_seq_lens, 1, "one more than the number of requests")
    _tensor(op, "all_cu", all_cu, _INT32, 2, gathered.device)
    _size(op, "all_cu", all_cu, 0, world, "a row for each rank")
    _size(op, "all_cu", all_cu, 1, cu_seq_lens.shape[0], "as long as cu_seq_lens")


def _queries(op, q, q_scale, weights, device):
    if isinstance(q, torch.Tensor) and q.dtype == torch.uint8:
        if q_scale is None:
            raise ValueError(f"{op}: q_scale was None, must be given beside packed queries")
        _tensor(op, "q", q, _BYTE, 3, device)
        _size(op, "q", q, 2, 64, "128 elements, two a byte")
        _tensor(op, "q_scale", q_scale, _BYTE, 3, device)
        for dim, why in ((0, "as many rows as q"), (1, "as many heads as q")):
            _size(op, "q_scale", q_scale, dim, q.shape[dim], why)
        _size(op, "q_scale", q_scale, 2, 4, "one byte for 32 elements")
    else:
        _tensor(op, "q", q, (torch.uint8, *_HALF), 3, device)
        _size(op, "q", q, 2, 128, "the index head dimension")
        if q_scale is not None:
            raise ValueError(f"{op}: q_scale was given, must be None for queries of {q.dtype}")
    heads = q.shape[1]
    _require(
        1 <= heads and heads <= 128 if type(heads) is int else heads >= 1,
        lambda: f"{op}: q was {shape_text(q)}, must have 1 to 128 heads in dimension 1",
    )
    _tensor(op, "weights", weights, (torch.bfloat16, torch.float32), 2, device)
    _size(op, "weights", weights, 0, q.shape[0], "as many rows as q")
    _size(op, "weights", weights, 1, heads, "as many heads as q")


def _windows(op, ks, ke, rows, device):
    for name, tensor in (("ks", ks), ("ke", ke)):
        _tensor(op, name, tensor, _INT32, 1, device)
        _size(op, name, tensor, 0, rows, "one entry a row")


def _selection(op, k, keep_first, keep_last):
    is_int(op, "keep_first", keep_first, 0)
    is_int(op, "keep_last", keep_last, 0)
    _require(
        keep_first + keep_last <= k,
        lambda: f"{op}: keep_first + keep_last was {keep_first} + {keep_last}, must be at most k = {k}",
    )


def score_keys(q, q_scale, payload, scales, weights, ks, ke, weight_scale, precision):
    op = "score_keys"
    is_tensor(op, "q", q)
    _queries(op, q, q_scale, weights, q.device)
    _tensor(op, "payload", payload, _BYTE, 5, q.device)
    _tensor(op, "scales", scales, _BYTE, 4, q.device)
    for dim, size in enumerate((1, 4, 64, 16), 1):
        _size(op, "payload", payload, dim, size, "[pages, 1, 4, 64, 16]")
    for dim, size in enumerate((1, 4, 64), 1):
        _size(op, "scales", scales, dim, size, "[pages, 1, 4, 64]")
    _size(op, "scales", scales, 0, payload.shape[0], "as many pages as payload")
    _dense(op, "payload", payload, (4096, 4096, 1024, 16, 1))
    _dense(op, "scales", scales, (256, 256, 64, 1))
    _windows(op, ks, ke, q.shape[0], q.device)
    is_number(op, "weight_scale", weight_scale)
    one_of(op, "precision", precision, PRECISIONS)


def select_keys(logits, ks, ke, k, keep_first, keep_last):
    op = "select_keys"
    _tensor(op, "logits", logits, (torch.float32,), 2)
    _unit_stride(op, "logits", logits)
    _windows(op, ks, ke, logits.shape[0], logits.device)
    is_int(op, "k", k, 0)
    _selection(op, k, keep_first, keep_last)


def prefill_chunks(
    q,
    q_scale,
    weights,
    cache,
    out,
    sets,
    chunks,
    tiles,
    block_tables,
    cu_seq_lens,
    token_to_seq,
    ks,
    ke,
    all_cu,
    world,
    interleave,
    weight_scale,
    keep_first,
    keep_last,
    precision,
):
    op = "prefill_chunks"
    _index_cache(op, "cache", cache)
    device = cache.device
    _queries(op, q, q_scale, weights, device)
    _tensor(op, "out", out, _INT32, 2, device)
    _size(op, "out", out, 0, q.shape[0], "as many rows as q")
    _unit_stride(op, "out", out)
    for name, tensor, columns in (("sets", sets, 8), ("chunks", chunks, 4), ("tiles", tiles, 4)):
        _tensor(op, name, tensor, (torch.int64,), 2, torch.device("cpu"))
        _size(op, name, tensor, 1, columns, "a table of the plan")
    for name, tensor in (
        ("block_tables", block_tables),
        ("cu_seq_lens", cu_seq_lens),
        ("token_to_seq", token_to_seq),
        ("ks", ks),
        ("ke", ke),
        ("all_cu", all_cu),
    ):
        _tensor(op, name, tensor, _INT32, 1, device)
        _contiguous(op, name, tensor)
    _size(op, "ke", ke, 0, ks.shape[0], "as long as ks")
    one_rank(op, world)
    is_int(op, "interleave", interleave, 1)
    is_number(op, "weight_scale", weight_scale)
    _selection(op, out.shape[1], keep_first, keep_last)
    one_of(op, "precision", precision, PRECISIONS)


def one_rank(op, world):
    is_int(op, "world", world, 1)
    if world != 1:
        raise ValueError(f"{op}: world was {world}, must be 1: keys sharded over ranks are not supported yet")


def append_own_region(selected, positions):
    op = "append_own_region"
    _tensor(op, "selected", selected, _INT32, 2)
    _tensor(op, "positions", positions, _INDEX, 1, selected.device)
    _size(op, "positions", positions, 0, selected.shape[0], "one a row of selected")


def fixup_positions(positions, indptr, last_page_len, region_count):
    op = "fixup_positions"
    _tensor(op, "indptr", indptr, _INT32, 1)
    _tensor(op, "last_page_len", last_page_len, _INT32, 1, indptr.device)
    _tensor(op, "positions", positions, _INDEX, 1, indptr.device)
    is_int(op, "region_count", region_count, 1)
    _contiguous(op, "indptr", indptr)
    _contiguous(op, "last_page_len", last_page_len)
    _at_least(op, "last_page_len", last_page_len, positions.shape[0], "one a position")
    _size(op, "indptr", indptr, 0, last_page_len.shape[0] + 1, "one more than last_page_len")


def fill_prefill_pages(regions, table, owners, indptr, pages, block_size, query, contiguous_query, page_stride, start, num_pages):
    op = "fill_prefill_pages"
    _tensor(op, "regions", regions, _INT32, 2)
    device, rows = regions.device, regions.shape[0]
    _tensor(op, "table", table, _INT32, 2, device)
    _tensor(op, "owners", owners, _INT32, 1, device)
    _tensor(op, "indptr", indptr, _INT32, 1, device)
    _tensor(op, "pages", pages, _INT32, 1, device)
    for name, tensor in (("owners", owners), ("indptr", indptr), ("pages", pages)):
        _contiguous(op, name, tensor)
    _tensor(op, "query", query, _COPIED, 3, device)
    _tensor(op, "contiguous_query", contiguous_query, (query.dtype,), 3, device)
    _size(op, "owners", owners, 0, rows, "one a row of regions")
    _size(op, "query", query, 0, rows, "as many rows as regions")
    is_int(op, "start", start, 0)
    _at_least(op, "indptr", indptr, start + rows + 1, "start + rows + 1")
    _at_least(op, "contiguous_query", contiguous_query, start + rows, "start + rows")
    for dim in (1, 2):
        _size(op, "contiguous_query", contiguous_query, dim, query.shape[dim], "as in query")
    if not contiguous_query.is_contiguous():
        raise ValueError(f"{op}: contiguous_query had strides {tuple(contiguous_query.stride())}, must be contiguous")
    block_size_of_8(op, block_size)
    is_int(op, "page_stride", page_stride, 1)
    is_int(op, "num_pages", num_pages, 0)


def store_owners(owners, kept, start):
    op = "store_owners"
    _tensor(op, "kept", kept, _INT32, 1)
    _tensor(op, "owners", owners, _INT32, 1, kept.device)
    _contiguous(op, "owners", owners)
    _contiguous(op, "kept", kept)
    is_int(op, "start", start, 0)
    _at_least(op, "kept", kept, start + owners.shape[0], "start + owners")


def stage_prefill_pages(cache, pages, dtype, k_scale, v_scale):
    op = "stage_prefill_pages"
    _kv_cache(op, "cache", cache, (*_FLOAT, *_FP8))
    _tensor(op, "pages", pages, _INT32, 1, cache.device)
    _contiguous(op, "pages", pages)
    one_of(op, "dtype", dtype, ("bfloat16", "float16", "float32"))
    _kv_scales(op, cache, k_scale, v_scale)


def view_sparse_kv_pages(cache):
    _kv_cache("view_sparse_kv_pages", "cache", cache, (*_FLOAT, *_FP8))


def paged_attention(query, cache, pages, indptr, last_page_len, owners, out, scale, k_scale, v_scale, backend):
    op = "paged_attention"
    _tensor(op, "query", query, _FLOAT, 3)
    device = query.device
    _kv_cache(op, "cache", cache, (query.dtype, *_FP8), device)
    _kv_scales(op, cache, k_scale, v_scale)
    _tensor(op, "out", out, (query.dtype,), 3, device)
    rows = out.shape[0]
    _at_least(op, "query", query, rows, "as many as rows of out")
    for dim in (1, 2):
        _size(op, "out", out, dim, query.shape[dim], "as in query")
    width, dim = cache.shape[3], query.shape[2]
    _require(width == 2 * dim, lambda: f"{op}: cache was {shape_text(cache)}, must have last dimension 2*dim = {2 * dim}")
    _unit_stride(op, "query", query)
    _unit_stride(op, "out", out)
    for name, tensor, least, why in (
        ("indptr", indptr, rows + 1, "rows + 1"),
        ("last_page_len", last_page_len, rows, "one a row"),
        ("owners", owners, rows, "one a row"),
        ("pages", pages, 0, "pages"),
    ):
        _tensor(op, name, tensor, _INT32, 1, device)
        _contiguous(op, name, tensor)
        _at_least(op, name, tensor, least, why)
    is_number(op, "scale", scale)
    attention_backend(op, backend, device)


def attention_backend(op, backend, device):
    """Refuses a backend that ``device`` has not: none falls back to another."""
    one_of(op, "backend", backend, BACKENDS)
    allowed = _DEVICE_BACKENDS.get(device.type, ())
    if not allowed:
        raise ValueError(f"{op}: backend was {backend!r} on {device.type}, which has none; must run on cpu or cuda")
    if backend != "auto" and backend not in allowed:
        names = " or ".join(map(repr, ("auto", *allowed)))
        raise ValueError(f"{op}: backend was {backend!r} on {device.type}, must be {names} there")


def total_keys(op, value, payload):
    is_int(op, "total_keys", value, 0)
    columns = payload.shape[0] * 64
    _require(value <= columns, lambda: f"{op}: total_keys was {value}, must be at most 64 * pages = {columns}")


def block_table(op, tensor):
    is_tensor(op, "block_table", tensor)
    _tensor(op, "block_table", tensor, _INT32, 2)


def chunk(op, name, value):
    """A chunk's attributes, whatever its class: host ints first, then tensors of the sizes they give."""
    attributes = ("token_start", "token_end", "num_reqs", "total_seq_lens", "max_seqlen_k")
    tensors = ("block_table", "cu_seq_lens", "token_to_seq", "cu_seqlen_ks", "cu_seqlen_ke")
    for attribute in (*attributes, *tensors):
        if not hasattr(value, attribute):
            raise TypeError(f"{op}: {name} was {type(value).__name__}, must have an attribute {attribute}")
    for attribute in attributes:
        is_int(op, f"{name}.{attribute}", getattr(value, attribute), 0)
    if value.token_end < value.token_start:
        raise ValueError(f"{op}: {name}.token_end was {value.token_end}, must be at least token_start = {value.token_start}")
    for attribute in tensors:
        is_tensor(op, f"{name}.{attribute}", getattr(value, attribute))
    device = value.block_table.device
    _tensor(op, f"{name}.block_table", value.block_table, _INT32, 2, device)
    _size(op, f"{name}.block_table", value.block_table, 0, value.num_reqs, "num_reqs")
    rows = value.token_end - value.token_start
    for attribute, size, why in (
        ("cu_seq_lens", value.num_reqs + 1, "num_reqs + 1"),
        ("token_to_seq", value.total_seq_lens, "total_seq_lens"),
        ("cu_seqlen_ks", rows, "token_end - token_start"),
        ("cu_seqlen_ke", rows, "token_end - token_start"),
    ):
        tensor = getattr(value, attribute)
        _tensor(op, f"{name}.{attribute}", tensor, _INT32, 1, device)
        _size(op, f"{name}.{attribute}", tensor, 0, size, why)
    request_set = getattr(value, "request_set", None)
    if request_set is not None:
        is_int(op, f"{name}.request_set", request_set)


def plan_ranks(op, plans, world, interleave):
    if plans.world != world:
        raise ValueError(f"{op}: world was {world}, must be {plans.world}, for which the metadata was prepared")
    if plans.interleave != interleave:
        raise ValueError(f"{op}: interleave was {interleave}, must be {plans.interleave}, for which the metadata was prepared")


def plan_tables(op, rows, sets, chunks, tiles, block_tables, cu_seq_lens, token_to_seq, ks):
    """The host tables of a plan against the tensors they index: read by kernels, before anything is written."""
    if not chunks.shape[0]:
        return
    if not sets.shape[0]:
        raise ValueError(f"{op}: sets was {shape_text(sets)}, must have a row for each set that chunks names")
    set_index, token_start, token_end, window = chunks.unbind(1)
    requests, total, width, table, cu, key = sets[:, :6].unbind(1)
    for name, low, high, limit, what in (
        ("chunks", set_index, set_index + 1, sets.shape[0], "sets"),
        ("chunks", token_start, token_end, rows, "rows of q and out"),
        ("chunks", window, window + token_end - token_start, ks.shape[0], "entries of ks"),
        ("sets", table, table + requests * width, block_tables.shape[0], "entries of block_tables"),
        ("sets", cu, cu + requests + 1, cu_seq_lens.shape[0], "entries of cu_seq_lens"),
        ("sets", key, key + total, token_to_seq.shape[0], "entries of token_to_seq"),
    ):
        if bool((low < 0).any()) or bool((high < low).any()) or bool((high > limit).any()):
            raise ValueError(
                f"{op}: {name} reached {int(high.max())} {what}, must lie within the {limit} there are: was the metadata"
                " prepared for this step?"
            )
    if tiles.shape[0]:
        index, first, count, step = tiles.unbind(1)
        ok = bool((index >= 0).all()) and bool((index < chunks.shape[0]).all())
        ok = ok and bool((first >= 0).all()) and bool((count >= 0).all()) and bool((step >= 1).all())
        if not ok or bool((first + (count - 1) * step >= (token_end - token_start)[index]).any()):
            raise ValueError(f"{op}: tiles named rows outside their chunk, must be as prepare_prefill_metadata made them")


def kv_cache(op, cache):
    is_tensor(op, "cache", cache)
    _kv_cache(op, "cache", cache, (*_FLOAT, *_FP8))


def kv_table(op, table):
    is_tensor(op, "table", table)
    _tensor(op, "table", table, _INT32, 2)


def block_size_of_8(op, value):
    is_int(op, "block_size", value, 8)
    if value % 8:
        raise ValueError(f"{op}: block_size was {value}, must be a multiple of 8")


def row_range(op, owners, end, capacity):
    rows = owners.shape[0]
    _require(end <= rows, lambda: f"{op}: end was {end}, must be at most the {rows} rows of owners")
    _require(end <= capacity, lambda: f"{op}: end was {end}, must be at most the plan's {capacity} rows")


def chunk_regions(op, regions, region_count):
    _tensor(op, "regions", regions, _INT32, 2)
    _size(op, "regions", regions, 1, region_count, "the plan's region_count")


def cache_block(op, cache, block_size):
    kv_cache(op, cache)
    _size(op, "cache", cache, 2, block_size, "the plan's block_size")
