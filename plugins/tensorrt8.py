"""What only TensorRT 8 needs: its networks are free to compute a tensor in another type than the model's.

From TensorRT 10 on, networks are strongly typed. Here, in a model with float16, the layers and outputs that the model
computes in float32 are pinned to float32, and the builder must obey; what the model computes in float16 may be computed
in either type. So nothing is rounded more coarsely than the model says. Inputs and outputs of plugins have the model's
types, which their attribute ``activation`` names. The parsed network does not know the types: it reports every computed
tensor as float32. We take them from the model, by the tensor names that the parser keeps; what the parser inserts
between them gets the type of its inputs. The parser also reports float16 weights as float32. We leave that, so their
products run in float32. Left free to choose, two ranks that shared a timing cache computed different bits.

External kernel libraries are switched off: installations without cuBLAS and cuDNN are common, and our engines don't
need them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPED_BY_THEMSELVES = ("SHAPE", "CONSTANT", "CAST")
_TYPED_BY_THEIR_TENSORS = ("PLUGIN_V2",)
"""No precision of their own: float16 and float32 tensors side by side are what they were made for."""


def configure(module: Any, network: Any, config: Any, types: Mapping[str, str]) -> None:
    """Let ``config`` compute ``network`` in the types that its model says.

    Args:
        types: name -> "float16" or "float32", of the model's values that have such a type.
    """
    config.clear_flag(module.BuilderFlag.TF32)
    config.set_tactic_sources(0)
    # Several contexts may use one profile, so that each captured graph can have a context of its own.
    config.set_preview_feature(module.PreviewFeature.PROFILE_SHARING_0806, True)
    if "float16" in types.values():
        ours = {"float16": module.DataType.HALF, "float32": module.DataType.FLOAT}
        known = {name: ours[said] for name, said in types.items()}
        for i in range(network.num_layers):
            _pin_types(module, network.get_layer(i), known)
        config.set_flag(module.BuilderFlag.FP16)
        config.set_flag(module.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)


def _pin_types(module: Any, layer: Any, known: dict[str, Any]) -> None:
    """Pin one layer, whose inputs are ``known`` where they are numbers, and add its outputs to that."""
    wide, floats = module.DataType.FLOAT, (module.DataType.FLOAT, module.DataType.HALF)
    inputs = [tensor for k in range(layer.num_inputs) if (tensor := layer.get_input(k)) is not None]
    outputs = [layer.get_output(k) for k in range(layer.num_outputs)]
    found = [known.get(tensor.name, tensor.dtype) for tensor in inputs if tensor.dtype in floats]
    computed = wide if wide in found or not found else module.DataType.HALF
    by_itself, plugin = layer.type.name in _TYPED_BY_THEMSELVES, layer.type.name in _TYPED_BY_THEIR_TENSORS
    for tensor in outputs:
        if tensor.dtype in floats:
            known.setdefault(tensor.name, tensor.dtype if by_itself else computed)
    # Tensors that are no execution tensors are shapes, which the host computes.
    if by_itself or not all(tensor.is_execution_tensor for tensor in outputs):
        return
    if wide in found and not plugin:
        layer.precision = wide
    for k, tensor in enumerate(outputs):
        if tensor.dtype in floats and (plugin or known[tensor.name] == wide):
            layer.set_output_type(k, known[tensor.name])
