"""Sparse-attention prefill as torch.library ops: MXFP4 index keys -> logits -> regions -> page ids -> paged attention."""

if __name__ != "sparse_prefill":
    # From the source tree `import ops` would find this folder too, and define every op a second time.
    raise ImportError(f"this package was imported as {__name__!r}, must be imported as 'sparse_prefill': install it first")

from .indexer.chunks import (
    FP4PrefillMetadata,
    PrefillChunk,
    PrefillMetadata,
    PrefillPlans,
    build_prefill_chunks,
    local_key_counts,
    prefill_workspace_bytes,
    prepare_prefill_metadata,
)
from .indexer.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from .indexer.prefill_chunks import prefill_chunks
from .indexer.score_keys import score_keys
from .indexer.select_keys import select_keys
from .indexer.stage_keys import stage_keys
from .indexer.store_index_keys import store_index_keys
from .library import splitting_ops
from .pages.attention import paged_attention
from .pages.fill import fill_prefill_pages
from .pages.plan import CompactPagedPrefill, PagedPrefillMetadata
from .pages.regions import append_own_region, compact_page_metadata, fixup_positions
from .pages.stage import StagedPrefillPages, plan_staged_prefill_pages, stage_prefill_pages
from .pages.view import kv_page_count, kv_page_stride, view_sparse_kv_pages
from .sizes import mark_unbacked_sizes

__all__ = [
    "CompactPagedPrefill",
    "FP4PrefillMetadata",
    "PagedPrefillMetadata",
    "PrefillChunk",
    "PrefillMetadata",
    "PrefillPlans",
    "StagedPrefillPages",
    "append_own_region",
    "build_prefill_chunks",
    "compact_page_metadata",
    "dequantize_mxfp4",
    "fill_prefill_pages",
    "fixup_positions",
    "kv_page_count",
    "kv_page_stride",
    "local_key_counts",
    "mark_unbacked_sizes",
    "paged_attention",
    "plan_staged_prefill_pages",
    "prefill_chunks",
    "prefill_workspace_bytes",
    "prepare_prefill_metadata",
    "quantize_mxfp4",
    "score_keys",
    "select_keys",
    "splitting_ops",
    "stage_keys",
    "stage_prefill_pages",
    "store_index_keys",
    "view_sparse_kv_pages",
]
