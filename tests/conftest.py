"""Settings shared by every test file: where the helpers lie, how hypothesis searches, what a compiling test starts from."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

# reference.py and samples.py are plain modules beside the tests, imported by name.
sys.path.append(str(Path(__file__).parent))

# Timings vary widely on shared machines, so no deadline. CI repeats the same examples every time; a developer's runs explore.
settings.register_profile(
    "default",
    max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "25")),
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("default")

# Sizes are small: more threads would spend most of their time waiting for each other, above all beside other processes.
torch.set_num_threads(1)


@pytest.fixture
def fresh_compile():
    """For tests that compile: no graph of an earlier test, no cache (its key does not see fakes' bodies), inference graphs."""
    import torch._dynamo
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True), torch.no_grad():
        yield
    torch._dynamo.reset()
