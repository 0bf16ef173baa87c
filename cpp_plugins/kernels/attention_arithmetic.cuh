// The arithmetic of a row in the 16-bit attention kernels, once for both, so that a row has the same bits whichever
// kernel has it. The orders that make up those bits:
//   scores         a slice of 64 channels is two chains of matrix instructions, the even and the odd 16 channels, then
//                  their sum; slices are added in channel order, from zero;
//   probabilities  relative to the running maximum over blocks of 64 keys; a lane of a warp adds those of keys 2 l and
//                  2 l + 1, then the lanes are added as warp_sum does, before rounding to T;
//   values         a block of keys is two chains, the even and the odd 16 keys, then their sum; blocks are joined with
//                  one fused multiplication and addition each.
// Sums that a compiler could fuse with the multiplication before them are spelled as intrinsics.
#pragma once

#include "attention_problem.cuh"

namespace dspark {
namespace {

constexpr int kSpan = 64;  // channels of a slice
constexpr int kMaxSlices = kMaxHeadDim / kSpan;
constexpr int kRowTile = 16;  // query rows of a matrix instruction
constexpr int kKeyTile = 16;  // keys, as columns of scores and as terms of values
constexpr float kNoMaximum = -1e30f;

// Bytes from a row of queries or keys in shared memory to the next: 16 more than its length, which leaves ldmatrix
// without bank conflicts.
__host__ __device__ constexpr int row_pitch(int slices) { return slices * kSpan * 2 + 16; }

// Bytes from where a warp's ldmatrix of 16 rows and 32 bytes starts to where a lane reads, for a matrix whose rows are
// rows of the product (queries, probabilities) and one whose rows are its columns (keys).
__device__ __forceinline__ int lane_of_rows(int lane, int pitch) { return lane % 16 * pitch + lane / 16 * 16; }
__device__ __forceinline__ int lane_of_columns(int lane, int pitch) {
  return (lane / 16 * 8 + lane % 8) * pitch + lane / 8 % 2 * 16;
}

// Partial scores over one slice of kRows tiles of queries and kKeys tiles of keys, added to `scores`, where
// [i][2 j + n] is row tile i and columns 8 n and up of key tile j. `queries` and `keys` are where the lane reads first.
template <typename T, int kRows, int kKeys, int kColumns>
__device__ __forceinline__ void add_slice_scores(const unsigned char* queries, const unsigned char* keys, int pitch,
                                                 float (&scores)[kRows][kColumns][4]) {
  float chains[2][kRows][2 * kKeys][4] = {};
#pragma unroll
  for (int k = 0; k < kSpan / 16; ++k) {
    uint4 a[kRows], b[kKeys];
#pragma unroll
    for (int i = 0; i < kRows; ++i) a[i] = load_matrices(queries + i * kRowTile * pitch + k * 32);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) b[j] = load_matrices(keys + j * kKeyTile * pitch + k * 32);
#pragma unroll
    for (int j = 0; j < kKeys; ++j) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        multiply_add<T>(chains[k % 2][i][2 * j], a[i].x, a[i].y, a[i].z, a[i].w, b[j].x, b[j].y);
        multiply_add<T>(chains[k % 2][i][2 * j + 1], a[i].x, a[i].y, a[i].z, a[i].w, b[j].z, b[j].w);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int n = 0; n < 2 * kKeys; ++n) {
#pragma unroll
      for (int v = 0; v < 4; ++v) scores[i][n][v] += chains[0][i][n][v] + chains[1][i][n][v];
    }
  }
}

// The lane's two scores, of keys i and i + 1, from their sums over the channels; -inf where a key is not valid.
template <bool kOwn>
__device__ __forceinline__ float2 finish_scores(float2 sum, float scale, const Keys<kOwn>& keys, int i, bool inside) {
  sum = make_float2(__fmul_rn(sum.x, scale), __fmul_rn(sum.y, scale));
  return make_float2(inside & keys.valid(i) ? sum.x : -INFINITY, inside & keys.valid(i + 1) ? sum.y : -INFINITY);
}

// The lane's two probabilities in a block of keys, relative to the running maximum with the block.
__device__ __forceinline__ float2 make_probabilities(float2 scores, float maximum) {
  return make_float2(expf(scores.x - maximum), expf(scores.y - maximum));
}

__device__ __forceinline__ float lane_sum(float2 probabilities) { return __fadd_rn(probabilities.x, probabilities.y); }

// warp_sum of two values at the price of one: the lower half of the warp has that of `a`, the upper that of `b`.
__device__ __forceinline__ float warp_sum_pair(float a, float b) {
  const bool upper = threadIdx.x % kWarp >= kWarp / 2;
  float value = upper ? b : a;
  value += __shfl_xor_sync(0xffffffffu, upper ? a : b, kWarp / 2);
#pragma unroll
  for (int offset = kWarp / 4; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Of a block of keys, for what came before it: `before` is the running maximum ahead of it, `maximum` with it.
__device__ __forceinline__ float block_factor(float before, float maximum) { return expf(before - maximum); }

__device__ __forceinline__ float sink_share(float sink, float maximum) { return expf(sink - maximum); }

__device__ __forceinline__ float join_denominator(float denominator, float factor, float sum) {
  return fmaf(denominator, factor, sum);
}

// What a row is multiplied with at the end. A denominator is 1 or more where there is a key at all, so the quick
// division does.
__device__ __forceinline__ float inverse_denominator(float denominator, float sink) {
  return __fdividef(1.0f, __fadd_rn(denominator, sink));
}

// Probabilities times values over one block of keys, for a tile of rows and 8 channels.
template <typename T>
struct BlockValues {
  float chains[2][4] = {};

  // `step` counts tiles of keys in the block.
  __device__ __forceinline__ void add(int step, const uint4& weights, uint32_t first, uint32_t second) {
    multiply_add<T>(chains[step % 2], weights.x, weights.y, weights.z, weights.w, first, second);
  }

  // Into the sums of rows g and g + 8, with the factors of these.
  __device__ __forceinline__ void join(float (&sums)[4], float upper, float lower) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(sums[i], i < 2 ? upper : lower, chains[0][i] + chains[1][i]);
  }
};

// Two neighbouring channels of the result, rounded.
template <typename T>
__device__ __forceinline__ uint32_t round_pair(float even, float odd, float inverse) {
  return pack<T>(make_float2(__fmul_rn(even, inverse), __fmul_rn(odd, inverse)));
}

// Rotates a rounded pair back if RoPE has rotated its channels; `turns` are the row's.
template <typename T>
__device__ __forceinline__ uint32_t rotate_pair_back(uint32_t word, int channel, const CacheFormat& format,
                                                     const float2* turns) {
  if (channel < format.unrotated) return word;
  const float2 pair = unpack<T>(word);
  return pack<T>(rotate_back(pair.x, pair.y, turns[(channel - format.unrotated) / 2]));
}

// The turns of `count` positions from `first` on, by a block of `warps` warps.
__device__ __forceinline__ void make_turns(float2* turns, int first, int count, const CacheFormat& format, int warps) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll 1
  for (int of = warp; of < count; of += warps) {
#pragma unroll 1
    for (int pair = lane; pair < format.pairs; pair += kWarp)
      turns[of * format.pairs + pair] = rotation(first + of, format.frequencies[pair]);
  }
}

// Whether a group's slot is one of the ring's; a group without one has zero rows.
__device__ __forceinline__ bool has_slot(const AttentionProblem& p, int slot) {
  return slot >= 0 && slot < p.slot_count;
}

}  // namespace
}  // namespace dspark
