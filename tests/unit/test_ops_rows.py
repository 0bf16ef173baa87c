"""Row counts and batches, for every operation (rows HC-3, HC-7)."""

from __future__ import annotations

import pytest
import torch

from tests.op_examples import LABELS, WINDOW, example

ROW_COUNTS = (0, 1, 2, 3, 5, 7, 31, 33, 127, 129)
PER_ROW = [label for label in LABELS if "Insert" not in label]
"""Operations whose outputs have a row for each input row; an insertion returns the ring."""
FLOAT32 = 4e-6
"""Share of the largest value: float32 sums over 512 channels in an order that depends on the batch."""


@pytest.mark.parametrize("label", LABELS)
def test_every_row_count_equals_its_rows_alone(label: str) -> None:
    """HC-3: counts around and below every tile size; 0 rows is a no-op."""
    whole = example(label, torch.bfloat16, rows=max(ROW_COUNTS))
    outputs = whole.run()
    for count in ROW_COUNTS:
        found = whole.rows(slice(0, count)).run()
        if label in PER_ROW:
            for part, full in zip(found, outputs, strict=True):
                assert torch.equal(part, full[:count])
        elif count == 0:
            assert torch.equal(found[0], whole.tensors[3])
        else:
            last = whole.rows(slice(count - 1, count))
            position, slot = int(last.tensors[1][0]), int(last.tensors[2][0])
            entry = last.run()[0][slot, position % WINDOW]
            assert torch.equal(found[0][slot, position % WINDOW], entry)


@pytest.mark.parametrize("activation", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("label", PER_ROW)
def test_row_does_not_depend_on_its_batch(label: str, activation: torch.dtype) -> None:
    """HC-7: a row alone and inside batches of 1..40, wherever it stands. Bit-equal for 16-bit activations, and
    for float32 where the products are of codes; float32 products stay within their bound."""
    exact = activation is not torch.float32 or "Quantized" in label or "Experts" in label
    whole = example(label, activation, rows=40, seed=1)
    outputs = whole.run()
    generator = torch.Generator().manual_seed(2)
    for count in (1, 2, 3, 4, 5, 6, 8, 11, 16, 23, 32, 39, 40):
        chosen = torch.randperm(40, generator=generator)[:count]
        for part, full in zip(whole.rows(chosen).run(), outputs, strict=True):
            if exact or not part.is_floating_point():
                assert torch.equal(part, full[chosen])
            else:
                assert (part - full[chosen]).abs().max() <= FLOAT32 * full.abs().max()


@pytest.mark.parametrize("label", LABELS)
def test_nan_stays_in_its_row(label: str) -> None:
    """HC-2: one row of NaN, and one of +inf, leave the bits of all other rows alone."""
    whole = example(label, torch.bfloat16, rows=9, seed=3)
    clean, poisoned = whole.run(), whole.tensors[0].clone()
    poisoned[4], poisoned[7] = torch.nan, torch.inf
    others = [i for i in range(9) if i not in (4, 7)]
    found = whole.replaced(0, poisoned).run()
    if label in PER_ROW:
        for part, full in zip(found, clean, strict=True):
            assert torch.equal(part[others], full[others])
        assert not all(torch.equal(part, full) for part, full in zip(found, clean, strict=True))
    else:
        touched = [(int(whole.tensors[2][i]), int(whole.tensors[1][i]) % WINDOW) for i in (4, 7)]
        same = (found[0] == clean[0]).all(-1)
        assert sorted(map(tuple, (~same).nonzero().tolist())) == sorted(touched)


@pytest.mark.parametrize("label", LABELS)
def test_inputs_are_left_alone(label: str) -> None:
    """The reference never writes into its inputs, the aliased ring included."""
    one = example(label, torch.float32, rows=9, seed=4)
    before = [t.clone() for t in one.tensors]
    one.run()
    for tensor, old in zip(one.tensors, before, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("label", LABELS)
def test_strided_inputs_give_the_same_bits(label: str) -> None:
    """SMP-10: views with other strides (every second row of a larger buffer, transposed storage)."""
    one = example(label, torch.bfloat16, rows=8, seed=5)
    strided = one
    for i, tensor in enumerate(one.tensors):
        buffer = torch.stack((tensor, torch.zeros_like(tensor)), 1).flatten(0, 1)
        view = buffer[::2]
        if tensor.dim() > 1 and tensor.dtype != torch.int8:
            view = view.transpose(0, 1).contiguous().transpose(0, 1)
        assert torch.equal(view, tensor)
        strided = strided.replaced(i, view)
    for found, wanted in zip(strided.run(), one.run(), strict=True):
        assert torch.equal(found, wanted)
