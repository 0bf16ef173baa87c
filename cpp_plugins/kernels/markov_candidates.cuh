// Candidates of MarkovSampling: a score and an id in one word, whose maximum over all tokens is the choice.
//
// A candidate packs the score (as an ordered integer) over the inverted id, so that the maximum is the winner and a
// tie goes to the lowest id, and it is never 0. Slots start as 0 and are written once: whoever polls them needs no
// other signal. With float64 noise the score has 44 bits of the word, to which it was rounded, and the id 20.
#pragma once

#include "device.cuh"

namespace dspark {

constexpr int kMaxGrid = 192;    // blocks whose candidates a warp compares
constexpr int kWideIdBits = 20;  // of a candidate with a float64 score
constexpr uint64_t kWideIdMask = (1u << kWideIdBits) - 1;
constexpr uint64_t kNothing = 1;  // below all candidates: of a block without tokens

// Scores are sums that began at +0, so none is -0 and would lose to 0 here.
__device__ __forceinline__ uint64_t pack_candidate(float score, int id) {
  if (score != score) score = -INFINITY;
  const uint32_t bits = __float_as_uint(score);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}

// A score whose last 20 bits are clear, so the words of two candidates compare as their scores do.
__device__ __forceinline__ uint64_t pack_candidate(double score, int id) {
  if (score != score) score = -INFINITY;
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(score));
  const uint64_t ordered = bits >> 63 ? ~bits : bits | 1ull << 63;
  return (ordered & ~kWideIdMask) | (~static_cast<uint64_t>(id) & kWideIdMask);
}

template <bool Wide>
__device__ __forceinline__ int candidate_id(uint64_t candidate) {
  return static_cast<int>(Wide ? ~candidate & kWideIdMask : ~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <int kFirst>
__device__ __forceinline__ uint64_t lanes_max(uint64_t value) {
#pragma unroll
  for (int offset = kFirst; offset < kWarp; offset *= 2)
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The best of all blocks' candidates, once they are there; each lane polls every 32nd slot.
__device__ __forceinline__ uint64_t await_winner(const uint64_t* slots, int count, int lane) {
  uint64_t winner = 0;
  uint64_t found[kMaxGrid / kWarp] = {};
  bool waiting = true;
  while (waiting) {
    waiting = false;
#pragma unroll
    for (int i = 0; i < kMaxGrid / kWarp; ++i) {
      const int slot = lane + i * kWarp;
      if (slot < count && found[i] == 0) found[i] = load_relaxed(slots + slot);
    }
#pragma unroll
    for (int i = 0; i < kMaxGrid / kWarp; ++i) waiting |= lane + i * kWarp < count && found[i] == 0;
  }
#pragma unroll
  for (int i = 0; i < kMaxGrid / kWarp; ++i) winner = larger(winner, found[i]);
  return lanes_max<1>(winner);
}

}  // namespace dspark
