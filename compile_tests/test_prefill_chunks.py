"""The graphs of prefill_chunks. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_prefill_chunks():
    cache = torch.zeros(3, 64, 68, dtype=torch.uint8)
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    chunks = sp.build_prefill_chunks([2, 3], [70, 9], table, key_budget=70)
    metadata = sp.prepare_prefill_metadata(sp.PrefillMetadata(chunks, 70), 1, 0, 1)
    q, weights = torch.randn(5, 3, 128).to(torch.bfloat16), torch.randn(5, 3)
    out = torch.full((5, 8), -1, dtype=torch.int32)
    sp.mark_unbacked_sizes(q, weights, out, metadata)

    def function(q, weights, cache, out, metadata):
        sp.prefill_chunks(q, weights, cache, out, metadata, 1, 1, 0.5, keep_first=1, keep_last=2)

    assert_expected_inline(graphs(function, q, weights, cache, out, metadata), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_q_: "bf16[u0, 3, 128][384, 128, 1]", u1: "Sym(u0)", L_weights_: "f32[u0, 3][3, 1]", L_cache_: "u8[3, 64, 68][4352, 68, 1]", u2: "Sym(u0)", L_out_: "i32[u0, 8][8, 1]", u3: "Sym(u3)", L_metadata_plans_sets: "i64[u3, 8][8, 1]", u4: "Sym(u4)", L_metadata_plans_chunks: "i64[u4, 4][4, 1]", u5: "Sym(u5)", L_metadata_plans_tiles: "i64[u5, 4][4, 1]", u6: "Sym(u6)", L_metadata_plans_block_tables: "i32[u6][1]", u7: "Sym(u7)", L_metadata_plans_cu_seq_lens: "i32[u7][1]", u8: "Sym(u8)", L_metadata_plans_token_to_seq: "i32[u8][1]", u9: "Sym(u9)", L_metadata_plans_ks: "i32[u9][1]", u10: "Sym(u9)", L_metadata_plans_ke: "i32[u9][1]", u11: "Sym(u11)", L_metadata_plans_all_cu: "i32[u11][1]"):
        l_q_ = L_q_
        l_weights_ = L_weights_
        l_cache_ = L_cache_
        l_out_ = L_out_
        l_metadata_plans_sets = L_metadata_plans_sets
        l_metadata_plans_chunks = L_metadata_plans_chunks
        l_metadata_plans_tiles = L_metadata_plans_tiles
        l_metadata_plans_block_tables = L_metadata_plans_block_tables
        l_metadata_plans_cu_seq_lens = L_metadata_plans_cu_seq_lens
        l_metadata_plans_token_to_seq = L_metadata_plans_token_to_seq
        l_metadata_plans_ks = L_metadata_plans_ks
        l_metadata_plans_ke = L_metadata_plans_ke
        l_metadata_plans_all_cu = L_metadata_plans_all_cu

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None

        ge_1: "Sym(u0 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        eq: "Sym(True)" = u1 == u0;  u1 = None
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_default_2 = None
        ge_2: "Sym(u0 >= 0)" = u2 >= 0
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_3 = None
        eq_1: "Sym(True)" = u2 == u0;  u2 = u0 = None
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u2, u0) on node 'eq_1'");  eq_1 = _assert_scalar_default_4 = None

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
        eq_2: "Sym(True)" = u10 == u9;  u10 = u9 = None
        _assert_scalar_default_13 = torch.ops.aten._assert_scalar.default(eq_2, "Runtime assertion failed for expression Eq(u10, u9) on node 'eq_2'");  eq_2 = _assert_scalar_default_13 = None
        ge_11: "Sym(u11 >= 0)" = u11 >= 0;  u11 = None
        _assert_scalar_default_14 = torch.ops.aten._assert_scalar.default(ge_11, "Runtime assertion failed for expression u11 >= 0 on node 'ge_11'");  ge_11 = _assert_scalar_default_14 = None
        prefill_chunks = torch.ops.sparse_prefill.prefill_chunks(l_q_, None, l_weights_, l_cache_, l_out_, l_metadata_plans_sets, l_metadata_plans_chunks, l_metadata_plans_tiles, l_metadata_plans_block_tables, l_metadata_plans_cu_seq_lens, l_metadata_plans_token_to_seq, l_metadata_plans_ks, l_metadata_plans_ke, l_metadata_plans_all_cu, 1, 1, 0.5, 1, 2, 'exact');  l_q_ = l_weights_ = l_cache_ = l_out_ = l_metadata_plans_sets = l_metadata_plans_chunks = l_metadata_plans_tiles = l_metadata_plans_block_tables = l_metadata_plans_cu_seq_lens = l_metadata_plans_token_to_seq = l_metadata_plans_ks = l_metadata_plans_ke = l_metadata_plans_all_cu = prefill_chunks = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "bf16[u0, 3, 128][384, 128, 1]", arg2_1: "Sym(u0)", arg3_1: "f32[u0, 3][3, 1]", arg4_1: "u8[3, 64, 68][4352, 68, 1]", arg5_1: "Sym(u0)", arg6_1: "i32[u0, 8][8, 1]", arg7_1: "Sym(u3)", arg8_1: "i64[u3, 8][8, 1]", arg9_1: "Sym(u4)", arg10_1: "i64[u4, 4][4, 1]", arg11_1: "Sym(u5)", arg12_1: "i64[u5, 4][4, 1]", arg13_1: "Sym(u6)", arg14_1: "i32[u6][1]", arg15_1: "Sym(u7)", arg16_1: "i32[u7][1]", arg17_1: "Sym(u8)", arg18_1: "i32[u8][1]", arg19_1: "Sym(u9)", arg20_1: "i32[u9][1]", arg21_1: "Sym(u9)", arg22_1: "i32[u9][1]", arg23_1: "Sym(u11)", arg24_1: "i32[u11][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None

        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  _assert_scalar_1 = None
        eq: "Sym(True)" = arg2_1 == arg0_1;  arg2_1 = arg0_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  _assert_scalar_2 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge = _assert_scalar_3 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0) on node 'eq_1'");  _assert_scalar_4 = None

        ge_3: "Sym(u3 >= 0)" = arg7_1 >= 0;  arg7_1 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_5 = None
        ge_4: "Sym(u4 >= 0)" = arg9_1 >= 0;  arg9_1 = None
        _assert_scalar_6 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_6 = None
        ge_5: "Sym(u5 >= 0)" = arg11_1 >= 0;  arg11_1 = None
        _assert_scalar_7 = torch.ops.aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u5 >= 0 on node 'ge_5'");  ge_5 = _assert_scalar_7 = None
        ge_6: "Sym(u6 >= 0)" = arg13_1 >= 0;  arg13_1 = None
        _assert_scalar_8 = torch.ops.aten._assert_scalar.default(ge_6, "Runtime assertion failed for expression u6 >= 0 on node 'ge_6'");  ge_6 = _assert_scalar_8 = None
        ge_7: "Sym(u7 >= 0)" = arg15_1 >= 0;  arg15_1 = None
        _assert_scalar_9 = torch.ops.aten._assert_scalar.default(ge_7, "Runtime assertion failed for expression u7 >= 0 on node 'ge_7'");  ge_7 = _assert_scalar_9 = None
        ge_8: "Sym(u8 >= 0)" = arg17_1 >= 0;  arg17_1 = None
        _assert_scalar_10 = torch.ops.aten._assert_scalar.default(ge_8, "Runtime assertion failed for expression u8 >= 0 on node 'ge_8'");  ge_8 = _assert_scalar_10 = None
        ge_9: "Sym(u9 >= 0)" = arg19_1 >= 0;  arg19_1 = None
        _assert_scalar_11 = torch.ops.aten._assert_scalar.default(ge_9, "Runtime assertion failed for expression u9 >= 0 on node 'ge_9'");  _assert_scalar_11 = None
        _assert_scalar_12 = torch.ops.aten._assert_scalar.default(ge_9, "Runtime assertion failed for expression u10 >= 0 on node 'ge_10'");  ge_9 = _assert_scalar_12 = None
        _assert_scalar_13 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u10, u9) on node 'eq_2'");  eq = _assert_scalar_13 = None
        ge_11: "Sym(u11 >= 0)" = arg23_1 >= 0;  arg23_1 = None
        _assert_scalar_14 = torch.ops.aten._assert_scalar.default(ge_11, "Runtime assertion failed for expression u11 >= 0 on node 'ge_11'");  ge_11 = _assert_scalar_14 = None
        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.prefill_chunks.default, q = arg1_1, q_scale = None, weights = arg3_1, cache = arg4_1, sets = arg8_1, chunks = arg10_1, tiles = arg12_1, block_tables = arg14_1, cu_seq_lens = arg16_1, token_to_seq = arg18_1, ks = arg20_1, ke = arg22_1, all_cu = arg24_1, world = 1, interleave = 1, weight_scale = 0.5, keep_first = 1, keep_last = 2, precision = 'exact', _out_base_index = 0, _all_bases = [arg6_1]);  arg1_1 = arg3_1 = arg4_1 = arg8_1 = arg10_1 = arg12_1 = arg14_1 = arg16_1 = arg18_1 = arg20_1 = arg22_1 = arg24_1 = None
        getitem_1: "i32[u0, 8][8, 1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None
        copy_: "i32[u0, 8][8, 1]" = torch.ops.aten.copy_.default(arg6_1, getitem_1);  arg6_1 = getitem_1 = copy_ = None
        return ()
""")

