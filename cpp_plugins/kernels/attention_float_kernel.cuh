// The attention in float32, for comparisons and not for speed: one warp a query row, no matrix instructions. Keys
// pass in blocks of 64 as in the 16-bit kernel: scores, running maximum, weighted sum; they are read from global
// memory for both, the block's own rows from shared memory.
#pragma once

#include "attention_problem.cuh"

namespace dspark {
namespace {

constexpr int kFloatThreads = 256;
constexpr int kFloatWarps = kFloatThreads / kWarp;

// Channels 4 (lane + 32 i) .. + 3 of a row are piece i of a lane.
template <bool kOwn>
__global__ void __launch_bounds__(kFloatThreads, 2) attention_float_kernel(const __grid_constant__ AttentionProblem p) {
  wait_for_predecessor();
  constexpr int kPieces = kMaxHeadDim / (4 * kWarp);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = blockIdx.y, block_row = blockIdx.x * kFloatWarps;
  const int dim = p.format.head_dim, unrotated = p.format.unrotated;
  const int slot = p.slots[group];
  if (slot < 0 || slot >= p.slot_count) {
    const int row = block_row + warp;
    float* const target = static_cast<float*>(p.attended) + (static_cast<int64_t>(group) * p.rows + row) * dim;
    for (int channel = 4 * lane; row < p.rows && channel < dim; channel += 4 * kWarp)
      store(target + channel, Vector<float>{});
    return;
  }
  const Keys<kOwn> keys(p, p.positions[group]);
  float* const own = reinterpret_cast<float*>(dynamic_shared());
  float2* const turns = reinterpret_cast<float2*>(own + (kOwn ? p.own_rows : 0) * dim);
  for (int i = threadIdx.x; i < (kOwn ? p.own_rows : 1) * p.format.pairs; i += kFloatThreads)
    turns[i] = rotation(keys.position + i / p.format.pairs, p.format.frequencies[i % p.format.pairs]);
  __syncthreads();
  if constexpr (kOwn) {
    for (int row = warp; row < p.own_rows; row += kFloatWarps) {
      const float* const source =
          static_cast<const float*>(p.own) + (static_cast<int64_t>(group) * p.own_rows + row) * dim;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int channel = 4 * (lane + kWarp * i);
        if (4 * kWarp * i >= dim) break;
        Vector<float> piece{};
        if (channel < dim) {
          piece = load(source + channel);
          rotate_piece(piece, channel, p.format, turns + row * p.format.pairs);
        }
        round_piece(piece, channel, p.format);
        if (channel < dim) store(own + row * dim + channel, piece);
      }
    }
    __syncthreads();
  }
  const int row = block_row + warp;
  if (row >= p.rows) return;

  const int64_t offset = (static_cast<int64_t>(group) * p.rows + row) * dim;
  const float2* const row_turns = turns + row / p.heads * p.format.pairs;
  const auto turn = [&](Vector<float>& piece, int channel, bool back) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (channel + i < unrotated) continue;
      const float2 by = row_turns[(channel + i - unrotated) / 2];
      const float even = piece.values[i], odd = piece.values[i + 1];
      const float2 turned = back ? rotate_back(even, odd, by) : rotate(even, odd, by);
      piece.values[i] = turned.x;
      piece.values[i + 1] = turned.y;
    }
  };
  Vector<float> query[kPieces], sum[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = 4 * (lane + kWarp * i);
    query[i] = sum[i] = Vector<float>{};
    if (channel >= dim) continue;
    query[i] = load(static_cast<const float*>(p.q) + offset + channel);
    turn(query[i], channel, false);
  }
  const float* const ring = static_cast<const float*>(p.ring) + static_cast<int64_t>(slot) * p.ring_rows * dim;
  const auto key_row = [&](int i) {
    return keys.own(i) ? own + (i - keys.window) * dim : ring + static_cast<int64_t>(keys.ring_row(i)) * dim;
  };

  float maximum = -1e30f, denominator = 0.0f;
  for (int start = 0; start < keys.count; start += kKeyBlock) {
    float scores[2] = {-INFINITY, -INFINITY};  // of keys start + lane and start + 32 + lane
    for (int n = 0; n < kKeyBlock; ++n) {
      if (!keys.valid(start + n)) continue;
      const float* const key = key_row(start + n);
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int channel = 4 * (lane + kWarp * i);
        if (channel >= dim) continue;
        const Vector<float> k = load(key + channel);
#pragma unroll
        for (int v = 0; v < 4; ++v) dot = fmaf(query[i].values[v], k.values[v], dot);
      }
      dot = __fmul_rn(warp_sum(dot), p.scale);
      if (n == lane) scores[0] = dot;
      if (n == lane + kWarp) scores[1] = dot;
    }
    const float new_maximum = fmaxf(maximum, warp_max(fmaxf(scores[0], scores[1])));
    const float correction = expf(maximum - new_maximum);
    const float p0 = expf(scores[0] - new_maximum), p1 = expf(scores[1] - new_maximum);
    denominator = fmaf(denominator, correction, warp_sum(p0 + p1));
    maximum = new_maximum;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) sum[i].values[v] *= correction;
    }
    for (int n = 0; n < kKeyBlock; ++n) {
      const float weight = __shfl_sync(0xffffffffu, n < kWarp ? p0 : p1, n % kWarp);
      if (!keys.valid(start + n)) continue;
      const float* const key = key_row(start + n);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int channel = 4 * (lane + kWarp * i);
        if (channel >= dim) continue;
        const Vector<float> k = load(key + channel);
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[i].values[v] = fmaf(weight, k.values[v], sum[i].values[v]);
      }
    }
  }
  denominator += expf(p.sink[row % p.heads] - maximum);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = 4 * (lane + kWarp * i);
    if (channel >= dim) continue;
#pragma unroll
    for (int v = 0; v < 4; ++v) sum[i].values[v] = __fdiv_rn(sum[i].values[v], denominator);
    turn(sum[i], channel, true);
    store(static_cast<float*>(p.attended) + offset + channel, sum[i]);
  }
}

}  // namespace
}  // namespace dspark
