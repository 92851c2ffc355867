"""The graphs of view_sparse_kv_pages. Re-accept with EXPECTTEST_ACCEPT=1."""

import torch
from dump import graphs
from expecttest import assert_expected_inline

import sparse_prefill as sp


def test_one_group_of_a_cache_with_gaps():
    cache = torch.zeros(4, 2, 64, 32, dtype=torch.bfloat16)[:, 1:]

    def function(cache):
        k, v = sp.view_sparse_kv_pages(cache)
        return k.sum(), v.sum()

    assert_expected_inline(graphs(function, cache), """\
class GraphModule(torch.nn.Module):
    def forward(self, L_cache_: "bf16[4, 1, 64, 32][4096, 2048, 32, 1]"):
        l_cache_ = L_cache_

        view_sparse_kv_pages = torch.ops.sparse_prefill.view_sparse_kv_pages(l_cache_);  l_cache_ = None
        k: "bf16[56, 8, 1, 16][256, 32, 32, 1]" = view_sparse_kv_pages[0]
        v: "bf16[56, 8, 1, 16][256, 32, 32, 1]" = view_sparse_kv_pages[1];  view_sparse_kv_pages = None

        sum_1: "bf16[][]" = k.sum();  k = None
        sum_2: "bf16[][]" = v.sum();  v = None
        return (sum_1, sum_2)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "bf16[4, 1, 64, 32][4096, 2048, 32, 1]"):
        as_strided: "bf16[56, 8, 1, 32][256, 32, 32, 1]" = torch.ops.aten.as_strided.default(arg0_1, [56, 8, 1, 32], [256, 32, 32, 1]);  arg0_1 = None
        slice_1: "bf16[56, 8, 1, 16][256, 32, 32, 1]" = torch.ops.aten.slice.Tensor(as_strided, 3, 0, 16)
        slice_2: "bf16[56, 8, 1, 16][256, 32, 32, 1]" = torch.ops.aten.slice.Tensor(as_strided, 3, 16, 32);  as_strided = None

        sum_1: "bf16[][]" = torch.ops.aten.sum.default(slice_1);  slice_1 = None
        sum_2: "bf16[][]" = torch.ops.aten.sum.default(slice_2);  slice_2 = None
        return (sum_1, sum_2)
""")


def test_a_cache_without_gaps():
    cache = torch.zeros(4, 1, 64, 32, dtype=torch.bfloat16)

    def function(cache):
        k, v = sp.view_sparse_kv_pages(cache)
        return k.sum(), v.sum()

    assert_expected_inline(graphs(function, cache), """\
class GraphModule(torch.nn.Module):
    def forward(self, L_cache_: "bf16[4, 1, 64, 32][2048, 2048, 32, 1]"):
        l_cache_ = L_cache_

        view_sparse_kv_pages = torch.ops.sparse_prefill.view_sparse_kv_pages(l_cache_);  l_cache_ = None
        k: "bf16[32, 8, 1, 16][256, 32, 32, 1]" = view_sparse_kv_pages[0]
        v: "bf16[32, 8, 1, 16][256, 32, 32, 1]" = view_sparse_kv_pages[1];  view_sparse_kv_pages = None

        sum_1: "bf16[][]" = k.sum();  k = None
        sum_2: "bf16[][]" = v.sum();  v = None
        return (sum_1, sum_2)

class <lambda>(torch.nn.Module):
    def forward(self, arg0_1: "bf16[4, 1, 64, 32][2048, 2048, 32, 1]"):
        squeeze: "bf16[4, 64, 32][2048, 32, 1]" = torch.ops.aten.squeeze.dim(arg0_1, 1);  arg0_1 = None
        view: "bf16[32, 8, 32][256, 32, 1]" = torch.ops.aten.view.default(squeeze, [32, 8, 32]);  squeeze = None
        unsqueeze: "bf16[32, 8, 1, 32][256, 32, 32, 1]" = torch.ops.aten.unsqueeze.default(view, 2);  view = None
        slice_1: "bf16[32, 8, 1, 16][256, 32, 32, 1]" = torch.ops.aten.slice.Tensor(unsqueeze, 3, 0, 16)
        slice_2: "bf16[32, 8, 1, 16][256, 32, 32, 1]" = torch.ops.aten.slice.Tensor(unsqueeze, 3, 16, 32);  unsqueeze = None

        sum_1: "bf16[][]" = torch.ops.aten.sum.default(slice_1);  slice_1 = None
        sum_2: "bf16[][]" = torch.ops.aten.sum.default(slice_2);  slice_2 = None
        return (sum_1, sum_2)
""")

