// Products of MarkovSampling: tiles of the head table with the feature rows of requests.
//
// A tile is the A operand (16 rows) of mma.m16n8k16, up to 8 requests are its B operand. The order of channels
// inside a product is free, so a thread's 16-byte piece of a row serves two instructions as it is: in a 64-byte
// piece of a row, lane (g, t) holds bytes 16 t .. 16 t + 15 of rows g and g + 8, and likewise of request g's
// feature row. One request alone takes the same path as eight: a request's logits don't depend on the others.
#pragma once

#include "device.cuh"

namespace dspark {

constexpr int kTileRows = 16;
constexpr int kGroup = 8;        // requests of one matrix instruction
constexpr int kPieceBytes = 64;  // of a row: four lanes with 16 bytes each

// Partial products of a tile and a group of requests, in four chains of instructions that don't wait for each other.
template <typename T>
struct Products {
  float chains[4][4] = {};

  template <int kPair>
  __device__ __forceinline__ void add(const uint4& upper, const uint4& lower, const uint4* features, int lane, int) {
    const uint4 f = features[lane];
    multiply_add<T>(chains[2 * kPair], upper.x, lower.x, upper.y, lower.y, f.x, f.y);
    multiply_add<T>(chains[2 * kPair + 1], upper.z, lower.z, upper.w, lower.w, f.z, f.w);
  }

  // bias[2 h + c]: row g + 8 h, request 2 t + c.
  __device__ __forceinline__ void finish(float (&bias)[4], int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }
};

template <>
struct Products<float> {
  float sums[kGroup][2] = {};

  template <int>
  __device__ __forceinline__ void add(const uint4& upper, const uint4& lower, const uint4* features, int lane,
                                      int requests) {
#pragma unroll
    for (int request = 0; request < kGroup; ++request) {
      if (request >= requests) break;
      const uint4 f = features[request * 4 + lane % 4];
      sums[request][0] = dot(upper, f, sums[request][0]);
      sums[request][1] = dot(lower, f, sums[request][1]);
    }
  }

  __device__ __forceinline__ void finish(float (&bias)[4], int lane) {
#pragma unroll
    for (int request = 0; request < kGroup; ++request) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = sums[request][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (request / 2 == lane % 4) bias[2 * h + request % 2] = sum;
      }
    }
  }

  __device__ __forceinline__ static float dot(const uint4& a, const uint4& b, float sum) {
    sum = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum);
    sum = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum);
    sum = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum);
    return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum);
  }
};

}  // namespace dspark
