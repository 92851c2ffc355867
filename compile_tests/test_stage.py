"""The graphs of stage_prefill_pages. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_stage_prefill_pages():
    cache = torch.zeros(4, 2, 64, 32, dtype=torch.uint8)[:, 1:]
    staged = sp.plan_staged_prefill_pages(torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), [100, 20], 64)
    scale = torch.ones(1)
    sp.mark_unbacked_sizes(staged.pages)

    def function(cache, staged, scale):
        return sp.stage_prefill_pages(cache, staged, torch.bfloat16, scale, scale)

    assert_expected_inline(graphs(function, cache, staged, scale), """\
class GraphModule(torch.nn.Module):
    def forward(self, L_cache_: "u8[4, 1, 64, 32][4096, 2048, 32, 1]", u0: "Sym(u0)", L_staged_pages: "i32[u0][1]", L_scale_: "f32[1][1]"):
        l_cache_ = L_cache_
        l_staged_pages = L_staged_pages
        l_scale_ = L_scale_

        ge: "Sym(u0 >= 0)" = u0 >= 0;  u0 = None
        _assert_scalar_default = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar_default = None

        stage_prefill_pages: "bf16[u0, 1, 64, 32][2048, 2048, 32, 1]" = torch.ops.sparse_prefill.stage_prefill_pages(l_cache_, l_staged_pages, 'bfloat16', l_scale_, l_scale_);  l_cache_ = l_staged_pages = l_scale_ = None
        return (stage_prefill_pages,)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "u8[4, 1, 64, 32][4096, 2048, 32, 1]", arg1_1: "Sym(u0)", arg2_1: "i32[u0][1]", arg3_1: "f32[1][1]"):
        ge: "Sym(u0 >= 0)" = arg1_1 >= 0;  arg1_1 = None
        _assert_scalar = torch.ops.aten._assert_scalar.default(ge, "Runtime assertion failed for expression u0 >= 0 on node 'ge'");  ge = _assert_scalar = None

        stage_prefill_pages: "bf16[u0, 1, 64, 32][2048, 2048, 32, 1]" = torch.ops.sparse_prefill.stage_prefill_pages.default(arg0_1, arg2_1, 'bfloat16', arg3_1, arg3_1);  arg0_1 = arg2_1 = arg3_1 = None
        return (stage_prefill_pages,)
""")

