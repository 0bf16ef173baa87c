"""What operations refuse: tensors and attributes that the kernels were not built for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from dspark_trt.plugins.op import OpError, decode_attributes, encode_attributes
from dspark_trt.plugins.registry import ALL_OPS

from tests.op_examples import LABELS, Example, example

FIRST = {e.op.name: e.label for e in (example(label, torch.float32, rows=2) for label in reversed(LABELS))}
"""Operation -> a label of it."""
NAMES = sorted(ALL_OPS)


def call(name: str) -> Example:
    return example(FIRST[name], torch.float32, rows=2)


def inputs_of(name: str) -> list[str]:
    one = call(name)
    return [spec.name for spec in one.op.inputs(one.values)]


PAIRS = [(name, i) for name in NAMES for i in range(len(inputs_of(name)))]
every_input = pytest.mark.parametrize(("name", "position"), PAIRS, ids=[f"{n}.{inputs_of(n)[i]}" for n, i in PAIRS])


def test_every_operation_has_an_example() -> None:
    assert set(FIRST) == set(ALL_OPS)


@every_input
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
def test_unknown_dtype_is_refused(name: str, position: int, dtype: torch.dtype) -> None:
    """ENG-4: the message names the operation, the tensor, what it is and what was expected."""
    one = call(name)
    with pytest.raises(OpError, match=rf"^{name}: {inputs_of(name)[position]} is {dtype}, expected"):
        one.replaced(position, one.tensors[position].to(dtype)).run()


@every_input
def test_activation_dtypes_do_not_mix(name: str, position: int) -> None:
    """One activation type a call; fixed dtypes stay what they are."""
    one = call(name)
    specs = one.op.inputs(one.values)
    wrong = torch.float16 if specs[position].dtype in ("T", "float32") else torch.float32
    activations = [i for i, spec in enumerate(specs) if spec.dtype == "T"]
    if activations == [position]:
        wrong = torch.int8
    with pytest.raises(OpError, match=rf"^{name}: "):
        one.replaced(position, one.tensors[position].to(wrong)).run()


@every_input
def test_another_rank_is_refused(name: str, position: int) -> None:
    one = call(name)
    with pytest.raises(OpError, match=rf"^{name}: {inputs_of(name)[position]} has shape"):
        one.replaced(position, one.tensors[position].unsqueeze(0)).run()


def shared_dimensions() -> list[tuple[str, int, int]]:
    """(operation, input, dimension) whose size another input or the declaration fixes."""
    found = []
    for name in NAMES:
        one = call(name)
        specs = one.op.inputs(one.values)
        everywhere = [dim for spec in specs for dim in spec.dims]
        for i, spec in enumerate(specs):
            for j, dim in enumerate(spec.dims):
                if isinstance(dim, int) or everywhere.count(dim) > 1:
                    found.append((name, i, j))
    return found


SHARED = shared_dimensions()


@pytest.mark.parametrize(
    ("name", "position", "dimension"), SHARED, ids=[f"{n}.{inputs_of(n)[i]}[{j}]" for n, i, j in SHARED]
)
def test_size_that_contradicts_is_refused(name: str, position: int, dimension: int) -> None:
    """One element more than the declaration or the other inputs say, in every dimension that they fix."""
    one = call(name)
    tensor = one.tensors[position]
    wider = torch.cat((tensor, tensor.narrow(dimension, 0, 1)), dimension)
    with pytest.raises(OpError, match=rf"^{name}: .* has shape \[.*\], expected .*"):
        one.replaced(position, wider).run()


UNTIED = {
    # The declaration has no symbol for these relations; each has its own check.
    "QuantizedLinear.scale rows": ("QuantizedLinear", 2, 0),
    "QuantizedLinear.scale columns": ("QuantizedLinear", 2, 1),
    "MhcCoefficients.fn columns": ("MhcCoefficients", 1, 1),
    "MarkovSamplingSharded.head rows": ("MarkovSamplingSharded", 3, 0),
}


@pytest.mark.parametrize("case", UNTIED)
@pytest.mark.parametrize("change", [1, -1])
def test_derived_size_is_refused(case: str, change: int) -> None:
    """CK-5: a scale for each block, no more and no fewer; four streams of fn columns. Surplus scales would
    pass unnoticed, and shift a kernel's rows."""
    name, position, dimension = UNTIED[case]
    one = call(name)
    tensor = one.tensors[position]
    size = tensor.shape[dimension]
    changed = torch.cat((tensor, tensor), dimension).narrow(dimension, 0, size + change)
    with pytest.raises(OpError, match=rf"^{name}: "):
        one.replaced(position, changed).run()


def test_target_ring_below_the_window_is_refused() -> None:
    """A ring with fewer rows than the window would attend to rows of other positions."""
    one = call("TargetAttention")
    short = one.tensors[3][:, : one.attributes["window"] - 1]
    with pytest.raises(OpError, match=r"^TargetAttention: ring"):
        one.replaced(3, short.contiguous()).run()
    exact = one.tensors[3][:, : one.attributes["window"]]
    one.replaced(3, exact.contiguous()).run()


@pytest.mark.parametrize("name", NAMES)
def test_input_count_is_checked(name: str) -> None:
    one = call(name)
    count = len(one.tensors)
    for tensors in (one.tensors[:-1], (*one.tensors, one.tensors[0]), ()):
        with pytest.raises(OpError, match=rf"^{name} takes {count} inputs \(.*\), got {len(tensors)}"):
            one.op(*tensors, **one.attributes)


# Attributes ---------------------------------------------------------------------------------------------

WITH_ATTRIBUTES = [name for name in NAMES if call(name).attributes]


@pytest.mark.parametrize("name", NAMES)
def test_attributes_round_trip(name: str) -> None:
    """As an ONNX node or a plugin field carries them, and back."""
    one = call(name)
    encoded = encode_attributes(one.values)
    assert all(type(v) in (int, float, str) for v in encoded.values())
    assert decode_attributes(one.op, encoded) == one.values


@pytest.mark.parametrize("name", WITH_ATTRIBUTES)
def test_missing_attribute_is_refused(name: str) -> None:
    """No attribute has a default; the message says to export again."""
    one = call(name)
    for left_out in one.attributes:
        values = {k: v for k, v in encode_attributes(one.values).items() if k != left_out}
        with pytest.raises(OpError, match=rf"{name}: attributes missing \['{left_out}'\].*export it again"):
            decode_attributes(one.op, values)
        with pytest.raises(TypeError, match=left_out):
            one.op(*one.tensors, **{k: v for k, v in one.attributes.items() if k != left_out})


@pytest.mark.parametrize("name", NAMES)
def test_unknown_attribute_is_refused(name: str) -> None:
    one = call(name)
    with pytest.raises(OpError, match=rf"{name}: attributes missing \[\], unknown \['colour'\]"):
        decode_attributes(one.op, {**encode_attributes(one.values), "colour": 3})
    with pytest.raises(TypeError, match="colour"):
        one.op(*one.tensors, **one.attributes, colour=3)


@pytest.mark.parametrize("name", WITH_ATTRIBUTES)
def test_attribute_of_another_type_is_refused(name: str) -> None:
    """An integer for a float as well: TensorRT fields and ONNX attributes are typed."""
    one = call(name)
    encoded = encode_attributes(one.values)
    for field in encoded:
        others: list[Any] = ["text", None, [1]]
        others += [1.5] if isinstance(encoded[field], int) else [2]
        for other in others:
            with pytest.raises(OpError, match=rf"{name}: .* of wrong type \[.{field} = "):
                decode_attributes(one.op, {**encoded, field: other})


def test_all_problems_come_in_one_message() -> None:
    one = call("MhcCoefficients")
    with pytest.raises(OpError, match=r"missing \['rms_eps'\], unknown \['a', 'b'\], of wrong type \[.hc_eps = 'x'"):
        decode_attributes(one.op, {"hc_eps": "x", "sinkhorn_iters": 20, "a": 1, "b": 2})


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**40])
@pytest.mark.parametrize(
    "name", [n for n in WITH_ATTRIBUTES if any(type(v) is int for v in call(n).attributes.values())]
)
def test_integers_beyond_31_bits_are_refused(name: str, value: int) -> None:
    """TensorRT would cut them without a word."""
    one = call(name)
    for field, old in one.attributes.items():
        if type(old) is int:
            with pytest.raises(OpError, match=rf"attribute {field} = {value} does not fit"):
                encode_attributes(dataclasses.replace(one.values, **{field: value}))
            for edge in (2**31 - 1, -(2**31)):
                assert encode_attributes(dataclasses.replace(one.values, **{field: edge}))[field] == edge
