"""What only TensorRT 8 needs: its networks know the type of every tensor, but are free to compute in others.

From TensorRT 10 on networks are strongly typed. Here, where float16 occurs, every layer and every output is pinned
to the type that the parsed network gives it, and the builder is told to obey. External libraries of kernels stay
out of it: installations without cuBLAS and cuDNN are common, and our engines don't need them.
"""

from __future__ import annotations

from typing import Any

_TYPED_BY_THEMSELVES = ("SHAPE", "CONSTANT", "CAST")
_TYPED_BY_THEIR_TENSORS = ("PLUGIN_V2",)
"""No precision of their own: float16 and float32 tensors side by side are what they were made for."""


def configure(module: Any, network: Any, config: Any) -> None:
    """Let ``config`` compute ``network`` in the types that it says."""
    config.clear_flag(module.BuilderFlag.TF32)
    config.set_tactic_sources(0)
    # Several contexts may use one profile, so that each captured graph can have a context of its own.
    config.set_preview_feature(module.PreviewFeature.PROFILE_SHARING_0806, True)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    if any(tensor.dtype == module.DataType.HALF for layer in layers for tensor in _outputs(layer)):
        for layer in layers:
            _pin_types(module, layer)
        config.set_flag(module.BuilderFlag.FP16)
        config.set_flag(module.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)


def _pin_types(module: Any, layer: Any) -> None:
    floats, outputs = (module.DataType.FLOAT, module.DataType.HALF), _outputs(layer)
    # Tensors that are no execution tensors are shapes, which the host computes.
    if layer.type.name in _TYPED_BY_THEMSELVES or not all(tensor.is_execution_tensor for tensor in outputs):
        return
    inputs = [tensor for k in range(layer.num_inputs) if (tensor := layer.get_input(k)) is not None]
    types = [t.dtype for t in inputs if t.dtype in floats] or [t.dtype for t in outputs if t.dtype in floats]
    if types and layer.type.name not in _TYPED_BY_THEIR_TENSORS:
        layer.precision = module.DataType.FLOAT if module.DataType.FLOAT in types else module.DataType.HALF
    for k, tensor in enumerate(outputs):
        if tensor.dtype in floats:
            layer.set_output_type(k, tensor.dtype)


def _outputs(layer: Any) -> list[Any]:
    return [layer.get_output(k) for k in range(layer.num_outputs)]
