// Gumbel noise as a pure function of (seed, position, salt, token), see plugins/markov_sampling.py.
#pragma once

#include <stdint.h>

namespace dspark {

constexpr uint32_t kDraftSalt = 0x2545F491u;  // DRAFT_SALT

// The 32-bit finaliser of MurmurHash3.
__device__ __forceinline__ uint32_t mix(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The part of the hash that all tokens of a row share, `step` rows behind `position`.
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

}  // namespace dspark
