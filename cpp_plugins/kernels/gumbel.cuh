// Gumbel noise as a pure function of (seed, position, salt, token), see plugins/markov_sampling.py.
#pragma once

#include <stdint.h>

#include "dspark_plugins.h"

namespace dspark {

// The 32-bit finaliser of MurmurHash3.
__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The part of the hash that all tokens of a row share, `step` rows after `position`.
__device__ __forceinline__ uint32_t gumbel_key(int32_t seed_low, int32_t seed_high, int32_t position, int step,
                                               uint32_t salt) {
  const uint32_t key = mix(mix(static_cast<uint32_t>(position) + step + salt) ^ static_cast<uint32_t>(seed_low));
  return mix(key ^ static_cast<uint32_t>(seed_high));
}

// Integer arithmetic up to the uniform, exactly the reference's; the logarithms may differ by an ulp each.
__device__ __forceinline__ float gumbel_noise(uint32_t key, uint32_t token) {
  const uint32_t bits = mix(key ^ mix(token));
  const float uniform = (static_cast<float>(bits >> 9) + 0.5f) * 0x1p-23f;
  return -logf(-logf(uniform));
}

// The same in float64, from all 32 bits.
__device__ __forceinline__ double gumbel_noise_wide(uint32_t key, uint32_t token) {
  const uint32_t bits = mix(key ^ mix(token));
  return -log(-log((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

// A logit's score in float64, rounded to 33 significant bits; at temperature 0 the logit itself.
__device__ __forceinline__ double wide_score(float logit, float temperature, uint32_t key, uint32_t token) {
  double score = logit;
  if (temperature > 0.0f) {
    const double divisor = fmaxf(temperature, DSPARK_TEMPERATURE_FLOOR);
    score = __dadd_rn(__ddiv_rn(score, divisor), gumbel_noise_wide(key, token));
  }
  const double large = __dmul_rn(score, 0x1p20 + 1);
  const double rounded = __dsub_rn(large, __dsub_rn(large, score));
  return rounded != rounded ? score : rounded;  // of infinite scores
}

}  // namespace dspark
