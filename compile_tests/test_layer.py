"""The whole layer: one graph through both halves, equal to eager, for every size of a step."""

import pytest
import torch
from dump import graphs
from expecttest import assert_expected_inline
from layer import Layer, make_step, mark, plan_step
from torch._dynamo.testing import CompileCounterWithBackend

import sparse_prefill as sp

KV_BLOCKS, INDEX_PAGES = 64, 12

# Rows, keys, requests and chunks all change, down to 1 and 0: (query_lens, seq_lens, key_budget).
STEPS = [
    ([9, 20], [40, 100], 100),
    ([33], [300], 8),
    ([1], [9], 10),
    ([5, 1, 7], [5, 1, 7], 10),
    ([8] * 6, [16, 24, 8, 40, 80, 16], 4),
    ([], [], 4),
    ([100], [100], 100),
    ([1, 1], [64, 65], 64),
]


def steps():
    for seed, (query_lens, seq_lens, key_budget) in enumerate(STEPS):
        yield make_step(
            query_lens, seq_lens, kv_blocks=KV_BLOCKS, index_pages=INDEX_PAGES, key_budget=key_budget, seed=seed
        )


def same_state(eager, compiled, plans):
    assert torch.equal(eager.index_cache, compiled.index_cache)
    for name in ("pages", "indptr", "last_page_len", "owners", "query"):
        assert torch.equal(getattr(plans[0], name), getattr(plans[1], name)), name


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("max_rows", [256, None])
def test_one_compilation_serves_every_step(backend, max_rows):
    eager, module = Layer(KV_BLOCKS, INDEX_PAGES), Layer(KV_BLOCKS, INDEX_PAGES)
    plans = [sp.CompactPagedPrefill(None, max_rows=max_rows) for _ in range(2)]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for index, step in enumerate(steps()):
        for plan in plans:
            plan_step(plan, step)
        if index == 0:
            mark(step)
            if max_rows is None:  # buffers that grow change their sizes too
                sp.mark_unbacked_sizes(*(getattr(plans[1], name) for name in ("pages", "indptr", "last_page_len", "owners", "query")))
        want = eager(step, plans[0])
        got = compiled(step, plans[1])
        assert torch.equal(want, got)
        same_state(eager, module, plans)
    assert counter.frame_count == 1


def test_graphs():
    module = Layer(KV_BLOCKS, INDEX_PAGES)
    step = next(steps())
    plan = sp.CompactPagedPrefill(None, max_rows=256)
    plan_step(plan, step)
    mark(step)
    assert_expected_inline(graphs(module, step, plan), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_step_hidden: "f32[u0, 32][32, 1]", u1: "Sym(u1)", L_step_region_rows: "i64[u1][1]", L_self_parameters_index_key_: "f32[32, 128][128, 1]", L_self_buffers_index_cache_: "u8[12, 64, 68][4352, 68, 1]", u2: "Sym(u1)", L_step_slots: "i64[u1][1]", L_self_parameters_index_query_: "f32[32, 384][384, 1]", L_self_parameters_index_weight_: "f32[32, 3][3, 1]", u3: "Sym(u3)", L_step_metadata_plans_sets: "i64[u3, 8][8, 1]", u4: "Sym(u4)", L_step_metadata_plans_chunks: "i64[u4, 4][4, 1]", u5: "Sym(u5)", L_step_metadata_plans_tiles: "i64[u5, 4][4, 1]", u6: "Sym(u6)", L_step_metadata_plans_block_tables: "i32[u6][1]", u7: "Sym(u7)", L_step_metadata_plans_cu_seq_lens: "i32[u7][1]", u8: "Sym(u8)", L_step_metadata_plans_token_to_seq: "i32[u8][1]", u9: "Sym(u9)", L_step_metadata_plans_ks: "i32[u9][1]", u10: "Sym(u9)", L_step_metadata_plans_ke: "i32[u9][1]", u11: "Sym(u11)", L_step_metadata_plans_all_cu: "i32[u11][1]", u12: "Sym(u0)", L_step_positions: "i64[u0][1]", L_self_parameters_query_: "f32[32, 96][96, 1]", L_plan_pages: "i32[1280][1]", L_plan_indptr: "i32[257][1]", L_plan_last_page_len: "i32[256][1]", L_self_buffers_cache_: "bf16[64, 2, 16, 32][1024, 512, 32, 1]", u13: "Sym(u13)", u14: "Sym(u14)", L_step_table: "i32[u13, u14][u14, 1]", u15: "Sym(u0)", L_step_owners: "i32[u0][1]", L_plan_query: "bf16[256, 3, 16][48, 16, 1]", L_plan_owners: "i32[256][1]"):
        l_step_hidden = L_step_hidden
        l_step_region_rows = L_step_region_rows
        l_self_parameters_index_key_ = L_self_parameters_index_key_
        l_self_buffers_index_cache_ = L_self_buffers_index_cache_
        l_step_slots = L_step_slots
        l_self_parameters_index_query_ = L_self_parameters_index_query_
        l_self_parameters_index_weight_ = L_self_parameters_index_weight_
        l_step_metadata_plans_sets = L_step_metadata_plans_sets
        l_step_metadata_plans_chunks = L_step_metadata_plans_chunks
        l_step_metadata_plans_tiles = L_step_metadata_plans_tiles
        l_step_metadata_plans_block_tables = L_step_metadata_plans_block_tables
        l_step_metadata_plans_cu_seq_lens = L_step_metadata_plans_cu_seq_lens
        l_step_metadata_plans_token_to_seq = L_step_metadata_plans_token_to_seq
        l_step_metadata_plans_ks = L_step_metadata_plans_ks
        l_step_metadata_plans_ke = L_step_metadata_plans_ke
        l_step_metadata_plans_all_cu = L_step_metadata_plans_all_cu
        l_step_positions = L_step_positions
        l_self_parameters_query_ = L_self_parameters_query_
        l_plan_pages = L_plan_pages
        l_plan_indptr = L_plan_indptr
        l_plan_last_page_len = L_plan_last_page_len
        l_self_buffers_cache_ = L_self_buffers_cache_
        l_step_table = L_step_table
        l_step_owners = L_step_owners
        l_plan_query = L_plan_query
        l_plan_owners = L_plan_owners

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        le: "Sym(u0 <= 256)" = u0 <= 256
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 256 on node 'le'");  le = _assert_scalar_default_1 = None

        ge_1: "Sym(u1 >= 0)" = u1 >= 0
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_2 = None

        ge_2: "Sym(u1 >= 0)" = u2 >= 0
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_3 = None
        eq: "Sym(True)" = u2 == u1;  u2 = u1 = None
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u1) on node 'eq'");  eq = _assert_scalar_default_4 = None

        ge_3: "Sym(u3 >= 0)" = u3 >= 0;  u3 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_5 = None
        ge_4: "Sym(u4 >= 0)" = u4 >= 0;  u4 = None
        _assert_scalar_default_6 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_default_6 = None
        ge_5: "Sym(u5 >= 0)" = u5 >= 0;  u5 = None
        _assert_scalar_default_7 = torch.ops.aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u5 >= 0 on node 'ge_5'");  ge_5 = _assert_scalar_default_7 = None
        ge_6: "Sym(u6 >= 0)" = u6 >= 0;  u6 = None
        _assert_scalar_default_8 = torch.ops.aten._assert_scalar.default(ge_6, "Runtime assertion failed for expression u6 >= 0 on node 'ge_6'");  ge_6 = _assert_scalar_default_8 = None
        ge_7: "Sym(u7 >= 0)" = u7 >= 0;  u7 = None
        _assert_scalar_default_9 = torch.ops.aten._assert_scalar.default(ge_7, "Runtime assertion failed for expression u7 >= 0 on node 'ge_7'");  ge_7 = _assert_scalar_default_9 = None
        ge_8: "Sym(u8 >= 0)" = u8 >= 0;  u8 = None
        _assert_scalar_default_10 = torch.ops.aten._assert_scalar.default(ge_8, "Runtime assertion failed for expression u8 >= 0 on node 'ge_8'");  ge_8 = _assert_scalar_default_10 = None
        ge_9: "Sym(u9 >= 0)" = u9 >= 0
        _assert_scalar_default_11 = torch.ops.aten._assert_scalar.default(ge_9, "Runtime assertion failed for expression u9 >= 0 on node 'ge_9'");  ge_9 = _assert_scalar_default_11 = None
        ge_10: "Sym(u9 >= 0)" = u10 >= 0
        _assert_scalar_default_12 = torch.ops.aten._assert_scalar.default(ge_10, "Runtime assertion failed for expression u10 >= 0 on node 'ge_10'");  ge_10 = _assert_scalar_default_12 = None
        eq_1: "Sym(True)" = u10 == u9;  u10 = u9 = None
        _assert_scalar_default_13 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u10, u9) on node 'eq_1'");  eq_1 = _assert_scalar_default_13 = None
        ge_11: "Sym(u11 >= 0)" = u11 >= 0;  u11 = None
        _assert_scalar_default_14 = torch.ops.aten._assert_scalar.default(ge_11, "Runtime assertion failed for expression u11 >= 0 on node 'ge_11'");  ge_11 = _assert_scalar_default_14 = None

        ge_12: "Sym(u0 >= 0)" = u12 >= 0
        _assert_scalar_default_15 = torch.ops.aten._assert_scalar.default(ge_12, "Runtime assertion failed for expression u12 >= 0 on node 'ge_12'");  ge_12 = _assert_scalar_default_15 = None
        eq_2: "Sym(True)" = u12 == u0;  u12 = None
        _assert_scalar_default_16 = torch.ops.aten._assert_scalar.default(eq_2, "Runtime assertion failed for expression Eq(u12, u0) on node 'eq_2'");  eq_2 = _assert_scalar_default_16 = None
        ge_13: "Sym(u13 >= 0)" = u13 >= 0;  u13 = None
        _assert_scalar_default_17 = torch.ops.aten._assert_scalar.default(ge_13, "Runtime assertion failed for expression u13 >= 0 on node 'ge_13'");  ge_13 = _assert_scalar_default_17 = None
        ge_14: "Sym(u14 >= 0)" = u14 >= 0;  u14 = None
        _assert_scalar_default_18 = torch.ops.aten._assert_scalar.default(ge_14, "Runtime assertion failed for expression u14 >= 0 on node 'ge_14'");  ge_14 = _assert_scalar_default_18 = None
        ge_15: "Sym(u0 >= 0)" = u15 >= 0
        _assert_scalar_default_19 = torch.ops.aten._assert_scalar.default(ge_15, "Runtime assertion failed for expression u15 >= 0 on node 'ge_15'");  ge_15 = _assert_scalar_default_19 = None
        le_1: "Sym(u0 <= 256)" = u15 <= 256
        _assert_scalar_default_20 = torch.ops.aten._assert_scalar.default(le_1, "Runtime assertion failed for expression u15 <= 256 on node 'le_1'");  le_1 = _assert_scalar_default_20 = None
        eq_3: "Sym(True)" = u15 == u0;  u15 = None
        _assert_scalar_default_21 = torch.ops.aten._assert_scalar.default(eq_3, "Runtime assertion failed for expression Eq(u15, u0) on node 'eq_3'");  eq_3 = _assert_scalar_default_21 = None

        getitem_2: "f32[u1, 32][32, 1]" = l_step_hidden[l_step_region_rows];  l_step_region_rows = None
        matmul: "f32[u1, 128][128, 1]" = getitem_2 @ l_self_parameters_index_key_;  getitem_2 = l_self_parameters_index_key_ = None
        summaries: "bf16[u1, 128][128, 1]" = matmul.to(torch.bfloat16);  matmul = None

        store_index_keys = torch.ops.sparse_prefill.store_index_keys(summaries, l_self_buffers_index_cache_, l_step_slots);  summaries = l_step_slots = store_index_keys = None

        matmul_1: "f32[u0, 384][384, 1]" = l_step_hidden @ l_self_parameters_index_query_;  l_self_parameters_index_query_ = None
        view: "f32[u0, 3, 128][384, 128, 1]" = matmul_1.view(u0, 3, 128);  matmul_1 = None
        q: "bf16[u0, 3, 128][384, 128, 1]" = view.to(torch.bfloat16);  view = None

        weights: "f32[u0, 3][3, 1]" = l_step_hidden @ l_self_parameters_index_weight_;  l_self_parameters_index_weight_ = None

        selected: "i32[u0, 4][4, 1]" = torch.full((u0, 4), -1, dtype = torch.int32, device = device(type='cpu'))

        prefill_chunks = torch.ops.sparse_prefill.prefill_chunks(q, None, weights, l_self_buffers_index_cache_, selected, l_step_metadata_plans_sets, l_step_metadata_plans_chunks, l_step_metadata_plans_tiles, l_step_metadata_plans_block_tables, l_step_metadata_plans_cu_seq_lens, l_step_metadata_plans_token_to_seq, l_step_metadata_plans_ks, l_step_metadata_plans_ke, l_step_metadata_plans_all_cu, 1, 1, 0.08838834764831845, 1, 1, 'exact');  q = weights = l_self_buffers_index_cache_ = l_step_metadata_plans_sets = l_step_metadata_plans_chunks = l_step_metadata_plans_tiles = l_step_metadata_plans_block_tables = l_step_metadata_plans_cu_seq_lens = l_step_metadata_plans_token_to_seq = l_step_metadata_plans_ks = l_step_metadata_plans_ke = l_step_metadata_plans_all_cu = prefill_chunks = None

        regions: "i32[u0, 5][5, 1]" = torch.ops.sparse_prefill.append_own_region(selected, l_step_positions);  selected = None

        matmul_3: "f32[u0, 96][96, 1]" = l_step_hidden @ l_self_parameters_query_;  l_step_hidden = l_self_parameters_query_ = None
        view_1: "f32[u0, 2, 3, 16][96, 48, 16, 1]" = matmul_3.view(u0, 2, 3, 16);  matmul_3 = None
        query: "bf16[u0, 2, 3, 16][96, 48, 16, 1]" = view_1.to(torch.bfloat16);  view_1 = None

        fixup_positions = torch.ops.sparse_prefill.fixup_positions(l_step_positions, l_plan_indptr, l_plan_last_page_len, 5);  l_step_positions = fixup_positions = None

        cache: "bf16[64, 1, 16, 32][1024, 512, 32, 1]" = l_self_buffers_cache_[(slice(None, None, None), slice(0, 1, None))]

        value: "bf16[u0, 3, 16][96, 16, 1]" = query[(slice(None, None, None), 0)]

        fill_prefill_pages = torch.ops.sparse_prefill.fill_prefill_pages(regions, l_step_table, l_step_owners, l_plan_indptr, l_plan_pages, 16, value, l_plan_query, 4, 0, 254);  value = fill_prefill_pages = None

        store_owners = torch.ops.sparse_prefill.store_owners(l_step_owners, l_plan_owners, 0);  store_owners = None

        out: "bf16[u0, 3, 16][48, 16, 1]" = torch.empty((u0, 3, 16), dtype = torch.bfloat16, device = device(type='cpu'))

        paged_attention = torch.ops.sparse_prefill.paged_attention(l_plan_query, cache, l_plan_pages, l_plan_indptr, l_plan_last_page_len, l_plan_owners, out, 0.25, None, None, 'auto');  cache = paged_attention = None

        cache_1: "bf16[64, 1, 16, 32][1024, 512, 32, 1]" = l_self_buffers_cache_[(slice(None, None, None), slice(1, 2, None))];  l_self_buffers_cache_ = None

        value_1: "bf16[u0, 3, 16][96, 16, 1]" = query[(slice(None, None, None), 1)];  query = None

        fill_prefill_pages_1 = torch.ops.sparse_prefill.fill_prefill_pages(regions, l_step_table, l_step_owners, l_plan_indptr, l_plan_pages, 16, value_1, l_plan_query, 4, 0, 254);  regions = l_step_table = value_1 = fill_prefill_pages_1 = None

        store_owners_1 = torch.ops.sparse_prefill.store_owners(l_step_owners, l_plan_owners, 0);  l_step_owners = store_owners_1 = None

        out_1: "bf16[u0, 3, 16][48, 16, 1]" = torch.empty((u0, 3, 16), dtype = torch.bfloat16, device = device(type='cpu'));  u0 = None

        paged_attention_1 = torch.ops.sparse_prefill.paged_attention(l_plan_query, cache_1, l_plan_pages, l_plan_indptr, l_plan_last_page_len, l_plan_owners, out_1, 0.25, None, None, 'auto');  l_plan_query = cache_1 = l_plan_pages = l_plan_indptr = l_plan_last_page_len = l_plan_owners = paged_attention_1 = None

        stack: "bf16[u0, 2, 3, 16][96, 48, 16, 1]" = torch.stack([out, out_1], dim = 1);  out = out_1 = None
        return (stack,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "f32[u0, 32][32, 1]", arg2_1: "Sym(u1)", arg3_1: "i64[u1][1]", arg4_1: "f32[32, 128][128, 1]", arg5_1: "u8[12, 64, 68][4352, 68, 1]", arg6_1: "Sym(u1)", arg7_1: "i64[u1][1]", arg8_1: "f32[32, 384][384, 1]", arg9_1: "f32[32, 3][3, 1]", arg10_1: "Sym(u3)", arg11_1: "i64[u3, 8][8, 1]", arg12_1: "Sym(u4)", arg13_1: "i64[u4, 4][4, 1]", arg14_1: "Sym(u5)", arg15_1: "i64[u5, 4][4, 1]", arg16_1: "Sym(u6)", arg17_1: "i32[u6][1]", arg18_1: "Sym(u7)", arg19_1: "i32[u7][1]", arg20_1: "Sym(u8)", arg21_1: "i32[u8][1]", arg22_1: "Sym(u9)", arg23_1: "i32[u9][1]", arg24_1: "Sym(u9)", arg25_1: "i32[u9][1]", arg26_1: "Sym(u11)", arg27_1: "i32[u11][1]", arg28_1: "Sym(u0)", arg29_1: "i64[u0][1]", arg30_1: "f32[32, 96][96, 1]", arg31_1: "i32[1280][1]", arg32_1: "i32[257][1]", arg33_1: "i32[256][1]", arg34_1: "bf16[64, 2, 16, 32][1024, 512, 32, 1]", arg35_1: "Sym(u13)", arg36_1: "Sym(u14)", arg37_1: "i32[u13, u14][u14, 1]", arg38_1: "Sym(u0)", arg39_1: "i32[u0][1]", arg40_1: "bf16[256, 3, 16][48, 16, 1]", arg41_1: "i32[256][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None
        le: "Sym(u0 <= 256)" = arg0_1 <= 256
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 256 on node 'le'");  _assert_scalar_1 = None

        ge_1: "Sym(u1 >= 0)" = arg2_1 >= 0
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  _assert_scalar_2 = None

        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_1 = _assert_scalar_3 = None
        eq: "Sym(True)" = arg6_1 == arg2_1;  arg6_1 = arg2_1 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u1) on node 'eq'");  _assert_scalar_4 = None

        ge_3: "Sym(u3 >= 0)" = arg10_1 >= 0;  arg10_1 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_5 = None
        ge_4: "Sym(u4 >= 0)" = arg12_1 >= 0;  arg12_1 = None
        _assert_scalar_6 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_6 = None
        ge_5: "Sym(u5 >= 0)" = arg14_1 >= 0;  arg14_1 = None
        _assert_scalar_7 = torch.ops.aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u5 >= 0 on node 'ge_5'");  ge_5 = _assert_scalar_7 = None
        ge_6: "Sym(u6 >= 0)" = arg16_1 >= 0;  arg16_1 = None
        _assert_scalar_8 = torch.ops.aten._assert_scalar.default(ge_6, "Runtime assertion failed for expression u6 >= 0 on node 'ge_6'");  ge_6 = _assert_scalar_8 = None
        ge_7: "Sym(u7 >= 0)" = arg18_1 >= 0;  arg18_1 = None
        _assert_scalar_9 = torch.ops.aten._assert_scalar.default(ge_7, "Runtime assertion failed for expression u7 >= 0 on node 'ge_7'");  ge_7 = _assert_scalar_9 = None
        ge_8: "Sym(u8 >= 0)" = arg20_1 >= 0;  arg20_1 = None
        _assert_scalar_10 = torch.ops.aten._assert_scalar.default(ge_8, "Runtime assertion failed for expression u8 >= 0 on node 'ge_8'");  ge_8 = _assert_scalar_10 = None
        ge_9: "Sym(u9 >= 0)" = arg22_1 >= 0;  arg22_1 = None
        _assert_scalar_11 = torch.ops.aten._assert_scalar.default(ge_9, "Runtime assertion failed for expression u9 >= 0 on node 'ge_9'");  _assert_scalar_11 = None
        _assert_scalar_12 = torch.ops.aten._assert_scalar.default(ge_9, "Runtime assertion failed for expression u10 >= 0 on node 'ge_10'");  ge_9 = _assert_scalar_12 = None
        _assert_scalar_13 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u10, u9) on node 'eq_1'");  _assert_scalar_13 = None
        ge_11: "Sym(u11 >= 0)" = arg26_1 >= 0;  arg26_1 = None
        _assert_scalar_14 = torch.ops.aten._assert_scalar.default(ge_11, "Runtime assertion failed for expression u11 >= 0 on node 'ge_11'");  ge_11 = _assert_scalar_14 = None

        _assert_scalar_15 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u12 >= 0 on node 'ge_12'");  _assert_scalar_15 = None
        _assert_scalar_16 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u12, u0) on node 'eq_2'");  _assert_scalar_16 = None
        ge_13: "Sym(u13 >= 0)" = arg35_1 >= 0;  arg35_1 = None
        _assert_scalar_17 = torch.ops.aten._assert_scalar.default(ge_13, "Runtime assertion failed for expression u13 >= 0 on node 'ge_13'");  ge_13 = _assert_scalar_17 = None
        ge_14: "Sym(u14 >= 0)" = arg36_1 >= 0;  arg36_1 = None
        _assert_scalar_18 = torch.ops.aten._assert_scalar.default(ge_14, "Runtime assertion failed for expression u14 >= 0 on node 'ge_14'");  ge_14 = _assert_scalar_18 = None
        _assert_scalar_19 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u15 >= 0 on node 'ge_15'");  ge = _assert_scalar_19 = None
        _assert_scalar_20 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u15 <= 256 on node 'le_1'");  le = _assert_scalar_20 = None
        _assert_scalar_21 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u15, u0) on node 'eq_3'");  eq = _assert_scalar_21 = None

        index: "f32[u1, 32][32, 1]" = torch.ops.aten.index.Tensor(arg1_1, [arg3_1]);  arg3_1 = None
        mm: "f32[u1, 128][128, 1]" = torch.ops.aten.mm.default(index, arg4_1);  index = arg4_1 = None
        _to_copy: "bf16[u1, 128][128, 1]" = torch.ops.aten._to_copy.default(mm, dtype = torch.bfloat16);  mm = None

        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.store_index_keys.default, keys = _to_copy, slot_mapping = arg7_1, _cache_base_index = 0, _all_bases = [arg5_1]);  _to_copy = arg7_1 = None
        getitem_1: "u8[12, 64, 68][4352, 68, 1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None

        mm_1: "f32[u0, 384][384, 1]" = torch.ops.aten.mm.default(arg1_1, arg8_1);  arg8_1 = None
        view: "f32[u0, 3, 128][384, 128, 1]" = torch.ops.aten.view.default(mm_1, [arg0_1, 3, 128]);  mm_1 = None
        _to_copy_1: "bf16[u0, 3, 128][384, 128, 1]" = torch.ops.aten._to_copy.default(view, dtype = torch.bfloat16);  view = None

        mm_2: "f32[u0, 3][3, 1]" = torch.ops.aten.mm.default(arg1_1, arg9_1);  arg9_1 = None

        full: "i32[u0, 4][4, 1]" = torch.ops.aten.full.default([arg0_1, 4], -1, dtype = torch.int32, device = device(type='cpu'), pin_memory = False)

        auto_functionalized_v2_1 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.prefill_chunks.default, q = _to_copy_1, q_scale = None, weights = mm_2, cache = getitem_1, sets = arg11_1, chunks = arg13_1, tiles = arg15_1, block_tables = arg17_1, cu_seq_lens = arg19_1, token_to_seq = arg21_1, ks = arg23_1, ke = arg25_1, all_cu = arg27_1, world = 1, interleave = 1, weight_scale = 0.08838834764831845, keep_first = 1, keep_last = 1, precision = 'exact', _out_base_index = 0, _all_bases = [full]);  _to_copy_1 = mm_2 = arg11_1 = arg13_1 = arg15_1 = arg17_1 = arg19_1 = arg21_1 = arg23_1 = arg25_1 = arg27_1 = full = None
        getitem_3: "i32[u0, 4][4, 1]" = auto_functionalized_v2_1[1];  auto_functionalized_v2_1 = None

        append_own_region: "i32[u0, 5][5, 1]" = torch.ops.sparse_prefill.append_own_region.default(getitem_3, arg29_1);  getitem_3 = None

        mm_3: "f32[u0, 96][96, 1]" = torch.ops.aten.mm.default(arg1_1, arg30_1);  arg1_1 = arg30_1 = None
        view_1: "f32[u0, 2, 3, 16][96, 48, 16, 1]" = torch.ops.aten.view.default(mm_3, [arg0_1, 2, 3, 16]);  mm_3 = None
        _to_copy_2: "bf16[u0, 2, 3, 16][96, 48, 16, 1]" = torch.ops.aten._to_copy.default(view_1, dtype = torch.bfloat16);  view_1 = None

        auto_functionalized_v2_2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fixup_positions.default, positions = arg29_1, region_count = 5, _indptr_base_index = 0, _last_page_len_base_index = 1, _all_bases = [arg32_1, arg33_1]);  arg29_1 = None
        getitem_5: "i32[257][1]" = auto_functionalized_v2_2[1]
        getitem_6: "i32[256][1]" = auto_functionalized_v2_2[2];  auto_functionalized_v2_2 = None

        slice_1: "bf16[64, 1, 16, 32][1024, 512, 32, 1]" = torch.ops.aten.slice.Tensor(arg34_1, 1, 0, 1)

        select: "bf16[u0, 3, 16][96, 16, 1]" = torch.ops.aten.select.int(_to_copy_2, 1, 0)

        auto_functionalized_v2_3 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fill_prefill_pages.default, regions = append_own_region, table = arg37_1, owners = arg39_1, indptr = getitem_5, block_size = 16, query = select, page_stride = 4, start = 0, num_pages = 254, _pages_base_index = 0, _contiguous_query_base_index = 1, _all_bases = [arg31_1, arg40_1]);  select = None
        getitem_8: "i32[1280][1]" = auto_functionalized_v2_3[1]
        getitem_9: "bf16[256, 3, 16][48, 16, 1]" = auto_functionalized_v2_3[2];  auto_functionalized_v2_3 = None

        auto_functionalized_v2_4 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.store_owners.default, owners = arg39_1, start = 0, _kept_base_index = 0, _all_bases = [arg41_1])
        getitem_11: "i32[256][1]" = auto_functionalized_v2_4[1];  auto_functionalized_v2_4 = None

        empty: "bf16[u0, 3, 16][48, 16, 1]" = torch.ops.aten.empty.memory_format([arg0_1, 3, 16], dtype = torch.bfloat16, device = device(type='cpu'), pin_memory = False)

        auto_functionalized_v2_5 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.paged_attention.default, query = getitem_9, cache = slice_1, pages = getitem_8, indptr = getitem_5, last_page_len = getitem_6, owners = getitem_11, scale = 0.25, k_scale = None, v_scale = None, backend = 'auto', _out_base_index = 0, _all_bases = [empty]);  slice_1 = empty = None
        getitem_13: "bf16[u0, 3, 16][48, 16, 1]" = auto_functionalized_v2_5[1];  auto_functionalized_v2_5 = None

        slice_2: "bf16[64, 1, 16, 32][1024, 512, 32, 1]" = torch.ops.aten.slice.Tensor(arg34_1, 1, 1, 2);  arg34_1 = None

        select_1: "bf16[u0, 3, 16][96, 16, 1]" = torch.ops.aten.select.int(_to_copy_2, 1, 1);  _to_copy_2 = None

        auto_functionalized_v2_6 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fill_prefill_pages.default, regions = append_own_region, table = arg37_1, owners = arg39_1, indptr = getitem_5, block_size = 16, query = select_1, page_stride = 4, start = 0, num_pages = 254, _pages_base_index = 0, _contiguous_query_base_index = 1, _all_bases = [getitem_8, getitem_9]);  append_own_region = arg37_1 = select_1 = getitem_8 = getitem_9 = None
        getitem_15: "i32[1280][1]" = auto_functionalized_v2_6[1]
        getitem_16: "bf16[256, 3, 16][48, 16, 1]" = auto_functionalized_v2_6[2];  auto_functionalized_v2_6 = None

        auto_functionalized_v2_7 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.store_owners.default, owners = arg39_1, start = 0, _kept_base_index = 0, _all_bases = [getitem_11]);  arg39_1 = getitem_11 = None
        getitem_18: "i32[256][1]" = auto_functionalized_v2_7[1];  auto_functionalized_v2_7 = None

        empty_1: "bf16[u0, 3, 16][48, 16, 1]" = torch.ops.aten.empty.memory_format([arg0_1, 3, 16], dtype = torch.bfloat16, device = device(type='cpu'), pin_memory = False);  arg0_1 = None

        auto_functionalized_v2_8 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.paged_attention.default, query = getitem_16, cache = slice_2, pages = getitem_15, indptr = getitem_5, last_page_len = getitem_6, owners = getitem_18, scale = 0.25, k_scale = None, v_scale = None, backend = 'auto', _out_base_index = 0, _all_bases = [empty_1]);  slice_2 = empty_1 = None
        getitem_20: "bf16[u0, 3, 16][48, 16, 1]" = auto_functionalized_v2_8[1];  auto_functionalized_v2_8 = None

        stack: "bf16[u0, 2, 3, 16][96, 48, 16, 1]" = torch.ops.aten.stack.default([getitem_13, getitem_20], 1);  getitem_13 = getitem_20 = None

        copy_: "u8[12, 64, 68][4352, 68, 1]" = torch.ops.aten.copy_.default(arg5_1, getitem_1);  arg5_1 = getitem_1 = copy_ = None

        copy__1: "i32[1280][1]" = torch.ops.aten.copy_.default(arg31_1, getitem_15);  arg31_1 = getitem_15 = copy__1 = None

        copy__2: "i32[257][1]" = torch.ops.aten.copy_.default(arg32_1, getitem_5);  arg32_1 = getitem_5 = copy__2 = None
        copy__3: "i32[256][1]" = torch.ops.aten.copy_.default(arg33_1, getitem_6);  arg33_1 = getitem_6 = copy__3 = None

        copy__4: "bf16[256, 3, 16][48, 16, 1]" = torch.ops.aten.copy_.default(arg40_1, getitem_16);  arg40_1 = getitem_16 = copy__4 = None

        copy__5: "i32[256][1]" = torch.ops.aten.copy_.default(arg41_1, getitem_18);  arg41_1 = getitem_18 = copy__5 = None
        return (stack,)
""")
