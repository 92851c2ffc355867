"""The graphs of select_keys. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_select_keys():
    logits = torch.randn(5, 100)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 100, dtype=torch.int32)
    sp.mark_unbacked_sizes(ks, ke)
    sp.mark_unbacked_sizes(logits, dims=(0, 1))

    def function(logits, ks, ke):
        return sp.select_keys(logits, ks, ke, 8, keep_first=1, keep_last=2)

    assert_expected_inline(graphs(function, logits, ks, ke), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", u1: "Sym(u1)", L_logits_: "f32[u0, u1][u1, 1]", u2: "Sym(u0)", L_ks_: "i32[u0][1]", u3: "Sym(u0)", L_ke_: "i32[u0][1]"):
        l_logits_ = L_logits_
        l_ks_ = L_ks_
        l_ke_ = L_ke_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u1 >= 0)" = u1 >= 0;  u1 = None
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        ge_2: "Sym(u0 >= 0)" = u2 >= 0
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_2 = None
        eq: "Sym(True)" = u2 == u0;  u2 = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0) on node 'eq'");  eq = _assert_scalar_default_3 = None
        ge_3: "Sym(u0 >= 0)" = u3 >= 0
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_4 = None
        eq_1: "Sym(True)" = u3 == u0;  u3 = u0 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u3, u0) on node 'eq_1'");  eq_1 = _assert_scalar_default_5 = None

        select_keys: "i32[u0, 8][8, 1]" = torch.ops.sparse_prefill.select_keys(l_logits_, l_ks_, l_ke_, 8, 1, 2);  l_logits_ = l_ks_ = l_ke_ = None
        return (select_keys,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "Sym(u1)", arg2_1: "f32[u0, u1][u1, 1]", arg3_1: "Sym(u0)", arg4_1: "i32[u0][1]", arg5_1: "Sym(u0)", arg6_1: "i32[u0][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None
        ge_1: "Sym(u1 >= 0)" = arg1_1 >= 0;  arg1_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  _assert_scalar_2 = None
        eq: "Sym(True)" = arg3_1 == arg0_1;  arg3_1 = arg0_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u2, u0) on node 'eq'");  _assert_scalar_3 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge = _assert_scalar_4 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u3, u0) on node 'eq_1'");  eq = _assert_scalar_5 = None

        select_keys: "i32[u0, 8][8, 1]" = torch.ops.sparse_prefill.select_keys.default(arg2_1, arg4_1, arg6_1, 8, 1, 2);  arg2_1 = arg4_1 = arg6_1 = None
        return (select_keys,)
""")

