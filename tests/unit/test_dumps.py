"""A dump with a hole: its header is right, its figures are those of the device, and the states never arrived."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.errors import TransientPrefillError
from tasks.server.dumps import LOOKED_AT, find_hole, open_dump
from tests.unit.helpers import CAPTURED, HIDDEN, Request

IDS = np.array([5, 6, 7, 8, 9], dtype=np.int32)
WIDE = 7168

Edit = Callable[[torch.Tensor, torch.Tensor], None]


def dump_with(staging: Path, edit: Edit) -> Path:
    return Request("drillcore-ab-0-0-5", 0, IDS, staging).write_dump(
        lambda metadata, tensors: edit(tensors["aux_hidden_states"], tensors["last_hidden_state"])
    )


@pytest.mark.parametrize(
    ("edit", "where"),
    [
        (lambda aux, last: (aux.zero_(), last.zero_()), "layer 1, token 0"),
        (
            lambda aux, last: aux[2:, :HIDDEN].zero_(),
            "layer 1, token 2 of 5 and all after it: the last chunk is missing",
        ),
        (lambda aux, last: aux[4, HIDDEN:].zero_(), "layer 4, token 4"),
        (lambda aux, last: last[3].zero_(), "the final state, token 3"),
    ],
)
def test_a_state_that_nobody_wrote_is_found_whatever_the_header_says(tmp_path: Path, edit: Edit, where: str) -> None:
    path = dump_with(tmp_path, edit)
    with pytest.raises(TransientPrefillError, match=f"has holes: nothing was written at {where}$"):
        open_dump(path, IDS, CAPTURED)


@pytest.mark.parametrize(
    "edit",
    [
        lambda aux, last: None,
        lambda aux, last: last[3, 1:].zero_(),  # a sparse state
        lambda aux, last: last[3].fill_(-0.0),  # zero, but written
    ],
)
def test_a_state_that_somebody_wrote_is_no_hole(tmp_path: Path, edit: Edit) -> None:
    assert open_dump(dump_with(tmp_path, edit), IDS, CAPTURED).chunks == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [1, LOOKED_AT - 1, 100, WIDE])
def test_zeros_where_it_looks_first_are_no_hole_unless_all_is_zero(dtype: torch.dtype, hidden: int) -> None:
    aux, last = torch.ones(7, 3 * hidden, dtype=dtype), torch.ones(7, hidden, dtype=dtype)
    aux[5, hidden : 2 * hidden - 1] = 0  # one element is left
    assert find_hole(aux, last) is None
    aux[5, hidden : 2 * hidden] = 0
    assert find_hole(aux, last) == (5, 1)
    aux[5] = 1
    last[6] = 0
    assert find_hole(aux, last) == (6, 3)
