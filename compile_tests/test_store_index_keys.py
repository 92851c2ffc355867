"""The graphs of store_index_keys. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_store_index_keys():
    keys = torch.randn(5, 128).to(torch.bfloat16)
    cache = torch.zeros(3, 64, 68, dtype=torch.uint8)
    slots = torch.arange(5)
    sp.mark_unbacked_sizes(keys, slots)

    def function(keys, cache, slots):
        sp.store_index_keys(keys, cache, slots)

    assert_expected_inline(graphs(function, keys, cache, slots), """\
class GraphModule(torch.nn.Module):
    def forward(self, u0: "Sym(u0)", L_keys_: "bf16[u0, 128][128, 1]", L_cache_: "u8[3, 64, 68][4352, 68, 1]", u1: "Sym(u0)", L_slots_: "i64[u0][1]"):
        l_keys_ = L_keys_
        l_cache_ = L_cache_
        l_slots_ = L_slots_

        ge: "Sym(u0 >= 0)" = u0 >= 0
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None
        ge_1: "Sym(u0 >= 0)" = u1 >= 0
        _assert_scalar_default_1 = torch.ops.aten._assert_scalar.default(ge_1, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge_1 = _assert_scalar_default_1 = None
        eq: "Sym(True)" = u1 == u0;  u1 = u0 = None
        _assert_scalar_default_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_default_2 = None

        store_index_keys = torch.ops.sparse_prefill.store_index_keys(l_keys_, l_cache_, l_slots_);  l_keys_ = l_cache_ = l_slots_ = store_index_keys = None
        return ()

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "Sym(u0)", arg1_1: "bf16[u0, 128][128, 1]", arg2_1: "u8[3, 64, 68][4352, 68, 1]", arg3_1: "Sym(u0)", arg4_1: "i64[u0][1]"):
        ge: "Sym(u0 >= 0)" = arg0_1 >= 0
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  _assert_scalar = None
        _assert_scalar_1 = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u1 >= 0 on node 'ge_1'");  ge = _assert_scalar_1 = None
        eq: "Sym(True)" = arg3_1 == arg0_1;  arg3_1 = arg0_1 = None
        _assert_scalar_2 = torch.ops.aten._assert_scalar.default(eq, "Runtime assertion failed for expression Eq(u1, u0) on node 'eq'");  eq = _assert_scalar_2 = None

        auto_functionalized_v2 = torch.ops.higher_order.auto_functionalized_v2(torch.ops.sparse_prefill.store_index_keys.default, keys = arg1_1, slot_mapping = arg4_1, _cache_base_index = 0, _all_bases = [arg2_1]);  arg1_1 = arg4_1 = None
        getitem_1: "u8[3, 64, 68][4352, 68, 1]" = auto_functionalized_v2[1];  auto_functionalized_v2 = None
        copy_: "u8[3, 64, 68][4352, 68, 1]" = torch.ops.aten.copy_.default(arg2_1, getitem_1);  arg2_1 = getitem_1 = copy_ = None
        return ()
""")

