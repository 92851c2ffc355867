"""The graphs of fill_prefill_pages and store_owners. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_fill_prefill_pages():
    regions = torch.zeros(5, 9, dtype=torch.int32)
    table = torch.zeros(2, 4, dtype=torch.int32)
    owners = torch.zeros(5, dtype=torch.int32)
    indptr, pages = torch.arange(9, dtype=torch.int32), torch.zeros(72, dtype=torch.int32)
    query = torch.randn(5, 2, 3, 16).to(torch.bfloat16)
    buffer = torch.zeros(8, 3, 16, dtype=torch.bfloat16)
    sp.mark_unbacked_sizes(regions, owners, query)
    sp.mark_unbacked_sizes(table, dims=(0, 1))

    def function(regions, table, owners, indptr, pages, query, buffer):
        for group in range(2):
            sp.fill_prefill_pages(regions, table, owners, indptr, pages, 64, query[:, group], buffer, 8, start=1, num_pages=64)

    assert_expected_inline(graphs(function, regions, table, owners, indptr, pages, query, buffer), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u1)", L_query_: "bf16[u1, 2, 3, 16][96, 48, 16, 1]", u1: "Sym(u1)", L_regions_: "i32[u1, 9][9, 1]", u2: "Sym(u2)", u3: "Sym(u3)", L_table_: "i32[u2, u3][u3, 1]", u4: "Sym(u1)", L_owners_: "i32[u1][1]", L_indptr_: "i32[9][1]", L_pages_: "i32[72][1]", L_buffer_: "bf16[8, 3, 16][48, 16, 1]"):
        l_query_ = L_query_
        l_regions_ = L_regions_
        l_table_ = L_table_
        l_owners_ = L_owners_
        l_indptr_ = L_indptr_
        l_pages_ = L_pages_
        l_buffer_ = L_buffer_

        ge: "Sym(u1 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None

        ge_1: "Sym(u1 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        le: "Sym(u1 <= 7)" = u1 <= 7
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u1 <= 7 on node 'le'");  le = _assert_scalar_default_2 = None
        eq: "Sym(True)" = u0 == u1;  u0 = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u0, u1) on node 'eq'");  eq = _assert_scalar_default_3 = None
        ge_2: "Sym(u2 >= 0)" = u2 >= 0;  u2 = None
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_4 = None
        ge_3: "Sym(u3 >= 0)" = u3 >= 0;  u3 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_5 = None
        ge_4: "Sym(u1 >= 0)" = u4 >= 0
        _assert_scalar_default_6 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_default_6 = None
        eq_1: "Sym(True)" = u4 == u1;  u4 = u1 = None
        _assert_scalar_default_7 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u4, u1) on node 'eq_1'");  eq_1 = _assert_scalar_default_7 = None

        value: "bf16[u1, 3, 16][96, 16, 1]" = l_query_[(slice(None, None, None), 0)]

        fill_prefill_pages = torch.ops.sparse_prefill.fill_prefill_pages(l_regions_, l_table_, l_owners_, l_indptr_, l_pages_, 64, value, l_buffer_, 8, 1, 64);  value = fill_prefill_pages = None

        value_1: "bf16[u1, 3, 16][96, 16, 1]" = l_query_[(slice(None, None, None), 1)];  l_query_ = None

        fill_prefill_pages_1 = torch.ops.sparse_prefill.fill_prefill_pages(l_regions_, l_table_, l_owners_, l_indptr_, l_pages_, 64, value_1, l_buffer_, 8, 1, 64);  l_regions_ = l_table_ = l_owners_ = l_indptr_ = l_pages_ = value_1 = l_buffer_ = fill_prefill_pages_1 = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u1)", arg1_1: "bf16[u1, 2, 3, 16][96, 48, 16, 1]", arg2_1: "Sym(u1)", arg3_1: "i32[u1, 9][9, 1]", arg4_1: "Sym(u2)", arg5_1: "Sym(u3)", arg6_1: "i32[u2, u3][u3, 1]", arg7_1: "Sym(u1)", arg8_1: "i32[u1][1]", arg9_1: "i32[9][1]", arg10_1: "i32[72][1]", arg11_1: "bf16[8, 3, 16][48, 16, 1]"):
        ge: "Sym(u1 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None

        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  _assert_scalar_1 = None
        le: "Sym(u1 <= 7)" = arg2_1 <= 7
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u1 <= 7 on node 'le'");  le = _assert_scalar_2 = None
        eq: "Sym(True)" = arg0_1 == arg2_1;  arg0_1 = arg2_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u0, u1) on node 'eq'");  _assert_scalar_3 = None
        ge_2: "Sym(u2 >= 0)" = arg4_1 >= 0;  arg4_1 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_4 = None
        ge_3: "Sym(u3 >= 0)" = arg5_1 >= 0;  arg5_1 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_5 = None
        _assert_scalar_6 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge = _assert_scalar_6 = None
        _assert_scalar_7 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u4, u1) on node 'eq_1'");  eq = _assert_scalar_7 = None

        select: "bf16[u1, 3, 16][96, 16, 1]" = torch.ops.aten.select.int(arg1_1, 1, 0)

        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fill_prefill_pages.default, regions = arg3_1, table = arg6_1, owners = arg8_1, indptr = arg9_1, block_size = 64, query = select, page_stride = 8, start = 1, num_pages = 64, _pages_base_index = 0, _contiguous_query_base_index = 1, _all_bases = [arg10_1, arg11_1]);  select = None
        getitem_1: "i32[72][1]" = auto_functionalized_v2[1]
        getitem_2: "bf16[8, 3, 16][48, 16, 1]" = auto_functionalized_v2[2];  auto_functionalized_v2 = None

        select_1: "bf16[u1, 3, 16][96, 16, 1]" = torch.ops.aten.select.int(arg1_1, 1, 1);  arg1_1 = None

        auto_functionalized_v2_1 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fill_prefill_pages.default, regions = arg3_1, table = arg6_1, owners = arg8_1, indptr = arg9_1, block_size = 64, query = select_1, page_stride = 8, start = 1, num_pages = 64, _pages_base_index = 0, _contiguous_query_base_index = 1, _all_bases = [getitem_1, getitem_2]);  arg3_1 = arg6_1 = arg8_1 = arg9_1 = select_1 = getitem_1 = getitem_2 = None
        getitem_4: "i32[72][1]" = auto_functionalized_v2_1[1]
        getitem_5: "bf16[8, 3, 16][48, 16, 1]" = auto_functionalized_v2_1[2];  auto_functionalized_v2_1 = None
        copy_: "i32[72][1]" = torch.ops.aten.copy_.default(arg10_1, getitem_4);  arg10_1 = getitem_4 = copy_ = None
        copy__1: "bf16[8, 3, 16][48, 16, 1]" = torch.ops.aten.copy_.default(arg11_1, getitem_5);  arg11_1 = getitem_5 = copy__1 = None
        return ()
""")


def test_store_owners():
    owners, kept = torch.zeros(5, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    sp.mark_unbacked_sizes(owners)

    def function(owners, kept):
        torch.ops.sparse_prefill.store_owners(owners, kept, 1)

    assert_expected_inline(graphs(function, owners, kept), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_owners_: "i32[u0][1]", L_kept_: "i32[8][1]"):
        l_owners_ = L_owners_
        l_kept_ = L_kept_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        le: "Sym(u0 <= 7)" = u0 <= 7;  u0 = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 7 on node 'le'");  le = _assert_scalar_default_1 = None
        store_owners = torch.ops.sparse_prefill.store_owners(l_owners_, l_kept_, 1);  l_owners_ = l_kept_ = store_owners = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "i32[u0][1]", arg2_1: "i32[8][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        le: "Sym(u0 <= 7)" = arg0_1 <= 7;  arg0_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 7 on node 'le'");  le = _assert_scalar_1 = None
        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.store_owners.default, owners = arg1_1, start = 1, _kept_base_index = 0, _all_bases = [arg2_1]);  arg1_1 = None
        getitem_1: "i32[8][1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None
        copy_: "i32[8][1]" = torch.ops.aten.copy_.default(arg2_1, getitem_1);  arg2_1 = getitem_1 = copy_ = None
        return ()
""")

