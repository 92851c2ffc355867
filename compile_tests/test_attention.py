"""The graphs of paged_attention. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_paged_attention():
    query = torch.randn(5, 3, 16).to(torch.bfloat16)
    cache = torch.randn(4, 2, 64, 32).to(torch.bfloat16)[:, 1:]
    pages, indptr = torch.zeros(72, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    last_page_len, owners = torch.ones(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    out = torch.empty(5, 3, 16, dtype=torch.bfloat16)
    sp.mark_unbacked_sizes(query, out)

    def function(query, cache, pages, indptr, last_page_len, owners, out):
        sp.paged_attention(query, cache, pages, indptr, last_page_len, owners, out, 0.25)

    assert_expected_inline(graphs(function, query, cache, pages, indptr, last_page_len, owners, out), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_query_: "bf16[u0, 3, 16][48, 16, 1]", L_cache_: "bf16[4, 1, 64, 32][4096, 2048, 32, 1]", L_pages_: "i32[72][1]", L_indptr_: "i32[9][1]", L_last_page_len_: "i32[8][1]", L_owners_: "i32[8][1]", u1: "Sym(u1)", L_out_: "bf16[u1, 3, 16][48, 16, 1]"):
        l_query_ = L_query_
        l_cache_ = L_cache_
        l_pages_ = L_pages_
        l_indptr_ = L_indptr_
        l_last_page_len_ = L_last_page_len_
        l_owners_ = L_owners_
        l_out_ = L_out_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u1 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        le: "Sym(u1 <= 8)" = u1 <= 8
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u1 <= 8 on node 'le'");  le = _assert_scalar_default_2 = None
        le_1: "Sym(u1 <= u0)" = u1 <= u0;  u1 = u0 = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(le_1, "Runtime assertion failed for expression u1 <= u0 on node 'le_1'");  le_1 = _assert_scalar_default_3 = None

        paged_attention = torch.ops.sparse_prefill.paged_attention(l_query_, l_cache_, l_pages_, l_indptr_, l_last_page_len_, l_owners_, l_out_, 0.25, None, None, 'auto');  l_query_ = l_cache_ = l_pages_ = l_indptr_ = l_last_page_len_ = l_owners_ = l_out_ = paged_attention = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "bf16[u0, 3, 16][48, 16, 1]", arg2_1: "bf16[4, 1, 64, 32][4096, 2048, 32, 1]", arg3_1: "i32[72][1]", arg4_1: "i32[9][1]", arg5_1: "i32[8][1]", arg6_1: "i32[8][1]", arg7_1: "Sym(u1)", arg8_1: "bf16[u1, 3, 16][48, 16, 1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None
        ge_1: "Sym(u1 >= 0)" = arg7_1 >= 0
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_1 = None
        le: "Sym(u1 <= 8)" = arg7_1 <= 8
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u1 <= 8 on node 'le'");  le = _assert_scalar_2 = None
        le_1: "Sym(u1 <= u0)" = arg7_1 <= arg0_1;  arg7_1 = arg0_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(le_1, "Runtime assertion failed for expression u1 <= u0 on node 'le_1'");  le_1 = _assert_scalar_3 = None

        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.paged_attention.default, query = arg1_1, cache = arg2_1, pages = arg3_1, indptr = arg4_1, last_page_len = arg5_1, owners = arg6_1, scale = 0.25, k_scale = None, v_scale = None, backend = 'auto', _out_base_index = 0, _all_bases = [arg8_1]);  arg1_1 = arg2_1 = arg3_1 = arg4_1 = arg5_1 = arg6_1 = None
        getitem_1: "bf16[u1, 3, 16][48, 16, 1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None
        copy_: "bf16[u1, 3, 16][48, 16, 1]" = torch.ops.aten.copy_.default(arg8_1, getitem_1);  arg8_1 = getitem_1 = copy_ = None
        return ()
""")

