"""The README's op table says what the op table of the code says."""

import re
from pathlib import Path

import pytest
import torch

from sparse_prefill import library

README = (Path(__file__).parent.parent / "README.md").read_text()
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in README.splitlines()
    if line.startswith("| `") and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 4
}
SCHEMAS = {op.name: op.schema for op in library.OPS} | {"view_sparse_kv_pages": library.VIEW_SCHEMA}


def test_every_op_has_a_row_and_every_row_an_op():
    assert list(ROWS) and sorted(ROWS) == sorted(SCHEMAS)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_row_names_what_its_schema_mutates_and_returns(name):
    mutates, returns, _ = ROWS[name]
    schema = torch._C.parse_schema(SCHEMAS[name])
    written = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    assert [part for part in mutates.split(", ") if part] == written
    assert bool(returns) == bool(schema.returns)


@pytest.mark.parametrize("op", library.OPS, ids=lambda op: op.name)
def test_a_row_says_whether_a_graph_may_hold_the_op(op):
    answer = ROWS[op.name][2]
    assert answer.startswith(op.capture)
    assert all(re.search(word, answer) for word in op.fixed)
