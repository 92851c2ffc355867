"""The compile cache: a second process takes the first one's graph and computes the same."""

import os
import subprocess
import sys

PROGRAM = """
import torch
import sparse_prefill as sp
from torch._dynamo.utils import counters

torch.set_grad_enabled(False)
torch.manual_seed(0)

def function(logits, ks, ke, positions):
    return sp.append_own_region(sp.select_keys(logits * 2, ks, ke, 3), positions) + 1

arguments = torch.randn(6, 10), torch.zeros(6, dtype=torch.int32), torch.full((6,), 10, dtype=torch.int32), torch.arange(80, 86)
out = torch.compile(function, fullgraph=True)(*arguments)
assert torch.equal(out, function(*arguments))
print("hits", counters["inductor"]["fxgraph_cache_hit"], out.tolist())
"""


def test_a_second_process_hits_the_cache(tmp_path):
    env = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path), TORCHINDUCTOR_FX_GRAPH_CACHE="1")
    runs = [
        subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300) for _ in range(2)
    ]
    assert [run.returncode for run in runs] == [0, 0], runs[-1].stderr
    first, second = (run.stdout.split(maxsplit=2) for run in runs)
    assert first[1] == "0" and int(second[1]) >= 1
    assert first[2] == second[2]
