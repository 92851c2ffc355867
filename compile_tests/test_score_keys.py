"""The graphs of score_keys. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_packed_queries():
    q = torch.zeros(5, 3, 64, dtype=torch.uint8)
    q_scale = torch.zeros(5, 3, 4, dtype=torch.uint8)
    payload, scales = torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(2, 1, 4, 64, dtype=torch.uint8)
    weights = torch.randn(5, 3)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 100, dtype=torch.int32)
    sp.mark_unbacked_sizes(q, q_scale, payload, scales, weights, ks, ke)

    def function(q, q_scale, payload, scales, weights, ks, ke):
        return sp.score_keys((q, q_scale), payload, scales, weights, ks, ke, weight_scale=0.5)

    assert_expected_inline(graphs(function, q, q_scale, payload, scales, weights, ks, ke), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_q_: "u8[u0, 3, 64][192, 64, 1]", u1: "Sym(u0)", L_q_scale_: "u8[u0, 3, 4][12, 4, 1]", u2: "Sym(u2)", L_payload_: "u8[u2, 1, 4, 64, 16][4096, 4096, 1024, 16, 1]", u3: "Sym(u2)", L_scales_: "u8[u2, 1, 4, 64][256, 256, 64, 1]", u4: "Sym(u0)", L_weights_: "f32[u0, 3][3, 1]", u5: "Sym(u0)", L_ks_: "i32[u0][1]", u6: "Sym(u0)", L_ke_: "i32[u0][1]"):
        l_q_ = L_q_
        l_q_scale_ = L_q_scale_
        l_payload_ = L_payload_
        l_scales_ = L_scales_
        l_weights_ = L_weights_
        l_ks_ = L_ks_
        l_ke_ = L_ke_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u0 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        eq: "Sym(True)" = u1 == u0;  u1 = None
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_default_2 = None
        ge_2: "Sym(u2 >= 0)" = u2 >= 0
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_3 = None
        ge_3: "Sym(u2 >= 0)" = u3 >= 0
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_4 = None
        eq_1: "Sym(True)" = u3 == u2;  u3 = u2 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u3, u2) on node 'eq_1'");  eq_1 = _assert_scalar_default_5 = None
        ge_4: "Sym(u0 >= 0)" = u4 >= 0
        _assert_scalar_default_6 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_default_6 = None
        eq_2: "Sym(True)" = u4 == u0;  u4 = None
        _assert_scalar_default_7 = torch.ops.aten._assert_scalar.default(eq_2, "Runtime assertion failed for expression Eq(u4, u0) on node 'eq_2'");  eq_2 = _assert_scalar_default_7 = None
        ge_5: "Sym(u0 >= 0)" = u5 >= 0
        _assert_scalar_default_8 = torch.ops.aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u5 >= 0 on node 'ge_5'");  ge_5 = _assert_scalar_default_8 = None
        eq_3: "Sym(True)" = u5 == u0;  u5 = None
        _assert_scalar_default_9 = torch.ops.aten._assert_scalar.default(eq_3, "Runtime assertion failed for expression Eq(u5, u0) on node 'eq_3'");  eq_3 = _assert_scalar_default_9 = None
        ge_6: "Sym(u0 >= 0)" = u6 >= 0
        _assert_scalar_default_10 = torch.ops.aten._assert_scalar.default(ge_6, "Runtime assertion failed for expression u6 >= 0 on node 'ge_6'");  ge_6 = _assert_scalar_default_10 = None
        eq_4: "Sym(True)" = u6 == u0;  u6 = u0 = None
        _assert_scalar_default_11 = torch.ops.aten._assert_scalar.default(eq_4, "Runtime assertion failed for expression Eq(u6, u0) on node 'eq_4'");  eq_4 = _assert_scalar_default_11 = None

        logits: "f32[u0, 64*u2][Max(1, 64*u2), 1]" = torch.ops.sparse_prefill.score_keys(l_q_, l_q_scale_, l_payload_, l_scales_, l_weights_, l_ks_, l_ke_, 0.5, 'exact');  l_q_ = l_q_scale_ = l_payload_ = l_scales_ = l_weights_ = l_ks_ = l_ke_ = None
        return (logits,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "u8[u0, 3, 64][192, 64, 1]", arg2_1: "Sym(u0)", arg3_1: "u8[u0, 3, 4][12, 4, 1]", arg4_1: "Sym(u2)", arg5_1: "u8[u2, 1, 4, 64, 16][4096, 4096, 1024, 16, 1]", arg6_1: "Sym(u2)", arg7_1: "u8[u2, 1, 4, 64][256, 256, 64, 1]", arg8_1: "Sym(u0)", arg9_1: "f32[u0, 3][3, 1]", arg10_1: "Sym(u0)", arg11_1: "i32[u0][1]", arg12_1: "Sym(u0)", arg13_1: "i32[u0][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  _assert_scalar_1 = None
        eq: "Sym(True)" = arg2_1 == arg0_1;  arg2_1 = arg0_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  _assert_scalar_2 = None
        ge_2: "Sym(u2 >= 0)" = arg4_1 >= 0;  arg4_1 = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_2'");  _assert_scalar_3 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u3 >= 0 on node 'ge_3'");  ge_2 = _assert_scalar_4 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u3, u2) on node 'eq_1'");  _assert_scalar_5 = None
        _assert_scalar_6 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u4 >= 0 on node 'ge_4'");  _assert_scalar_6 = None
        _assert_scalar_7 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u4, u0) on node 'eq_2'");  _assert_scalar_7 = None
        _assert_scalar_8 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u5 >= 0 on node 'ge_5'");  _assert_scalar_8 = None
        _assert_scalar_9 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u5, u0) on node 'eq_3'");  _assert_scalar_9 = None
        _assert_scalar_10 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u6 >= 0 on node 'ge_6'");  ge = _assert_scalar_10 = None
        _assert_scalar_11 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u6, u0) on node 'eq_4'");  eq = _assert_scalar_11 = None

        score_keys: "f32[u0, 64*u2][Max(1, 64*u2), 1]" = torch.ops.sparse_prefill.score_keys.default(arg1_1, arg3_1, arg5_1, arg7_1, arg9_1, arg11_1, arg13_1, 0.5, 'exact');  arg1_1 = arg3_1 = arg5_1 = arg7_1 = arg9_1 = arg11_1 = arg13_1 = None
        return (score_keys,)
""")


def test_bf16_queries_and_fewer_columns():
    q = torch.randn(5, 3, 128).to(torch.bfloat16)
    payload, scales = torch.zeros(2, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(2, 1, 4, 64, dtype=torch.uint8)
    weights = torch.randn(5, 3).to(torch.bfloat16)
    ks, ke = torch.zeros(5, dtype=torch.int32), torch.full((5,), 100, dtype=torch.int32)
    token_to_seq = torch.zeros(100, dtype=torch.int32)
    sp.mark_unbacked_sizes(q, payload, scales, weights, ks, ke, token_to_seq)

    def function(q, payload, scales, weights, ks, ke, token_to_seq):
        return sp.score_keys(q, payload, scales, weights, ks, ke, token_to_seq.shape[0])

    assert_expected_inline(graphs(function, q, payload, scales, weights, ks, ke, token_to_seq), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", u1: "Sym(u1)", L_q_: "bf16[u1, 3, 128][384, 128, 1]", u2: "Sym(u2)", L_payload_: "u8[u2, 1, 4, 64, 16][4096, 4096, 1024, 16, 1]", u3: "Sym(u2)", L_scales_: "u8[u2, 1, 4, 64][256, 256, 64, 1]", u4: "Sym(u1)", L_weights_: "bf16[u1, 3][3, 1]", u5: "Sym(u1)", L_ks_: "i32[u1][1]", u6: "Sym(u1)", L_ke_: "i32[u1][1]"):
        l_q_ = L_q_
        l_payload_ = L_payload_
        l_scales_ = L_scales_
        l_weights_ = L_weights_
        l_ks_ = L_ks_
        l_ke_ = L_ke_

        ge_1: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u0 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default = None

        ge_2: "Sym(u1 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u1 >= 0 on node 'ge_2'");  ge_2 = _assert_scalar_default_1 = None

        ge_3: "Sym(u2 >= 0)" = u2 >= 0
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(ge_3, "Runtime assertion failed for expression u2 >= 0 on node 'ge_3'");  ge_3 = _assert_scalar_default_2 = None
        mul_1: "Sym(64*u2)" = 64 * u2
        le_1: "Sym(u0 <= 64*u2)" = u0 <= mul_1;  mul_1 = None
        _assert_scalar_default_3 = torch.ops.aten._assert_scalar.default(le_1, "Runtime assertion failed for expression u0 <= 64*u2 on node 'le_1'");  le_1 = _assert_scalar_default_3 = None
        ge_4: "Sym(u2 >= 0)" = u3 >= 0
        _assert_scalar_default_4 = torch.ops.aten._assert_scalar.default(ge_4, "Runtime assertion failed for expression u3 >= 0 on node 'ge_4'");  ge_4 = _assert_scalar_default_4 = None
        eq: "Sym(True)" = u3 == u2;  u3 = u2 = None
        _assert_scalar_default_5 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u3, u2) on node 'eq'");  eq = _assert_scalar_default_5 = None
        ge_5: "Sym(u1 >= 0)" = u4 >= 0
        _assert_scalar_default_6 = torch.ops.aten._assert_scalar.default(ge_5, "Runtime assertion failed for expression u4 >= 0 on node 'ge_5'");  ge_5 = _assert_scalar_default_6 = None
        eq_1: "Sym(True)" = u4 == u1;  u4 = None
        _assert_scalar_default_7 = torch.ops.aten._assert_scalar.default(eq_1, "Runtime assertion failed for expression Eq(u4, u1) on node 'eq_1'");  eq_1 = _assert_scalar_default_7 = None
        ge_6: "Sym(u1 >= 0)" = u5 >= 0
        _assert_scalar_default_8 = torch.ops.aten._assert_scalar.default(ge_6, "Runtime assertion failed for expression u5 >= 0 on node 'ge_6'");  ge_6 = _assert_scalar_default_8 = None
        eq_2: "Sym(True)" = u5 == u1;  u5 = None
        _assert_scalar_default_9 = torch.ops.aten._assert_scalar.default(eq_2, "Runtime assertion failed for expression Eq(u5, u1) on node 'eq_2'");  eq_2 = _assert_scalar_default_9 = None
        ge_7: "Sym(u1 >= 0)" = u6 >= 0
        _assert_scalar_default_10 = torch.ops.aten._assert_scalar.default(ge_7, "Runtime assertion failed for expression u6 >= 0 on node 'ge_7'");  ge_7 = _assert_scalar_default_10 = None
        eq_3: "Sym(True)" = u6 == u1;  u6 = u1 = None
        _assert_scalar_default_11 = torch.ops.aten._assert_scalar.default(eq_3, "Runtime assertion failed for expression Eq(u6, u1) on node 'eq_3'");  eq_3 = _assert_scalar_default_11 = None

        logits: "f32[u1, 64*u2][Max(1, 64*u2), 1]" = torch.ops.sparse_prefill.score_keys(l_q_, None, l_payload_, l_scales_, l_weights_, l_ks_, l_ke_, 1.0, 'exact');  l_q_ = l_payload_ = l_scales_ = l_weights_ = l_ks_ = l_ke_ = None

        narrow: "f32[u1, u0][Max(1, 64*u2), 1]" = logits.narrow(1, 0, u0);  logits = u0 = None
        return (narrow,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "Sym(u1)", arg2_1: "bf16[u1, 3, 128][384, 128, 1]", arg3_1: "Sym(u2)", arg4_1: "u8[u2, 1, 4, 64, 16][4096, 4096, 1024, 16, 1]", arg5_1: "Sym(u2)", arg6_1: "u8[u2, 1, 4, 64][256, 256, 64, 1]", arg7_1: "Sym(u1)", arg8_1: "bf16[u1, 3][3, 1]", arg9_1: "Sym(u1)", arg10_1: "i32[u1][1]", arg11_1: "Sym(u1)", arg12_1: "i32[u1][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge_1'");  ge = _assert_scalar = None

        ge_1: "Sym(u1 >= 0)" = arg1_1 >= 0;  arg1_1 = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_2'");  _assert_scalar_1 = None

        ge_2: "Sym(u2 >= 0)" = arg3_1 >= 0
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u2 >= 0 on node 'ge_3'");  _assert_scalar_2 = None
        mul: "Sym(64*u2)" = 64 * arg3_1
        le: "Sym(u0 <= 64*u2)" = arg0_1 <= mul;  mul = None
        _assert_scalar_3 = torch.ops.aten._assert_scalar.default(le, "Runtime assertion failed for expression u0 <= 64*u2 on node 'le_1'");  le = _assert_scalar_3 = None
        _assert_scalar_4 = torch.ops.aten._assert_scalar.default(ge_2, "Runtime assertion failed for expression u3 >= 0 on node 'ge_4'");  ge_2 = _assert_scalar_4 = None
        eq: "Sym(True)" = arg5_1 == arg3_1;  arg5_1 = arg3_1 = None
        _assert_scalar_5 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u3, u2) on node 'eq'");  _assert_scalar_5 = None
        _assert_scalar_6 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u4 >= 0 on node 'ge_5'");  _assert_scalar_6 = None
        _assert_scalar_7 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u4, u1) on node 'eq_1'");  _assert_scalar_7 = None
        _assert_scalar_8 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u5 >= 0 on node 'ge_6'");  _assert_scalar_8 = None
        _assert_scalar_9 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u5, u1) on node 'eq_2'");  _assert_scalar_9 = None
        _assert_scalar_10 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u6 >= 0 on node 'ge_7'");  ge_1 = _assert_scalar_10 = None
        _assert_scalar_11 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u6, u1) on node 'eq_3'");  eq = _assert_scalar_11 = None

        score_keys: "f32[u1, 64*u2][Max(1, 64*u2), 1]" = torch.ops.sparse_prefill.score_keys.default(arg2_1, None, arg4_1, arg6_1, arg8_1, arg10_1, arg12_1, 1.0, 'exact');  arg2_1 = arg4_1 = arg6_1 = arg8_1 = arg10_1 = arg12_1 = None

        slice_1: "f32[u1, u0][Max(1, 64*u2), 1]" = torch.ops.aten.slice.Tensor(score_keys, 1, 0, arg0_1);  score_keys = arg0_1 = None
        return (slice_1,)
""")

