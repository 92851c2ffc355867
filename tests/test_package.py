"""The installed package: what importing it costs and drags in, and what a stray second import does."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import sparse_prefill as sp

ROOT = Path(__file__).parent.parent


def run(script, cwd=None, check=True, timeout=120, **environment):
    """A fresh interpreter outside the source tree."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=cwd or Path(sys.executable).parent,
        check=check,
        timeout=timeout,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_import_costs_less_than_300_ms_over_torch():
    script = """
        import time, torch
        start = time.perf_counter()
        import sparse_prefill
        print(time.perf_counter() - start)
    """
    assert any(float(run(script).stdout) < 0.3 for _ in range(3))  # the quickest of three: other processes slow an import down


def test_import_drags_in_no_heavy_module():
    script = """
        import json, sys, torch
        before = set(sys.modules)
        import sparse_prefill
        print(json.dumps(sorted(set(sys.modules) - before)))
    """
    added = json.loads(run(script).stdout)
    heavy = (
        "triton",
        "flashinfer",
        "transformers",
        "torch._dynamo",
        "torch._inductor",
        "hypothesis",
        "pytest",
        "matplotlib",
        "expecttest",
    )
    assert not [name for name in added if name.startswith(heavy)]
    assert not {"ops", "meta", "tools"} & set(added)
    assert not [
        name for name in added if name.startswith(("sparse_prefill.triton", "sparse_prefill.flashinfer", "sparse_prefill.tools"))
    ]


def test_import_and_a_cpu_call_start_no_gpu():
    script = """
        import torch, sparse_prefill as sp
        def refuse(*args, **kwargs):
            raise AssertionError("CUDA was initialized")
        torch.cuda._lazy_init = refuse
        import sys
        out = sp.select_keys(torch.randn(2, 5), torch.zeros(2, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32), 2)
        assert not torch.cuda.is_initialized() and "triton" not in sys.modules and "torch._dynamo" not in sys.modules
    """
    run(script)


@pytest.mark.parametrize("statement", ["import ops", "import sparse_prefill, ops", "import ops.library"])
def test_the_source_folder_imported_as_a_package_is_refused(statement):
    """From the source root `import ops` finds the package under a wrong name: every op would be defined twice."""
    result = run(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{statement}", check=False)
    assert result.returncode != 0
    assert "ImportError" in result.stderr and "sparse_prefill" in result.stderr


def test_importing_twice_is_once_and_ops_outlive_the_name():
    """The library object is held at module level: ops survive garbage collection and a dropped reference to the package."""
    script = """
        import gc, importlib, torch
        import sparse_prefill
        assert importlib.import_module("sparse_prefill") is sparse_prefill
        op = torch.ops.sparse_prefill.append_own_region
        del sparse_prefill
        gc.collect()
        assert op(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([9])).tolist() == [[0, 1]]
    """
    run(script)


def test_a_second_import_after_unloading_is_refused_or_works():
    script = """
        import sys, torch, sparse_prefill
        for name in [n for n in sys.modules if n.startswith("sparse_prefill")]:
            del sys.modules[name]
        try:
            import sparse_prefill
        except (ImportError, RuntimeError) as error:
            print("refused:", error)
        else:
            one = torch.zeros(1, dtype=torch.int32)
            print(sparse_prefill.select_keys(torch.ones(1, 1), one, one + 1, 1))
    """
    assert run(script).stdout


def test_source_names_are_not_modules_here():
    assert not {"ops", "meta", "tools"} & set(sys.modules)


def test_a_forked_process_runs_ops():
    script = """
        import os, torch, sparse_prefill as sp
        torch.set_num_threads(1)
        def call():
            return sp.append_own_region(torch.zeros(2, 1, dtype=torch.int32), torch.tensor([9, -1])).tolist()
        expected = call()
        child = os.fork()
        if child == 0:
            os._exit(0 if call() == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
    """
    run(script)


def test_no_op_outside_the_namespace():
    script = """
        import torch
        before = {str(schema.name) for schema in torch._C._jit_get_all_schemas()}
        import sparse_prefill
        added = {str(schema.name) for schema in torch._C._jit_get_all_schemas()} - before
        assert added and all(name.startswith("sparse_prefill::") for name in added), added
        print("\\n".join(added))
    """
    added = set(run(script).stdout.split())
    from sparse_prefill.library import OPS

    assert {f"sparse_prefill::{op.name}" for op in OPS} | {"sparse_prefill::view_sparse_kv_pages"} <= added


def test_public_names():
    assert sorted(sp.__all__) == sorted(set(sp.__all__))
    for name in sp.__all__:
        value = getattr(sp, name)
        assert value.__module__.startswith("sparse_prefill")
        assert value.__doc__ and len(value.__doc__) > 40, f"{name} needs a docstring"
    public = {name for name in vars(sp) if not name.startswith("_") and not isinstance(getattr(sp, name), type(sys))}
    assert public == set(sp.__all__)


def test_the_package_is_typed():
    assert (Path(sp.__file__).parent / "py.typed").exists()


def test_meta_imports_no_kernel():
    """Fakes know shapes only."""
    for file in (ROOT / "meta").glob("*.py"):
        assert not re.search(r"^\s*(from|import) .*\b(cpu|triton|flashinfer)\b", file.read_text(), re.MULTILINE), file.name


def test_tools_use_the_public_interface_only():
    for file in (ROOT / "tools").glob("**/*.py"):
        found = re.findall(r"^\s*(?:from|import) +(sparse_prefill\.[\w.]+)", file.read_text(), re.MULTILINE)
        assert not [name for name in found if not name.startswith("sparse_prefill.tools")], (file.name, found)


def test_registrations_name_the_namespace():
    """No op is defined or implemented under another library's name."""
    for file in (ROOT / "ops").glob("**/*.py"):
        for match in re.finditer(r"torch\.library\.(?:Library|custom_op|triton_op)\(([^,)]*)", file.read_text()):
            assert match[1].strip() in ("NAMESPACE", '"sparse_prefill"'), (file.name, match[0])


def first_example():
    readme = ROOT / "README.md"
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL) if readme.exists() else []
    return blocks[0] if blocks else None


@pytest.mark.skipif(first_example() is None, reason="README.md has no Python example yet")
def test_the_readmes_example_runs_as_printed():
    example = first_example()
    assert len(example.strip().splitlines()) <= 30
    subprocess.run([sys.executable, "-c", example], check=True, timeout=120, cwd=Path(sys.executable).parent)


def test_the_compile_cache_keeps_its_meaning(tmp_path):
    """Two processes share Inductor's cache: the second finds the first's graph and computes what eager code does."""
    script = """
        import torch, sparse_prefill as sp
        torch.manual_seed(0)
        logits = torch.randn(4, 30)
        ks, positions = torch.zeros(4, dtype=torch.int32), torch.full((4,), 250)

        def step(x):
            return sp.append_own_region(sp.select_keys(x, ks, ks + 30, 3), positions)

        with torch.no_grad():
            assert torch.equal(torch.compile(step, fullgraph=True)(logits), step(logits))
    """
    for _ in range(2):
        run(script, timeout=300, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
