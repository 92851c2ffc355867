"""The graphs of append_own_region and fixup_positions. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_append_own_region():
    selected = torch.zeros(5, 8, dtype=torch.int32)
    positions = torch.arange(5)
    sp.mark_unbacked_sizes(selected, positions)

    def function(selected, positions):
        return sp.append_own_region(selected, positions)

    assert_expected_inline(graphs(function, selected, positions), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_selected_: "i32[u0, 8][8, 1]", u1: "Sym(u0)", L_positions_: "i64[u0][1]"):
        l_selected_ = L_selected_
        l_positions_ = L_positions_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u0 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        eq: "Sym(True)" = u1 == u0;  u1 = u0 = None
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_default_2 = None

        append_own_region: "i32[u0, 9][9, 1]" = torch.ops.sparse_prefill.append_own_region(l_selected_, l_positions_);  l_selected_ = l_positions_ = None
        return (append_own_region,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "i32[u0, 8][8, 1]", arg2_1: "Sym(u0)", arg3_1: "i64[u0][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge = _assert_scalar_1 = None
        eq: "Sym(True)" = arg2_1 == arg0_1;  arg2_1 = arg0_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_2 = None

        append_own_region: "i32[u0, 9][9, 1]" = torch.ops.sparse_prefill.append_own_region.default(arg1_1, arg3_1);  arg1_1 = arg3_1 = None
        return (append_own_region,)
""")


def test_fixup_positions():
    positions = torch.arange(5)
    indptr, last_page_len = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    sp.mark_unbacked_sizes(positions)

    def function(positions, indptr, last_page_len):
        sp.fixup_positions(positions, indptr, last_page_len, 9)

    assert_expected_inline(graphs(function, positions, indptr, last_page_len), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_positions_: "i64[u0][1]", L_indptr_: "i32[9][1]", L_last_page_len_: "i32[8][1]"):
        l_positions_ = L_positions_
        l_indptr_ = L_indptr_
        l_last_page_len_ = L_last_page_len_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        le: "Sym(u0 <= 8)" = u0 <= 8;  u0 = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 8 on node 'le'");  le = _assert_scalar_default_1 = None

        fixup_positions = torch.ops.sparse_prefill.fixup_positions(l_positions_, l_indptr_, l_last_page_len_, 9);  l_positions_ = l_indptr_ = l_last_page_len_ = fixup_positions = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "i64[u0][1]", arg2_1: "i32[9][1]", arg3_1: "i32[8][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        le: "Sym(u0 <= 8)" = arg0_1 <= 8;  arg0_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 8 on node 'le'");  le = _assert_scalar_1 = None

        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.fixup_positions.default, positions = arg1_1, region_count = 9, _indptr_base_index = 0, _last_page_len_base_index = 1, _all_bases = [arg2_1, arg3_1]);  arg1_1 = None
        getitem_1: "i32[9][1]" = auto_functionalized_v2[1]
        getitem_2: "i32[8][1]" = auto_functionalized_v2[2];  auto_functionalized_v2 = None
        copy_: "i32[9][1]" = torch.ops.aten.copy_.default(arg2_1, getitem_1);  arg2_1 = getitem_1 = copy_ = None
        copy__1: "i32[8][1]" = torch.ops.aten.copy_.default(arg3_1, getitem_2);  arg3_1 = getitem_2 = copy__1 = None
        return ()
""")

