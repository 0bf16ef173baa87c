"""Keys of a released ``config.json``: typed access, and which keys or values are passed over."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

# Keys that are read by something else than this package, or whose value can't change what we build:
# compressed attention, Engram tables and the vision tower belong to targets that it does not build.
# fmt: off
IGNORED_KEYS = frozenset({
    "architectures", "attention_dropout", "auto_map", "dtype", "initializer_range", "model_type", "pad_token_id",
    "torch_dtype", "transformers_version", "use_cache",
    "compress_rope_theta", "rope_scaling", "index_head_dim", "index_n_heads", "index_topk", "index_source_layer_ids",
    "kv_source_layer_ids", "candidate_source_layer_id", "candidate_topk_blocks", "candidate_block_size",
    "engram_layer_ids", "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads",
    "engram_head_dim", "engram_pad_token_id", "engram_compressed_vocab_size", "vision_config", "image_token_id",
})
# fmt: on

# Keys that may be left out; a value that is not listed is a model that this package does not build.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "num_key_value_heads": (1,),
    "gate_temp": (1.0,),
}

SUPPORTED_QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0",),
    "activation_scheme": ("dynamic",),
    "modules_to_not_convert": ([], None),
}


class KeyReader:
    """Hands out keys of a JSON object with type checks and remembers which were consumed."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values = values
        self.where = where
        self.consumed: set[str] = set()
        self.problems: list[str] = []

    def get(self, key: str, kind: type, default: Any = dataclasses.MISSING) -> Any:
        self.consumed.add(key)
        if key not in self.values or (self.values[key] is None and default is None):
            if default is dataclasses.MISSING:
                self.problems.append(
                    f"{key} is missing, expected {kind.__name__}; copy it from the release's config.json"
                )
                return kind()
            return default
        value = self.values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            self.problems.append(f"{key} is {value!r}, expected {kind.__name__}")
            return kind()
        return value

    def expect(self, key: str, allowed: Iterable[Any], default: Any = dataclasses.MISSING) -> None:
        """Consume a key that this package supports for some values only."""
        self.consumed.add(key)
        if key not in self.values and default is not dataclasses.MISSING:
            return
        value = self.values.get(key)
        if value not in allowed:
            self.problems.append(f"{key} is {value!r}, supported: {sorted(map(str, allowed))}")

    def int_list(self, key: str) -> tuple[int, ...]:
        values = self.get(key, list)
        if not all(type(value) is int for value in values):
            self.problems.append(f"{key} is {values!r}, expected a list of integers")
            return ()
        return tuple(values)

    def unknown(self, allowed: Iterable[str]) -> list[str]:
        return sorted(set(self.values) - self.consumed - IGNORED_KEYS - set(allowed))


class ReleasedKeys:
    """The objects of a released ``config.json``: its root, the language model's keys and the quantisation's."""

    def __init__(self, root: Mapping[str, Any], where: str):
        self.nested = "text_config" in root
        """Whether the language model has an object of its own, as in V4.1."""
        self.root = KeyReader(root, where)
        self.text = self._inner("text_config") if self.nested else self.root
        self.quantization = self._inner("quantization_config")

    def _inner(self, key: str) -> KeyReader:
        return KeyReader(self.root.get(key, dict), f"{self.root.where}: {key}")

    @property
    def readers(self) -> list[KeyReader]:
        """Each object once, in the order in which its problems are told."""
        return [self.quantization, self.text, *([self.root] if self.nested else [])]
