// What the attention operations and the cache insertion share: RoPE, the cache's rounding, the parameters
// (plugins/attention.py). Everything here rounds where the reference rounds, and nowhere else.
#pragma once

#include <cmath>

#include "device.cuh"
#include "fp8.cuh"

namespace dspark {

constexpr int kMaxRopePairs = 64;
constexpr int kMaxHeadDim = 512;
constexpr int kMaxQuantGroup = 64;

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

// (cos, sin) of the float32 product of a position and a frequency. The quarter turns are taken off in float64, which
// is exact enough for every int32 position, so there is no path for large angles (the one of sincosf needs local
// memory). On what is left, at most pi / 4, both polynomials (minimax, our fit) are within an ulp of 1.
__device__ __forceinline__ float2 rotation(int position, float frequency) {
  constexpr double kRoundsToInteger = 6755399441055744.0;  // 1.5 * 2^52: added, it leaves the integer in the low bits
  constexpr double kQuarter = 1.5707963267948966, kQuarterRest = 6.123233995736766e-17;  // pi / 2 and what it lacks
  constexpr double kPerQuarter = 0.6366197723675814;
  const double angle = static_cast<double>(__fmul_rn(static_cast<float>(position), frequency));
  const double shifted = fma(angle, kPerQuarter, kRoundsToInteger);
  const double quarters = shifted - kRoundsToInteger;
  const int quadrant = __double2loint(shifted);
  const float x = static_cast<float>(fma(-quarters, kQuarterRest, fma(-quarters, kQuarter, angle)));
  const float square = __fmul_rn(x, x);
  const float sine_rest = fmaf(square, fmaf(square, -1.9517267e-4f, 8.332178e-3f), -1.6666655e-1f);
  const float cosine_rest = fmaf(square, fmaf(square, 2.4438415e-5f, -1.3887368e-3f), 4.1666646e-2f);
  const float sine = fmaf(__fmul_rn(square, x), sine_rest, x);
  const float cosine = fmaf(__fmul_rn(square, square), cosine_rest, fmaf(-0.5f, square, 1.0f));
  const bool odd = quadrant & 1;
  const float turned_cosine = odd ? sine : cosine, turned_sine = odd ? cosine : sine;
  return make_float2((quadrant + 1) & 2 ? -turned_cosine : turned_cosine, quadrant & 2 ? -turned_sine : turned_sine);
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

// A piece is a lane's 16 bytes of a row, `channel` the first of its channels in the row. Rotates those that RoPE
// rotates; `turns` are the row's.
template <typename T>
__device__ __forceinline__ void rotate_piece(Vector<T>& piece, int channel, const CacheFormat& format,
                                             const float2* turns) {
  const int first = channel - format.unrotated;
  if (first + Vector<T>::kSize <= 0) return;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; i += 2) {
    if (first + i < 0) continue;
    const float2 turned = rotate(to_float(piece.values[i]), to_float(piece.values[i + 1]), turns[(first + i) / 2]);
    piece.values[i] = from_float<T>(turned.x);
    piece.values[i + 1] = from_float<T>(turned.y);
  }
}

// Rounds a rotated piece as the cache does. Called by whole warps, the lanes of a group being neighbours.
template <typename T>
__device__ __forceinline__ void round_piece(Vector<T>& piece, int channel, const CacheFormat& format) {
  if (format.quant_width == 0) return;
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i) amax = fmaxf(amax, fabsf(to_float(piece.values[i])));
  for (int offset = 1; offset < format.quant_group / Vector<T>::kSize; offset *= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, offset));
  const float scale = quantization_scale(amax);
  if (channel >= format.quant_width) return;
#pragma unroll
  for (int i = 0; i < Vector<T>::kSize; ++i)
    piece.values[i] = from_float<T>(quantize_dequantize(to_float(piece.values[i]), scale));
}

}  // namespace dspark
