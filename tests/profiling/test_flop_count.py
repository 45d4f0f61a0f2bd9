"""Counted operations and bytes agree with arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from gemini.profiling.flop_count import WorkCounter


def counted(call):
    with WorkCounter() as counter:
        call()
        return counter.take()


def test_a_matrix_product_and_an_element_wise_kernel():
    a, b = torch.randn(8, 16), torch.randn(16, 4)
    product = counted(lambda: a @ b)
    assert (product.flops, product.nbytes) == (2 * 8 * 16 * 4, 4 * (8 * 16 + 16 * 4 + 8 * 4))
    assert counted(a.exp).flops == 8 * 16


@pytest.mark.parametrize(
    "gather",
    [
        lambda table, rows: functional.embedding(rows, table),
        lambda table, rows: table.index_select(0, rows),
        lambda table, rows: table[rows],
    ],
)
def test_a_gather_reads_what_it_returns_and_not_the_whole_table(gather):
    table, rows = torch.randn(1000, 4), torch.arange(3)
    assert counted(lambda: gather(table, rows)).nbytes == 2 * 3 * 4 * 4 + 3 * 8


def test_views_move_nothing_and_an_expanded_tensor_has_few_bytes():
    x = torch.randn(4, 1)
    assert counted(lambda: x.view(2, 2).t()).nbytes == 0
    wide = x.expand(4, 1000)
    assert counted(wide.sum).nbytes == 4 * 4 + 4
