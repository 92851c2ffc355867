"""A step's chunks: how requests are cut, what every layer shares of the plan, and how much scratch memory it takes. Host code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from .. import validation
from .layout import KEY_BYTES, PAGE

# One logits tile holds at most this many bytes.
LOGITS_BYTES = 2**29


@dataclass(frozen=True)
class PrefillChunk:
    """Query rows of a step scored together, and the request set whose keys they are scored against.

    Attributes:
        block_table: int32 [R, width], index pages of each request, 64 keys each; any row stride.
        cu_seq_lens: int32 [R + 1], keys before each request of the set.
        token_to_seq: int32 [total_seq_lens], the request of each key.
        cu_seqlen_ks, cu_seqlen_ke: int32 [rows], each row's window in the staged keys.
        token_start, token_end: the chunk's rows in the step's token buffers.
        num_reqs: R.
        total_seq_lens: keys of the set; an upper bound of the device's cu_seq_lens[R].
        max_seqlen_k: the most keys one request has.
        request_set: names the set: neighbouring chunks with one number share staged keys.
        local_cu_seq_lens, max_local_total_seq_lens: this rank's share, with keys sharded over ranks: int32 [R + 1], and
            the most keys a rank holds, rounded up to a multiple of 64.
    """

    block_table: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor
    cu_seqlen_ks: torch.Tensor
    cu_seqlen_ke: torch.Tensor
    token_start: int
    token_end: int
    num_reqs: int
    total_seq_lens: int
    max_seqlen_k: int
    request_set: int | None = None
    local_cu_seq_lens: torch.Tensor | None = None
    max_local_total_seq_lens: int = 0


@dataclass(frozen=True)
class PrefillMetadata:
    """What :func:`prepare_prefill_metadata` takes; any object with these attributes does."""

    chunks: Sequence[Any]
    max_prefill_seq_len: int
    shardq_gather_indices: torch.Tensor | None = None


@dataclass(frozen=True)
class PrefillPlans:
    """Every chunk's geometry in a fixed number of tensors, so that any number of chunks is one graph.

    Attributes:
        sets: CPU int64 [sets, 8]: num_reqs, total_keys, table_width, table_offset, cu_offset, key_offset, max_local_keys,
            all_cu_offset; offsets count elements of the flat tensors below.
        chunks: CPU int64 [chunks, 4]: set, token_start, token_end, window_offset.
        tiles: CPU int64 [tiles, 4]: chunk, first_row, num_rows, row_step; rows count from the chunk's first.
        block_tables, cu_seq_lens, token_to_seq, ks, ke, all_cu: int32, flat, on the device.
        world, rank, interleave: what the plan was made for.
    """

    sets: torch.Tensor
    chunks: torch.Tensor
    tiles: torch.Tensor
    block_tables: torch.Tensor
    cu_seq_lens: torch.Tensor
    token_to_seq: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    all_cu: torch.Tensor
    world: int
    rank: int
    interleave: int


@dataclass(frozen=True)
class FP4PrefillMetadata:
    """What all layers of an attention group share in one step; made by :func:`prepare_prefill_metadata`, read-only."""

    plans: PrefillPlans
    max_prefill_seq_len: int
    shardq_gather_indices: torch.Tensor | None


def local_key_counts(n: int, world: int, interleave: int) -> list[int]:
    """How many of a request's ``n`` positions each of ``world`` ranks holds; position p is rank (p // interleave) % world's."""
    op = "local_key_counts"
    for name, value, least in (("n", n, 0), ("world", world, 1), ("interleave", interleave, 1)):
        validation.is_int(op, name, value, least)
    return [int(_local_counts(np.array([n]), world, interleave, rank)[0]) for rank in range(world)]


def _local_counts(lengths: np.ndarray, world: int, interleave: int, rank: int) -> np.ndarray:
    rounds = lengths // (interleave * world) * interleave
    return rounds + np.clip(lengths - rounds * world - rank * interleave, 0, interleave)


def prefill_workspace_bytes(
    max_keys: int,
    max_reqs: int,
    world: int,
    interleave: int,
    *,
    max_rows: int = 0,
    k: int = 0,
    page_sets: int = 1,
) -> int:
    """An upper bound of the scratch memory :func:`prefill_chunks` takes, in bytes.

    Args:
        max_keys: the most keys of one request set.
        max_reqs: the most requests of one set.
        world, interleave: the sharding of keys over ranks.
        max_rows, k: rows of a step and selections of each, where pending selections are counted in.
        page_sets: sets staged at once: 2 where the next set's exchange runs under this one's scoring.
    """
    op = "prefill_workspace_bytes"
    for name, value, least in (
        ("max_keys", max_keys, 0),
        ("max_reqs", max_reqs, 0),
        ("world", world, 1),
        ("interleave", interleave, 1),
        ("max_rows", max_rows, 0),
        ("k", k, 0),
        ("page_sets", page_sets, 1),
    ):
        validation.is_int(op, name, value, least)
    pages = -(-max_keys // PAGE) * PAGE
    if world == 1:
        keys = max_keys + pages
    else:
        keys = (world + 1) * (-(-max_keys // world) + max_reqs * interleave) + pages
    # The first term covers one logits tile of 2^29 bytes, decoded operands and the selection's own scratch.
    return 2**30 + KEY_BYTES * keys * page_sets + 8 * max_rows * k


def host_lengths(op: str, name: str, values) -> np.ndarray:
    """Non-negative host ints as an int64 array."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"{op}: {name} was on {values.device}, must be on the host: reading it would stall the device")
        values = values.tolist()
    try:
        values = list(values)
    except TypeError:
        raise TypeError(f"{op}: {name} was {type(values).__name__}, must be a sequence of ints") from None
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{op}: {name}[{index}] was {value!r} of type {type(value).__name__}, must be an int")
        if value < 0:
            raise ValueError(f"{op}: {name}[{index}] was {value}, must be at least 0")
    return np.array(values, dtype=np.int64)


def build_prefill_chunks(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    *,
    key_budget: int,
    logits_bytes: int = LOGITS_BYTES,
    compress_ratio: int = 1,
    own_region: bool = False,
    token_offset: int = 0,
    world: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> list[PrefillChunk]:
    """Cuts a step's prefill requests into chunks, from host lengths alone.

    Requests join a set while its keys stay within ``key_budget`` and rows * keys * 4 within ``logits_bytes``. A request too
    large for that makes a set alone, its rows cut into pieces that share the staged keys. A set without keys or rows makes no
    chunk, so its rows of ``out`` are not written: fill them with -1.

    Args:
        query_lens: rows of each request in this step.
        seq_lens: tokens of each request, this step's rows included; its keys are seq_len // compress_ratio.
        block_table: int32 [requests, width], index pages of each request (its own rank's), on the device the step runs on.
        key_budget: the most keys staged at once, unless one request alone has more.
        logits_bytes: bound of a chunk's fp32 logits.
        compress_ratio: tokens one index key stands for.
        own_region: a row's window ends before the region that holds it (pos // ratio), else after the last whole one
            ((pos + 1) // ratio).
        token_offset: the first prefill row in the step's token buffers (decode rows may come before).
        world, rank, interleave: sharding of the keys over ranks.

    Returns:
        A list of :class:`PrefillChunk`; tensors are on ``block_table``'s device.

    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "build_prefill_chunks"
    queries, lengths = host_lengths(op, "query_lens", query_lens), host_lengths(op, "seq_lens", seq_lens)
    validation.block_table(op, block_table)
    for name, value, least in (
        ("key_budget", key_budget, 1),
        ("logits_bytes", logits_bytes, 1),
        ("compress_ratio", compress_ratio, 1),
        ("token_offset", token_offset, 0),
    ):
        validation.is_int(op, name, value, least)
    _ranks(op, world, rank, interleave)
    for name, count in (("seq_lens", len(lengths)), ("block_table", block_table.shape[0])):
        if count != len(queries):
            raise ValueError(f"{op}: {name} had {count} requests, must have {len(queries)} like query_lens")
    if (late := np.nonzero(queries > lengths)[0]).size:
        i = late[0]
        raise ValueError(f"{op}: query_lens[{i}] was {queries[i]}, must be at most seq_lens[{i}] = {lengths[i]}")
    keys = lengths // compress_ratio
    held = _local_counts(keys, world, interleave, rank)
    if (short := np.nonzero(held > block_table.shape[1] * PAGE)[0]).size:
        i = short[0]
        raise ValueError(
            f"{op}: block_table had {block_table.shape[1]} pages a request, must have at least {-(-held[i] // PAGE)}"
            f" for the {held[i]} keys of request {i}"
        )

    chunks: list[PrefillChunk] = []
    token = token_offset
    first, request_set = 0, 0
    while first < len(queries):
        last, rows, total = first, 0, 0
        while last < len(queries):
            more_rows, more_keys = rows + int(queries[last]), total + int(keys[last])
            if more_keys > key_budget or more_rows * more_keys * 4 > logits_bytes:
                break
            last, rows, total = last + 1, more_rows, more_keys
        piece = rows
        if last == first:
            last, rows, total = first + 1, int(queries[first]), int(keys[first])
            piece = max(1, logits_bytes // (4 * total))
        if rows and total:
            part = slice(first, last)
            whole = _request_set(
                block_table[part],
                queries[part],
                lengths[part],
                keys[part],
                compress_ratio,
                own_region,
                world,
                rank,
                interleave,
            )
            for start in range(0, rows, piece):
                stop = min(start + piece, rows)
                chunks.append(
                    replace(
                        whole,
                        cu_seqlen_ks=whole.cu_seqlen_ks[start:stop],
                        cu_seqlen_ke=whole.cu_seqlen_ke[start:stop],
                        token_start=token + start,
                        token_end=token + stop,
                        request_set=request_set,
                    )
                )
            request_set += 1
        token += rows
        first = last
    return chunks


def _request_set(block_table, queries, lengths, keys, compress_ratio, own_region, world, rank, interleave) -> PrefillChunk:
    """One chunk of all rows of a request set."""

    def tensor(array):
        return torch.from_numpy(array.astype(np.int32)).to(block_table.device)

    def cumulative(counts):
        return np.concatenate(([0], np.cumsum(counts)))

    cu = cumulative(keys)
    rows = int(queries.sum())
    # The position of each row in its request: a request's last row is at seq_len - 1.
    ends = np.repeat(lengths - cumulative(queries)[1:], queries)
    position = ends + np.arange(rows)
    start = np.repeat(cu[:-1], queries)
    seen = position // compress_ratio if own_region else (position + 1) // compress_ratio
    local = None
    most = 0
    if world > 1:
        local = tensor(cumulative(_local_counts(keys, world, interleave, rank)))
        # Rank 0 always holds the most.
        most = -(-int(_local_counts(keys, world, interleave, 0).sum()) // PAGE) * PAGE
    return PrefillChunk(
        block_table=block_table,
        cu_seq_lens=tensor(cu),
        token_to_seq=tensor(np.repeat(np.arange(len(keys)), keys)),
        cu_seqlen_ks=tensor(start),
        cu_seqlen_ke=tensor(start + seen),
        token_start=0,
        token_end=rows,
        num_reqs=len(keys),
        total_seq_lens=int(cu[-1]),
        max_seqlen_k=int(keys.max()),
        local_cu_seq_lens=local,
        max_local_total_seq_lens=most,
    )


def _ranks(op, world, rank, interleave):
    validation.is_int(op, "world", world, 1)
    validation.is_int(op, "rank", rank, 0)
    validation.is_int(op, "interleave", interleave, 1)
    if rank >= world:
        raise ValueError(f"{op}: rank was {rank}, must be below world = {world}")


def prepare_prefill_metadata(metadata, world: int, rank: int, interleave: int) -> FP4PrefillMetadata:
    """Builds, once per step and outside any graph, what :func:`prefill_chunks` reads in every layer.

    Args:
        metadata: an object with ``chunks`` (see :class:`PrefillChunk`; any objects with its attributes), in row order,
            ``max_prefill_seq_len`` (int) and ``shardq_gather_indices`` (a tensor or None), which are carried through. A chunk
            without ``request_set`` is taken to share the set of a chunk with the same block table memory, ``num_reqs`` and
            ``total_seq_lens``.
        world, rank, interleave: sharding of the keys over ranks. Only world 1 is supported so far.

    Returns:
        An :class:`FP4PrefillMetadata`. Reads host values only; the device is not waited for.

    Raises:
        TypeError, ValueError: an argument or a chunk's attribute is not as above.
    """
    op = "prepare_prefill_metadata"
    for name in ("chunks", "max_prefill_seq_len", "shardq_gather_indices"):
        if not hasattr(metadata, name):
            raise TypeError(f"{op}: metadata was {type(metadata).__name__}, must have an attribute {name}")
    validation.is_int(op, "metadata.max_prefill_seq_len", metadata.max_prefill_seq_len, 0)
    _ranks(op, world, rank, interleave)
    validation.one_rank(op, world)

    sets: list[list[int]] = []
    chunks: list[list[int]] = []
    tiles: list[list[int]] = []
    tables, cus, keys, starts, stops = [], [], [], [], []
    known: dict[Any, int] = {}
    table_offset = cu_offset = key_offset = window_offset = 0
    row_end = 0
    for index, chunk in enumerate(metadata.chunks):
        validation.chunk(op, f"metadata.chunks[{index}]", chunk)
        if chunk.token_start < row_end:
            raise ValueError(
                f"{op}: metadata.chunks[{index}].token_start was {chunk.token_start}, must be at least {row_end}, where the"
                " chunk before it ends"
            )
        row_end = chunk.token_end
        name = getattr(chunk, "request_set", None)
        if name is None:
            name = (chunk.block_table.data_ptr(), chunk.num_reqs, chunk.total_seq_lens)
        if name not in known:
            known[name] = len(sets)
            width = chunk.block_table.shape[1]
            sets.append([chunk.num_reqs, chunk.total_seq_lens, width, table_offset, cu_offset, key_offset, 0, 0])
            tables.append(chunk.block_table.reshape(-1))
            cus.append(chunk.cu_seq_lens)
            keys.append(chunk.token_to_seq)
            table_offset += chunk.num_reqs * width
            cu_offset += chunk.num_reqs + 1
            key_offset += chunk.total_seq_lens
        row = sets[known[name]]
        if row[:2] != [chunk.num_reqs, chunk.total_seq_lens]:
            raise ValueError(
                f"{op}: metadata.chunks[{index}] had {chunk.num_reqs} requests and {chunk.total_seq_lens} keys, must have"
                f" {row[0]} and {row[1]} like the chunk before it with request set {name!r}"
            )
        rows = chunk.token_end - chunk.token_start
        step = max(1, LOGITS_BYTES // (4 * max(chunk.total_seq_lens, 1)))
        for first in range(0, rows, step):
            tiles.append([index, first, min(step, rows - first), 1])
        chunks.append([known[name], chunk.token_start, chunk.token_end, window_offset])
        window_offset += rows
        starts.append(chunk.cu_seqlen_ks)
        stops.append(chunk.cu_seqlen_ke)

    device = metadata.chunks[0].block_table.device if len(metadata.chunks) else None

    def table(rows, columns):
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), columns)

    def flat(parts):
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=device)

    plans = PrefillPlans(
        sets=table(sets, 8),
        chunks=table(chunks, 4),
        tiles=table(tiles, 4),
        block_tables=flat(tables),
        cu_seq_lens=flat(cus),
        token_to_seq=flat(keys),
        ks=flat(starts),
        ke=flat(stops),
        all_cu=torch.empty(0, dtype=torch.int32, device=device),
        world=world,
        rank=rank,
        interleave=interleave,
    )
    return FP4PrefillMetadata(plans, metadata.max_prefill_seq_len, metadata.shardq_gather_indices)
