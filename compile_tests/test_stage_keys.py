"""The graphs of stage_keys, pack_keys and restore_keys. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_stage_keys():
    cache = torch.zeros(3, 64, 68, dtype=torch.uint8)
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    (chunk,) = sp.build_prefill_chunks([2, 3], [70, 9], table, key_budget=100)
    sp.mark_unbacked_sizes(chunk.cu_seq_lens, chunk.token_to_seq)
    sp.mark_unbacked_sizes(chunk.block_table, dims=(0, 1))

    def function(cache, chunk):
        return sp.stage_keys(cache, chunk)

    assert_expected_inline(graphs(function, cache, chunk), """\
class GraphModule(torch.nn.Module):
    def forward(self, L_cache_: "u8[3, 64, 68][4352, 68, 1]", u0: "Sym(u0)", u1: "Sym(u1)", L_chunk_block_table: "i32[u0, u1][u1, 1]", u2: "Sym(u0 + 1)", L_chunk_cu_seq_lens: "i32[u0 + 1][1]", u3: "Sym(u3)", L_chunk_token_to_seq: "i32[u3][1]"):
        l_cache_ = L_cache_
        l_chunk_block_table = L_chunk_block_table
        l_chunk_cu_seq_lens = L_chunk_cu_seq_lens
        l_chunk_token_to_seq = L_chunk_token_to_seq

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u1 >= 0)" = u1 >= 0;  u1 = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        ge_2: "Sym(u0 + 1 >= 1)" = u2 >= 1
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 1 on node 'ge_2'");  ge_2 = _assert_scalar_default_2 = None
        sym_sum: "Sym(u0 + 1)" = torch.sym_sum([1, u0]);  u0 = None
        eq: "Sym(True)" = u2 == sym_sum;  u2 = sym_sum = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0 + 1) on node 'eq'");  eq = _assert_scalar_default_3 = None
        ge_3: "Sym(u3 >= 0)" = u3 >= 0;  u3 = None
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_4 = None

        stage_keys = torch.ops.sparse_prefill.stage_keys(l_cache_, l_chunk_block_table, l_chunk_cu_seq_lens, l_chunk_token_to_seq);  l_cache_ = l_chunk_block_table = l_chunk_cu_seq_lens = l_chunk_token_to_seq = None
        getitem: "u8[((u3 + 63)//64), 1, 4, 64, 16][4096, 4096, 1024, 16, 1]" = stage_keys[0]
        getitem_1: "u8[((u3 + 63)//64), 1, 4, 64][256, 256, 64, 1]" = stage_keys[1];  stage_keys = None
        return (getitem, getitem_1)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "u8[3, 64, 68][4352, 68, 1]", arg1_1: "Sym(u0)", arg2_1: "Sym(u1)", arg3_1: "i32[u0, u1][u1, 1]", arg4_1: "Sym(u0 + 1)", arg5_1: "i32[u0 + 1][1]", arg6_1: "Sym(u3)", arg7_1: "i32[u3][1]"):
        ge: "Sym(u0 >= 0)" = arg1_1 >= 0;  arg1_1 = None
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        ge_1: "Sym(u1 >= 0)" = arg2_1 >= 0;  arg2_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_1 = None
        ge_2: "Sym(u0 + 1 >= 1)" = arg4_1 >= 1
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 1 on node 'ge_2'");  ge_2 = _assert_scalar_2 = None
        eq: "Sym(True)" = arg4_1 == arg4_1;  arg4_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0 + 1) on node 'eq'");  eq = _assert_scalar_3 = None
        ge_3: "Sym(u3 >= 0)" = arg6_1 >= 0;  arg6_1 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_4 = None

        stage_keys = torch.ops.sparse_prefill.stage_keys.default(arg0_1, arg3_1, arg5_1, arg7_1);  arg0_1 = arg3_1 = arg5_1 = arg7_1 = None
        getitem: "u8[((u3 + 63)//64), 1, 4, 64, 16][4096, 4096, 1024, 16, 1]" = stage_keys[0]
        getitem_1: "u8[((u3 + 63)//64), 1, 4, 64][256, 256, 64, 1]" = stage_keys[1];  stage_keys = None
        return (getitem, getitem_1)
""")


def test_pack_keys():
    cache = torch.zeros(3, 64, 68, dtype=torch.uint8)
    table = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    local_cu = torch.tensor([0, 35, 40], dtype=torch.int32)
    sp.mark_unbacked_sizes(local_cu)
    sp.mark_unbacked_sizes(table, dims=(0, 1))

    def function(cache, table, local_cu):
        return torch.ops.sparse_prefill.pack_keys(cache, table, local_cu, 64)

    assert_expected_inline(graphs(function, cache, table, local_cu), """\
class GraphModule(torch.nn.Module):
    def forward(self, L_cache_: "u8[3, 64, 68][4352, 68, 1]", u0: "Sym(u0)", u1: "Sym(u1)", L_table_: "i32[u0, u1][u1, 1]", u2: "Sym(u0 + 1)", L_local_cu_: "i32[u0 + 1][1]"):
        l_cache_ = L_cache_
        l_table_ = L_table_
        l_local_cu_ = L_local_cu_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u1 >= 0)" = u1 >= 0;  u1 = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        ge_2: "Sym(u0 + 1 >= 1)" = u2 >= 1
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 1 on node 'ge_2'");  ge_2 = _assert_scalar_default_2 = None
        sym_sum: "Sym(u0 + 1)" = torch.sym_sum([1, u0]);  u0 = None
        eq: "Sym(True)" = u2 == sym_sum;  u2 = sym_sum = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0 + 1) on node 'eq'");  eq = _assert_scalar_default_3 = None
        pack_keys: "u8[64, 68][68, 1]" = torch.ops.sparse_prefill.pack_keys(l_cache_, l_table_, l_local_cu_, 64);  l_cache_ = l_table_ = l_local_cu_ = None
        return (pack_keys,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "u8[3, 64, 68][4352, 68, 1]", arg1_1: "Sym(u0)", arg2_1: "Sym(u1)", arg3_1: "i32[u0, u1][u1, 1]", arg4_1: "Sym(u0 + 1)", arg5_1: "i32[u0 + 1][1]"):
        ge: "Sym(u0 >= 0)" = arg1_1 >= 0;  arg1_1 = None
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        ge_1: "Sym(u1 >= 0)" = arg2_1 >= 0;  arg2_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_1 = None
        ge_2: "Sym(u0 + 1 >= 1)" = arg4_1 >= 1
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 1 on node 'ge_2'");  ge_2 = _assert_scalar_2 = None
        eq: "Sym(True)" = arg4_1 == arg4_1;  arg4_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0 + 1) on node 'eq'");  eq = _assert_scalar_3 = None
        pack_keys: "u8[64, 68][68, 1]" = torch.ops.sparse_prefill.pack_keys.default(arg0_1, arg3_1, arg5_1, 64);  arg0_1 = arg3_1 = arg5_1 = None
        return (pack_keys,)
""")


def test_restore_keys():
    gathered = torch.zeros(128, 68, dtype=torch.uint8)
    owner = torch.zeros(79, dtype=torch.int32)
    cu = torch.tensor([0, 70, 79], dtype=torch.int32)
    all_cu = torch.tensor([[0, 35, 40], [0, 35, 39]], dtype=torch.int32)
    sp.mark_unbacked_sizes(gathered, owner, cu)

    def function(gathered, owner, cu, all_cu):
        return torch.ops.sparse_prefill.restore_keys(gathered, owner, cu, all_cu, 2, 1)

    assert_expected_inline(graphs(function, gathered, owner, cu, all_cu), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_gathered_: "u8[u0, 68][68, 1]", u1: "Sym(u1)", L_owner_: "i32[u1][1]", u2: "Sym(3)", L_cu_: "i32[3][1]", L_all_cu_: "i32[2, 3][3, 1]"):
        l_gathered_ = L_gathered_
        l_owner_ = L_owner_
        l_cu_ = L_cu_
        l_all_cu_ = L_all_cu_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        mod: "Sym(Mod(u0, 2))" = u0 % 2;  u0 = None
        eq: "Sym(Eq(Mod(u0, 2), 0))" = mod == 0;  mod = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(Mod(u0, 2), 0) on node 'eq'");  eq = _assert_scalar_default_1 = None
        ge_1: "Sym(u1 >= 0)" = u1 >= 0;  u1 = None
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_2 = None
        ge_2: "Sym(True)" = u2 >= 3
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 3 on node 'ge_2'");  ge_2 = _assert_scalar_default_3 = None
        le: "Sym(True)" = u2 <= 3
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u2 <= 3 on node 'le'");  le = _assert_scalar_default_4 = None
        eq_1: "Sym(True)" = u2 == 3;  u2 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u2, 3) on node 'eq_1'");  eq_1 = _assert_scalar_default_5 = None
        restore_keys = torch.ops.sparse_prefill.restore_keys(l_gathered_, l_owner_, l_cu_, l_all_cu_, 2, 1);  l_gathered_ = l_owner_ = l_cu_ = l_all_cu_ = None
        getitem: "u8[((u1 + 63)//64), 1, 4, 64, 16][4096, 4096, 1024, 16, 1]" = restore_keys[0]
        getitem_1: "u8[((u1 + 63)//64), 1, 4, 64][256, 256, 64, 1]" = restore_keys[1];  restore_keys = None
        return (getitem, getitem_1)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "u8[u0, 68][68, 1]", arg2_1: "Sym(u1)", arg3_1: "i32[u1][1]", arg4_1: "Sym(3)", arg5_1: "i32[3][1]", arg6_1: "i32[2, 3][3, 1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        mod: "Sym(Mod(u0, 2))" = arg0_1 % 2;  arg0_1 = None
        eq: "Sym(Eq(Mod(u0, 2), 0))" = mod == 0;  mod = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(Mod(u0, 2), 0) on node 'eq'");  eq = _assert_scalar_1 = None
        ge_1: "Sym(u1 >= 0)" = arg2_1 >= 0;  arg2_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_2 = None
        ge_2: "Sym(True)" = arg4_1 >= 3;  arg4_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 3 on node 'ge_2'");  _assert_scalar_3 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 <= 3 on node 'le'");  _assert_scalar_4 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression Eq(u2, 3) on node 'eq_1'");  ge_2 = _assert_scalar_5 = None
        restore_keys = torch.ops.sparse_prefill.restore_keys.default(arg1_1, arg3_1, arg5_1, arg6_1, 2, 1);  arg1_1 = arg3_1 = arg5_1 = arg6_1 = None
        getitem: "u8[((u1 + 63)//64), 1, 4, 64, 16][4096, 4096, 1024, 16, 1]" = restore_keys[0]
        getitem_1: "u8[((u1 + 63)//64), 1, 4, 64][256, 256, 64, 1]" = restore_keys[1];  restore_keys = None
        return (getitem, getitem_1)
""")

