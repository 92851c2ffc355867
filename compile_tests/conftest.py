"""Every test here compiles: it starts without graphs, caches or grad mode left over from another."""

import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._inductor.config

# layer.py and dump.py are plain modules beside the tests, imported by name.
sys.path.append(str(Path(__file__).parent))

torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.fixture(autouse=True)
def fresh_compile():
    torch._dynamo.reset()
    # The compile cache's key sees neither the bodies of fakes nor tags.
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        yield
    torch._dynamo.reset()
