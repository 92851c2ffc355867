"""The op table. Each row defines one op: its schema, where its functions live, and whether a CUDA graph may hold it.

Everything is registered here, once, from this table:

- ``sparse_prefill.cpu.<stem>.<op>`` is the CPU kernel, ``sparse_prefill.triton.<stem>.<op>`` the CUDA and ROCm one (imported at
  its first call, so that importing the package imports no Triton), ``sparse_prefill.meta.<stem>.<op>`` the fake;
- ``sparse_prefill.validation.<op>`` checks the arguments, in front of every kernel and every fake, so that a bad argument is
  named whether an op is called eagerly, through ``torch.ops`` or while a graph is traced.

``torch.library.Library`` with explicit schemas is used instead of ``torch.library.custom_op`` because it costs a tenth per call
and because the view op needs an alias annotation. No schema has defaults: the dispatcher drops an argument that equals one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from . import validation
from .meta import view as _view

NAMESPACE = "sparse_prefill"


@dataclass(frozen=True)
class Op:
    """One row of the table.

    ``capture`` says whether the op may sit inside a CUDA graph: "yes", with ``fixed`` naming what must keep its address and size
    between capture and replay, or "no", which tags the op ``cudagraph_unsafe`` so that Inductor splits its graph there.
    """

    stem: str
    schema: str
    capture: Literal["yes", "no"]
    fixed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]


OPS: tuple[Op, ...] = (
    Op(
        "store_index_keys",
        "store_index_keys(Tensor keys, Tensor(a!) cache, Tensor slot_mapping) -> ()",
        "yes",
        ("buffers", "sizes"),
    ),
    Op(
        "stage_keys",
        "stage_keys(Tensor cache, Tensor block_table, Tensor cu_seq_lens, Tensor token_to_seq)"
        " -> (Tensor payload, Tensor scales)",
        "yes",
        ("sizes",),
    ),
    Op(
        "stage_keys",
        "pack_keys(Tensor cache, Tensor block_table, Tensor local_cu_seq_lens, SymInt max_local_keys) -> Tensor",
        "yes",
        ("sizes",),
    ),
    Op(
        "stage_keys",
        "restore_keys(Tensor gathered, Tensor token_to_seq, Tensor cu_seq_lens, Tensor all_cu, int world, int interleave)"
        " -> (Tensor payload, Tensor scales)",
        "yes",
        ("sizes",),
    ),
    Op(
        "score_keys",
        "score_keys(Tensor q, Tensor? q_scale, Tensor payload, Tensor scales, Tensor weights, Tensor ks, Tensor ke,"
        " float weight_scale, str precision) -> Tensor",
        "yes",
        ("buffers", "sizes"),
    ),
    Op(
        "select_keys",
        "select_keys(Tensor logits, Tensor ks, Tensor ke, int k, int keep_first, int keep_last) -> Tensor",
        "yes",
        ("buffers", "sizes"),
    ),
    Op(
        "prefill_chunks",
        "prefill_chunks(Tensor q, Tensor? q_scale, Tensor weights, Tensor cache, Tensor(a!) out, Tensor sets, Tensor chunks,"
        " Tensor tiles, Tensor block_tables, Tensor cu_seq_lens, Tensor token_to_seq, Tensor ks, Tensor ke, Tensor all_cu,"
        " int world, int interleave, float weight_scale, int keep_first, int keep_last, str precision) -> ()",
        "no",  # a host loop over the plan's tables
    ),
    Op("regions", "append_own_region(Tensor selected, Tensor positions) -> Tensor", "yes", ("buffers", "sizes")),
    Op(
        "regions",
        "fixup_positions(Tensor positions, Tensor(a!) indptr, Tensor(b!) last_page_len, int region_count) -> ()",
        "yes",
        ("buffers", "sizes"),
    ),
    Op(
        "fill",
        "fill_prefill_pages(Tensor regions, Tensor table, Tensor owners, Tensor indptr, Tensor(a!) pages, int block_size,"
        " Tensor query, Tensor(b!) contiguous_query, SymInt page_stride, SymInt start, SymInt num_pages) -> ()",
        "yes",
        ("buffers", "sizes"),
    ),
    Op("fill", "store_owners(Tensor owners, Tensor(a!) kept, SymInt start) -> ()", "yes", ("buffers", "sizes")),
    Op(
        "stage",
        "stage_prefill_pages(Tensor cache, Tensor pages, str dtype, Tensor? k_scale, Tensor? v_scale) -> Tensor",
        "yes",
        ("buffers", "sizes"),
    ),
    Op(
        "attention",
        "paged_attention(Tensor query, Tensor cache, Tensor pages, Tensor indptr, Tensor last_page_len, Tensor owners,"
        " Tensor(a!) out, float scale, Tensor? k_scale, Tensor? v_scale, str backend) -> ()",
        "yes",
        ("plan", "buffers"),
    ),
)

VIEW_SCHEMA = "view_sparse_kv_pages(Tensor(a) cache) -> (Tensor(a), Tensor(a))"

# Held at module level: a Library that is garbage-collected takes its ops along.
_library = torch.library.Library(NAMESPACE, "DEF")


def _find(package: str, op: Op) -> Callable:
    return getattr(importlib.import_module(f"{NAMESPACE}.{package}.{op.stem}"), op.name)


def _kernel(op: Op, package: str) -> Callable:
    """The function registered for one dispatch key: check, refuse aliases, run."""
    check = getattr(validation, op.name)
    schema = torch._C.parse_schema(op.schema)
    is_tensor = [argument.type.isSubtypeOf(torch._C.OptionalType(torch._C.TensorType.get())) for argument in schema.arguments]
    mutated = [i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    # Each unordered pair of a mutated tensor and any other tensor.
    pairs = [(i, j) for i in mutated for j, ok in enumerate(is_tensor) if ok and j != i and not (j in mutated and j < i)]
    names = [argument.name for argument in schema.arguments]
    implementation: Callable | None = None

    def kernel(*args):
        nonlocal implementation
        check(*args)
        for i in mutated:
            validation.refuse_internal_overlap(op.name, names[i], args[i])
        for i, j in pairs:
            if args[j] is not None:
                validation.refuse_overlap(op.name, names[j], args[j], names[i], args[i])
        if implementation is None:
            implementation = _find(package, op)
        if package == "triton" and args[0].device.index != torch.cuda.current_device():
            # Kernels are launched on the current device and its stream.
            with torch.cuda.device(args[0].device):
                return implementation(*args)
        return implementation(*args)

    return kernel


def _fake(op: Op) -> Callable:
    check, shape = getattr(validation, op.name), _find("meta", op)

    def fake(*args):
        check(*args)
        return shape(*args)

    return fake


def splitting_ops() -> list[str]:
    """Names ("namespace::op") of the ops that no CUDA graph may hold, for engines that split their graphs themselves."""
    return [f"{NAMESPACE}::{op.name}" for op in OPS if op.capture == "no"]


def _register() -> None:
    # Both tags hold for every op: strides that kernels see are the strides that eager code passes.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    for op in OPS:
        _library.define(op.schema, tags=(*tags, torch.Tag.cudagraph_unsafe) if op.capture == "no" else tags)
        _library.impl(op.name, _kernel(op, "cpu"), "CPU")
        _library.impl(op.name, _kernel(op, "triton"), "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{op.name}", _fake(op), lib=_library)
    # The one op whose outputs alias its input. Any registration but this one is refused by AOT; it needs no fake.
    _library.define(VIEW_SCHEMA, tags=tags)
    _library.impl("view_sparse_kv_pages", _view.view_sparse_kv_pages, "CompositeImplicitAutograd")


_register()
