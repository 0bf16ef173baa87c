"""MarkovSampling: the sequential part of a draft pass (spec 5.2).

prev = anchor; for each slot i of the block: logits_i = base_i + W2 . W1[prev]; the slot's token is the
argmax, or with a temperature the argmax of logits_i / T + Gumbel noise; prev = that token. The noise is
a pure function of (seed, position of the row, token id) and a salt, so it is the same on every rank,
independent of the other requests, and disjoint from the noise that verification draws. Ties go to the
lowest id; NaN counts as -inf; a row without any number gives token 0.

With ``float64_noise`` the uniform has 32 bits instead of 23, its logarithms and the sum with the tempered
logits are float64, and scores are compared after one rounding to 33 significant bits: the uniform's
resolution, and what a kernel can pack into one word beside an id of 20 bits.

``features`` are the embeddings W1[prev_i] that slot i's bias came from, for the confidence head.
``corrected_logits`` are base + bias before the temperature: what verification needs as the draft's distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .numerics import first_argmax, matmul
from .op import Op, TensorSpec

DRAFT_SALT = 0x2545F491
"""Added to a position before it is hashed, so that drafting and verifying never share a key."""
TEMPERATURE_FLOOR = 1e-5
"""Scores are divided by no less; drafting and verification must agree on it."""
FLOAT64_MAX_VOCAB = 2**20
"""Tokens whose ids fit beside a score of 33 significant bits."""
_SPLIT = 2.0**20 + 1


@dataclass(frozen=True, kw_only=True)
class LoopAttributes:
    """What the whole loop and its part on one rank have in common."""

    block_size: int
    sampling: bool
    """False: greedy, without the temperature and seed inputs."""
    float64_noise: bool
    """Of a sampling call: noise and comparison in float64."""


@dataclass(frozen=True, kw_only=True)
class Attributes(LoopAttributes):
    write_logits: bool
    """Whether there is the output ``corrected_logits``."""


class Sampler(Protocol):
    """Chooses one token per row; a hook for watermarks and the like, in drafting and in verification."""

    def __call__(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, *, salt: int) -> Tensor:
        """Tokens [n] int32 for logits [n, V] at ``temperature`` [n] (0 = greedy).

        ``seeds`` [n, 2], ``positions`` [n] and ``salt`` are the draw's key. What verification takes as the
        draft's distribution is the softmax of ``logits / temperature`` after the call: a sampler that draws from
        another distribution writes its logits into ``logits``.
        """
        ...


KEYS = (
    TensorSpec("positions", "int32", ("requests",), when=("sampling", 0)),
    TensorSpec("temperature", "float32", ("requests",), when=("sampling", 0)),
    TensorSpec("seeds", "int32", ("requests", 2), when=("sampling", 0)),
)
"""Inputs of a sampling loop that its noise is keyed by."""
CHOICES = (
    TensorSpec("draft_tokens", "int32", ("requests", "block_size")),
    TensorSpec("features", "T", ("requests", "block_size", "R")),
)
"""Outputs of every loop."""


def noise_problem(attributes: LoopAttributes, vocab: Any) -> str:
    """What is wrong with a loop's noise for ``vocab`` tokens, or ""; a traced size is not known yet."""
    if attributes.float64_noise and isinstance(vocab, int) and vocab > FLOAT64_MAX_VOCAB:
        return f"float64 noise takes up to {FLOAT64_MAX_VOCAB} tokens, V is {vocab}"
    return ""


class MarkovSampling(Op):
    name = "MarkovSampling"
    attributes_type = Attributes
    all_inputs = (
        TensorSpec("base_logits", "float32", ("requests", "block_size", "V")),
        TensorSpec("anchor_ids", "int32", ("requests",)),
        TensorSpec("embed", "T", ("V", "R")),
        TensorSpec("head", "T", ("V", "R")),
        *KEYS,
    )
    all_outputs = (
        *CHOICES,
        TensorSpec("corrected_logits", "float32", ("requests", "block_size", "V"), when=("write_logits", 0)),
    )

    def size_problem(self, attributes: Attributes, sizes: Mapping[str, Any]) -> str:
        return noise_problem(attributes, sizes["V"])

    def reference(
        self,
        attributes: Attributes,
        base_logits: Tensor,
        anchor_ids: Tensor,
        embed: Tensor,
        head: Tensor,
        *keys: Tensor,
    ) -> tuple[Tensor, ...]:
        previous, tokens, features, corrected = anchor_ids, [], [], []
        for i in range(attributes.block_size):
            feature = embed[previous.long()]
            logits = base_logits[:, i] + matmul(feature, head)
            if attributes.sampling:
                positions, temperature, seeds = keys
                previous = draw(logits, temperature, seeds, positions + i, float64=attributes.float64_noise)
            else:
                previous = first_argmax(logits)
            tokens.append(previous)
            features.append(feature)
            corrected.append(logits)
        stacked = torch.stack(tokens, 1), torch.stack(features, 1)
        return (*stacked, torch.stack(corrected, 1)) if attributes.write_logits else stacked

    def onnx_body(self, attributes: Attributes, cast: str) -> str:
        text = """
            zero = Constant<value = int64[1] {0}>()
            one = Constant<value = int64[1] {1}>()
            float_head = Cast<to=1>(head)
            head_t = Transpose<perm=[1, 0]>(float_head)
            minus_infinity = Constant<value = float {-inf}>()
            token0 = Identity(anchor_ids)
        """
        if attributes.sampling:
            text += _ONNX_SAMPLING_CONSTANTS + (_ONNX_WIDE if attributes.float64_noise else _ONNX_NARROW)
        block = attributes.block_size
        for i in range(block):
            text += f"""
            start{i} = Constant<value = int64[1] {{{i}}}>()
            end{i} = Constant<value = int64[1] {{{i + 1}}}>()
            feature{i} = Gather<axis=0>(embed, token{i})
            float_feature{i} = Cast<to=1>(feature{i})
            bias{i} = MatMul(float_feature{i}, head_t)
            base_slot{i} = Slice(base_logits, start{i}, end{i}, one)
            base{i} = Squeeze(base_slot{i}, one)
            logits{i} = Add(base{i}, bias{i})
            """
            scores, worst = f"logits{i}", "minus_infinity"
            if attributes.sampling:
                text += _onnx_gumbel(i, wide=attributes.float64_noise)
                scores, worst = f"scores{i}", "worst"
            text += f"""
            nan{i} = IsNaN({scores})
            clean{i} = Where(nan{i}, {worst}, {scores})
            best{i} = ArgMax<axis=-1, keepdims=0, select_last_index=0>(clean{i})
            token{i + 1} = Cast<to=6>(best{i})
            token_column{i} = Unsqueeze(token{i + 1}, one)
            feature_row{i} = Unsqueeze(feature{i}, one)
            logits_row{i} = Unsqueeze(logits{i}, one)
            """
        parts = {"draft_tokens": "token_column", "features": "feature_row", "corrected_logits": "logits_row"}
        for output in self.outputs(attributes):
            rows = ", ".join(f"{parts[output.name]}{i}" for i in range(block))
            text += f"{output.name} = Concat<axis=1>({rows})\n"
        return text


def _mix(h: Tensor) -> Tensor:
    """The 32-bit finaliser of MurmurHash3 on int64 tensors that hold 32-bit values."""
    h = h ^ (h >> 16)
    h = (h * 0x85EBCA6B) & 0xFFFFFFFF
    h = h ^ (h >> 13)
    h = (h * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


def noise_key(seeds: Tensor, positions: Tensor, salt: int) -> Tensor:
    """The hash [n] int64 (32 bits) that a draw's noise comes from.

    Args:
        seeds: [n, 2] int32, the halves of a 64-bit seed, low first.
        positions: [n] int32, of the row, which is the position before the token that is drawn.
        salt: the draw's purpose; position + salt is what distinguishes the keys of one seed.
    """
    low, high = (seeds.long() & 0xFFFFFFFF).unbind(-1)
    key = _mix((positions.long() + salt) & 0xFFFFFFFF)
    return _mix(_mix(key ^ low) ^ high)


def noise_bits(keys: Tensor, ids: Tensor) -> Tensor:
    """32 random bits [n, ids] for each key [n] and token id, as int64."""
    return _mix(keys.unsqueeze(-1) ^ _mix(ids))


def gumbel_noise(
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int,
    *,
    salt: int,
    ids: Tensor | None = None,
    float64: bool = False,
) -> Tensor:
    """Standard Gumbel noise [n, V] float32 or float64, a pure function of (seed, position, salt, token id);
    arguments as of :func:`noise_key`, and ``ids`` int64 where not all of the vocabulary is wanted."""
    if ids is None:
        ids = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    bits = noise_bits(noise_key(seeds, positions, salt), ids)
    # 23 bits, centred: float32 holds each of these exactly, and none is 1 (the largest of 24 bits would be).
    uniform = (bits.double() + 0.5) * 2.0**-32 if float64 else ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def noisy_scores(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    salt: int,
    ids: Tensor | None = None,
    float64: bool = False,
) -> Tensor:
    """What the sampled token is the argmax of: tempered logits and noise [n, V], or at temperature 0 the logits;
    ``ids`` are the columns' tokens where they are not the whole vocabulary. ``float64`` also is the result's type."""
    noise = gumbel_noise(seeds, positions, logits.shape[-1], salt=salt, ids=ids, float64=float64)
    logits = logits.to(noise.dtype)
    tempered = logits / temperature.clamp_min(TEMPERATURE_FLOOR).to(noise.dtype).unsqueeze(-1) + noise
    scores = torch.where(temperature.unsqueeze(-1) > 0, tempered, logits)
    if not float64:
        return scores
    # Dekker's split: the nearest number of 53 - 20 bits. It would turn infinite scores into NaN, so those are kept.
    large = scores * _SPLIT
    rounded = large - (large - scores)
    return torch.where(rounded.isnan(), scores, rounded)


def draw(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    salt: int = DRAFT_SALT,
    float64: bool = False,
) -> Tensor:
    """The operation's :class:`Sampler`: tokens [n] int32."""
    return first_argmax(noisy_scores(logits, temperature, seeds, positions, salt=salt, float64=float64))


_ONNX_SAMPLING_CONSTANTS = f"""
            mask32 = Constant<value = int64 {{4294967295}}>()
            mul_a = Constant<value = int64 {{{0x85EBCA6B}}}>()
            mul_b = Constant<value = int64 {{{0xC2B2AE35}}}>()
            div16 = Constant<value = int64 {{65536}}>()
            div13 = Constant<value = int64 {{8192}}>()
            salt = Constant<value = int64 {{{DRAFT_SALT}}}>()
            coldest = Constant<value = float {{{TEMPERATURE_FLOOR}}}>()
            no_temperature = Constant<value = float {{0.0}}>()
            zero_scalar = Constant<value = int64 {{0}}>()
            one_scalar = Constant<value = int64 {{1}}>()
            two = Constant<value = int64[1] {{2}}>()
            embed_shape = Shape(embed)
            vocab = Gather(embed_shape, zero_scalar)
            ids = Range(zero_scalar, vocab, one_scalar)
            seeds64 = Cast<to=7>(seeds)
            seed_bits = BitwiseAnd(seeds64, mask32)
            seed_low = Slice(seed_bits, zero, one, one)
            seed_high = Slice(seed_bits, one, two, one)
            position64 = Cast<to=7>(positions)
            position_column = Unsqueeze(position64, one)
            temperature_column = Unsqueeze(temperature, one)
            warm = Max(temperature_column, coldest)
            sampled = Greater(temperature_column, no_temperature)
"""
_ONNX_NARROW = f"""
            spare = Constant<value = int64 {{512}}>()
            half = Constant<value = float {{0.5}}>()
            unit = Constant<value = float {{{2.0**-23!r}}}>()
            worst = Identity(minus_infinity)
            divisor = Identity(warm)
"""
_ONNX_WIDE = f"""
            spare = Constant<value = int64 {{1}}>()
            half_narrow = Constant<value = float {{0.5}}>()
            half = Cast<to=11>(half_narrow)
            unit_narrow = Constant<value = float {{{2.0**-32!r}}}>()
            unit = Cast<to=11>(unit_narrow)
            split_narrow = Constant<value = float {{{_SPLIT!r}}}>()
            split = Cast<to=11>(split_narrow)
            worst = Cast<to=11>(minus_infinity)
            divisor = Cast<to=11>(warm)
"""


def _onnx_mix(x: str, out: str) -> str:
    return f"""
            {out}_a = Div({x}, div16)
            {out}_b = BitwiseXor({x}, {out}_a)
            {out}_c = Mul({out}_b, mul_a)
            {out}_d = BitwiseAnd({out}_c, mask32)
            {out}_e = Div({out}_d, div13)
            {out}_f = BitwiseXor({out}_d, {out}_e)
            {out}_g = Mul({out}_f, mul_b)
            {out}_h = BitwiseAnd({out}_g, mask32)
            {out}_i = Div({out}_h, div16)
            {out} = BitwiseXor({out}_h, {out}_i)
    """


def _onnx_gumbel(i: int, *, wide: bool) -> str:
    kind, scores = (11, "exact") if wide else (1, "scores")
    text = f"""
            offset{i} = Constant<value = int64 {{{i}}}>()
            row_position{i} = Add(position_column, offset{i})
            salted{i} = Add(row_position{i}, salt)
            salted32_{i} = BitwiseAnd(salted{i}, mask32)
            {_onnx_mix(f"salted32_{i}", f"key_p{i}")}
            low{i} = BitwiseXor(key_p{i}, seed_low)
            {_onnx_mix(f"low{i}", f"key_l{i}")}
            high{i} = BitwiseXor(key_l{i}, seed_high)
            {_onnx_mix(f"high{i}", f"key{i}")}
            {_onnx_mix("ids", f"id_hash{i}")}
            joined{i} = BitwiseXor(key{i}, id_hash{i})
            {_onnx_mix(f"joined{i}", f"bits{i}")}
            top{i} = Div(bits{i}, spare)
            top_float{i} = Cast<to={kind}>(top{i})
            centred{i} = Add(top_float{i}, half)
            uniform{i} = Mul(centred{i}, unit)
            log{i} = Log(uniform{i})
            minus_log{i} = Neg(log{i})
            loglog{i} = Log(minus_log{i})
            noise{i} = Neg(loglog{i})
            exact_logits{i} = Cast<to={kind}>(logits{i})
            tempered{i} = Div(exact_logits{i}, divisor)
            noisy{i} = Add(tempered{i}, noise{i})
            {scores}{i} = Where(sampled, noisy{i}, exact_logits{i})
    """
    if wide:
        # What the rounding makes NaN was infinite or NaN, and stays as it is.
        text += f"""
            large{i} = Mul(exact{i}, split)
            excess{i} = Sub(large{i}, exact{i})
            rounded{i} = Sub(large{i}, excess{i})
            broken{i} = IsNaN(rounded{i})
            scores{i} = Where(broken{i}, exact{i}, rounded{i})
        """
    return text


MARKOV_SAMPLING = MarkovSampling()
