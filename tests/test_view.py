import pytest
import reference as ref
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import HISTORY_LAYOUTS, generator, kv_cache

import sparse_prefill as sp

OPS = torch.ops.sparse_prefill
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


def filled(cache, gen):
    """Distinct-looking values everywhere in the storage."""
    ref.storage_bytes(cache).copy_(torch.randint(0, 120, ref.storage_bytes(cache).shape, generator=gen).to(torch.uint8))
    return cache


def same_values(a, b):
    view = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.view(view), b.view(view))


@given(
    st.integers(0, 2**32),
    st.sampled_from(HISTORY_LAYOUTS),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.sampled_from([8, 16, 24, 64]),
    st.sampled_from([1, 3, 64]),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 33),
)
def test_every_page_of_the_view_is_eight_tokens_of_its_block(seed, layout, dtype, blocks, tokens, dim, groups, group, offset):
    cache = filled(
        kv_cache(blocks, tokens, dim, dtype, layout=layout, groups=groups, group=group, offset=offset), generator(seed)
    )
    stride = ref.kv_page_stride(cache)
    assert sp.kv_page_stride(cache) == stride and sp.kv_page_count(cache) == ref.view_size(cache)
    k, v = sp.view_sparse_kv_pages(cache)
    element = cache.element_size()
    for half, first in ((k, 0), (v, dim)):
        assert half.shape == (ref.view_size(cache), 8, 1, dim) and half.dtype == cache.dtype
        assert half.stride() == (8 * cache.stride(2), cache.stride(2), 2 * dim, 1)
        assert half.storage_offset() == cache.storage_offset() + first
        assert half.data_ptr() == cache.data_ptr() + first * element
    for block in range(blocks):
        for page in range(tokens // 8):
            part = cache[block, 0, 8 * page : 8 * page + 8]
            assert same_values(k[block * stride + page, :, 0].contiguous(), part[:, :dim].contiguous())
            assert same_values(v[block * stride + page, :, 0].contiguous(), part[:, dim:].contiguous())


@pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
def test_views_see_later_writes(layout):
    cache = kv_cache(3, 16, 4, torch.float32, layout=layout, group=1)
    k, v = sp.view_sparse_kv_pages(cache)
    cache[2, 0, 9] = torch.arange(8.0)
    page = 2 * sp.kv_page_stride(cache) + 1
    assert k[page, 1, 0].tolist() == [0, 1, 2, 3] and v[page, 1, 0].tolist() == [4, 5, 6, 7]
    k[page, 1, 0] = 9.0
    assert cache[2, 0, 9].tolist() == [9, 9, 9, 9, 4, 5, 6, 7]


def test_a_contiguous_cache_has_no_gaps():
    cache = torch.zeros(5, 1, 16, 6)
    assert sp.kv_page_stride(cache) == 2 and sp.kv_page_count(cache) == 10


@pytest.mark.parametrize("shape, strides", [((3, 1, 16, 8), (16 * 8 + 4, 8, 8, 1)), ((2, 1, 8, 8), (100, 8, 8, 1))])
def test_a_block_stride_that_is_no_whole_number_of_pages_is_refused(shape, strides):
    cache = torch.zeros(1000).as_strided(shape, strides)
    for function in (sp.kv_page_stride, sp.view_sparse_kv_pages, sp.kv_page_count):
        with pytest.raises(ValueError, match="cache"):
            function(cache)


@pytest.mark.parametrize("tokens", [4, 9, 12])
def test_a_block_of_other_than_whole_regions_is_refused(tokens):
    with pytest.raises(ValueError, match="cache"):
        sp.view_sparse_kv_pages(torch.zeros(3, 1, tokens, 8))


def test_one_block_and_blocks_far_beyond_int32():
    assert sp.kv_page_count(torch.zeros(1, 1, 8, 2)) == 1
    cache = torch.empty(22_000 * 98_304, dtype=torch.bfloat16).as_strided((22_000, 1, 64, 256), (98_304, 256, 256, 1))
    k, v = sp.view_sparse_kv_pages(cache)
    cache[21_999, 0, 63, 255] = 3.0
    page = 21_999 * sp.kv_page_stride(cache) + 7
    assert v[page, 7, 0, 127] == 3.0
    assert k.shape[0] == ref.view_size(cache)


def test_meta_device():
    cache = torch.empty(3, 1, 16, 8, device="meta")
    k, v = OPS.view_sparse_kv_pages(cache)
    assert k.shape == v.shape == (6, 8, 1, 4) and k.stride() == (64, 8, 8, 1) and v.storage_offset() == 4
    assert k.device.type == "meta"


class TestCompiled:
    """A graph that reads through the view is right or raises: graph inputs, caches sliced in the graph, writes before it."""

    @pytest.fixture(autouse=True)
    def _fresh(self, fresh_compile):
        pass

    @pytest.mark.parametrize("layout", HISTORY_LAYOUTS)
    def test_graph_input(self, layout):
        cache = filled(kv_cache(3, 16, 4, torch.float32, layout=layout, group=1, offset=5), generator(0))

        def read(cache):
            k, v = sp.view_sparse_kv_pages(cache)
            return k[1] + 1, v[2] * 2

        for a, b in zip(torch.compile(read, fullgraph=True)(cache), read(cache), strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("offset", [0, 4])
    def test_group_sliced_inside_the_graph(self, offset):
        storage = torch.randn(offset + 3 * 16 * 2 * 8)
        full = storage[offset:].view(3, 16, 2, 8).transpose(1, 2)

        def read(full):
            k, v = sp.view_sparse_kv_pages(full[:, 1:2])
            return k[1] + 1, v[2] * 2

        expected = read(full)
        try:
            actual = torch.compile(read, fullgraph=True)(full)
        except Exception as error:  # the corner that torch gets wrong must raise, naming itself
            assert "outside the graph" in str(error) or "slice" in str(error)
            return
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)

    def test_a_custom_op_that_writes_the_cache_before_the_view(self):
        """Attention, fill and staging take the cache itself; the view beside them still sees the write."""
        cache = filled(kv_cache(3, 16, 4, torch.float32, layout="NHD", group=1), generator(0))
        kept = torch.zeros(4, dtype=torch.int32)

        def read(cache, kept):
            OPS.store_owners(torch.ones(2, dtype=torch.int32), kept, 1)
            k, _ = sp.view_sparse_kv_pages(cache)
            return k[1] + kept.sum()

        expected = read(cache, kept.clone())
        assert torch.equal(torch.compile(read, fullgraph=True)(cache, kept.clone()), expected)

    def test_an_aten_write_before_the_view_of_a_gapped_cache_is_right_or_raises(self):
        cache = filled(kv_cache(3, 16, 4, torch.float32, layout="NHD", group=1), generator(0))

        def read(cache):
            cache.mul_(2.0)
            k, v = sp.view_sparse_kv_pages(cache)
            return k[1] + 1, v[2] * 2

        clone = torch.empty(0).set_(cache.untyped_storage().clone(), cache.storage_offset(), cache.shape, cache.stride())
        expected = read(clone)
        try:
            actual = torch.compile(read, fullgraph=True)(cache)
        except Exception as error:
            assert "cache" in str(error)
            return
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
