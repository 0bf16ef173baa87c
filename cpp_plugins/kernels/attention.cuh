// What the attention operations and the cache insertion share: RoPE, the cache's rounding, the parameters
// (plugins/attention.py). Everything here rounds where the reference rounds, and nowhere else.
#pragma once

#include <cmath>

#include "device.cuh"
#include "fp8.cuh"

namespace dspark {

constexpr int kMaxRopePairs = 64;
constexpr int kMaxHeadDim = 512;
constexpr int kMaxQuantGroup = 128;

// How a normalised kv row becomes a cache entry (CacheAttributes).
struct CacheFormat {
  int head_dim;
  int unrotated;  // leading channels that RoPE leaves alone
  int pairs;      // of channels that it rotates
  int quant_width;
  int quant_group;
  float frequencies[kMaxRopePairs];
};

// False where the kernels can't serve the attributes. Frequencies are 1 / theta^(2 i / dims), each step rounded to
// float32 as the reference's; made here, because an ulp of them is an angle at far positions.
template <typename Params>
bool make_cache_format(const Params* p, CacheFormat* format) {
  const int group = p->quant_group;
  const bool group_fits = group >= 8 && group <= kMaxQuantGroup && (group & (group - 1)) == 0;
  if (p->head_dim < 16 || p->head_dim > kMaxHeadDim || p->head_dim % 8 || p->rope_dims < 0 || p->rope_dims % 2 ||
      p->rope_dims > p->head_dim || p->rope_dims > 2 * kMaxRopePairs || p->quant_width < 0 ||
      p->quant_width > p->head_dim || (p->quant_width > 0 && (!group_fits || p->quant_width % group)))
    return false;
  format->head_dim = p->head_dim;
  format->unrotated = p->head_dim - p->rope_dims;
  format->pairs = p->rope_dims / 2;
  format->quant_width = p->quant_width;
  format->quant_group = group;
  for (int i = 0; i < format->pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(p->rope_dims);
    const double power = std::pow(static_cast<double>(p->rope_theta), static_cast<double>(exponent));
    format->frequencies[i] = 1.0f / static_cast<float>(power);
  }
  return true;
}

// (cos, sin) of pair i at a position.
__device__ __forceinline__ float2 rotation(const CacheFormat& format, int position, int i) {
  float2 result;
  sincosf(__fmul_rn(static_cast<float>(position), format.frequencies[i]), &result.y, &result.x);
  return result;
}

__device__ __forceinline__ float2 rotate(float even, float odd, float2 turn) {
  return make_float2(__fsub_rn(__fmul_rn(even, turn.x), __fmul_rn(odd, turn.y)),
                     __fadd_rn(__fmul_rn(even, turn.y), __fmul_rn(odd, turn.x)));
}

__device__ __forceinline__ float2 rotate_back(float even, float odd, float2 turn) {
  return rotate(even, odd, make_float2(turn.x, -turn.y));
}

// Two 16-bit values in a register.
template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t word) {
  T values[2];
  memcpy(values, &word, 4);
  return make_float2(to_float(values[0]), to_float(values[1]));
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float2 pair) {
  const T values[2] = {from_float<T>(pair.x), from_float<T>(pair.y)};
  uint32_t word;
  memcpy(&word, values, 4);
  return word;
}

// Turns one row into its cache entry, by one warp. `turns` are the row's rotations; `put(channel, vector)` stores.
template <typename T, typename Put>
__device__ __forceinline__ void make_cache_entry(const T* row, const CacheFormat& format, const float2* turns, Put put) {
  constexpr int kSize = Vector<T>::kSize;
  const int lane = threadIdx.x % kWarp;
  for (int start = 0; start < format.head_dim; start += kWarp * kSize) {
    const int channel = start + lane * kSize;
    const bool inside = channel < format.head_dim;
    Vector<T> entry{};
    if (inside) entry = load(row + channel);
    if (inside && channel + kSize > format.unrotated) {
#pragma unroll
      for (int i = 0; i < kSize; i += 2) {
        if (channel + i < format.unrotated) continue;
        const float2 by = turns[(channel + i - format.unrotated) / 2];
        const float2 turned = rotate(to_float(entry.values[i]), to_float(entry.values[i + 1]), by);
        entry.values[i] = from_float<T>(turned.x);
        entry.values[i + 1] = from_float<T>(turned.y);
      }
    }
    if (start < format.quant_width) {  // the lanes of a group are neighbours, and all take part in the exchange
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) amax = fmaxf(amax, fabsf(to_float(entry.values[i])));
      for (int offset = 1; offset < format.quant_group / kSize; offset *= 2)
        amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
      const float scale = quantization_scale(amax);
      if (channel < format.quant_width) {
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          entry.values[i] = from_float<T>(quantize_dequantize(to_float(entry.values[i]), scale));
      }
    }
    if (inside) put(channel, entry);
  }
}

}  // namespace dspark
