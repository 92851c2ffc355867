"""Compiles Triton kernels ahead of time for GPUs that are not here, and reads what the compiler made of them."""

import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# What one program may use of a GPU's shared memory, in bytes.
SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536, "gfx950": 163840}
TARGETS = list(SHARED_MEMORY)


def target_of(name):
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, 64)


def compile_kernel(kernel, target, types, constants, aligned=(), **options):
    """The compiled kernel. types: of run-time arguments, as in Triton's signatures; aligned: those divisible by 16."""
    names = kernel.arg_names
    missing = set(names) - set(types) - set(constants)
    assert not missing, f"no type or value for {sorted(missing)}"
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource as source
    compiled = triton.compile(
        source(fn=kernel, signature=signature, constexprs=values, attrs=attributes), target=target_of(target), options=options
    )
    assert compiled.metadata.shared <= SHARED_MEMORY[target], f"{compiled.metadata.shared} bytes of shared memory"
    return compiled


def stack_bytes(compiled):
    """Bytes of stack a thread of an NVIDIA kernel has: what its registers spill to."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])
