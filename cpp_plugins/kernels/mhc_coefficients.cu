// MhcCoefficients: pre, post and comb of a sublayer from its streams (plugins/mhc_coefficients.py).
//
// Two kernels. `project_kernel` splits the K = 4H flattened channels (K = H where the streams are equal and fn is
// summed over them: only the first is read) into slices of 256, one block column each: a block reads its slice of the
// 24 rows of fn once into registers (before it waits for its predecessor: fn is a constant), then multiplies rows of
// streams with it, four at a time, and writes 24 partial projections and a partial sum of squares per row and slice.
// `finish_kernel` adds a row's partial sums in a fixed order and makes the coefficients. How rows are spread over
// blocks never changes the order of a sum, so a row's result does not depend on the rows beside it.
//
// Sinkhorn rounds scale rows and columns of a 4 x 4 matrix A in turn, so the current matrix is
// r_j * A_jk * c_k. A column step is c_k <- c_k / (c_k * sum_j(A_jk * r_j) + eps), a row step likewise:
// two vectors of four in registers, and no shuffle inside the rounds.
#include <algorithm>

#include "mhc.cuh"

namespace dspark {
namespace {

constexpr int kOutputs = 24;
constexpr int kSlice = 256;           // channels of K a block
constexpr int kProjectThreads = 128;  // four warps of six outputs
constexpr int kWarpOutputs = kOutputs / (kProjectThreads / kWarp);
constexpr int kLaneChannels = 4;              // consecutive channels a lane loads at once
constexpr int kHalf = kWarp * kLaneChannels;  // channels that a warp loads at once
constexpr int kRows = 4;                      // rows in flight
constexpr int kColumns = 32;  // floats of a row and slice in the workspace: 24 projections, sum of squares, padding
constexpr int kUsedQuads = (kOutputs + 1 + 3) / 4;
constexpr int kFinishThreads = 256;
constexpr int64_t kChunk = 1024;  // rows that the workspace holds

// Four consecutive channels as they lie in memory.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  T values[kLaneChannels];
};

// Sums 32 values over the lanes of a warp, each step halving the values a lane keeps; lane i returns the
// sum of values[i].
template <int kKept = kWarp / 2>
__device__ __forceinline__ float reduce_lanes(float (&values)[kWarp], int lane) {
  const bool upper = lane & kKept;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const float sent = upper ? values[i] : values[i + kKept];
    const float kept = upper ? values[i + kKept] : values[i];
    values[i] = kept + __shfl_xor_sync(0xffffffffu, sent, kKept);
  }
  if constexpr (kKept > 1) return reduce_lanes<kKept / 2>(values, lane);
  return values[0];
}

// A row of streams starts `stride` channels after the one before; `width` of them are read. kRagged: the last slice is
// not full.
template <typename T, bool kRagged>
__global__ void __launch_bounds__(kProjectThreads)
    project_kernel(const T* streams, const float* fn, float* partials, int64_t stride, int64_t width, int rows,
                   int block_rows) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kSlice + lane * kLaneChannels;
  const auto inside = [&](int h) { return !kRagged || column + h * kHalf < width; };
  Vector<float> weights[kWarpOutputs][2] = {};
#pragma unroll
  for (int o = 0; o < kWarpOutputs; ++o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (inside(h)) weights[o][h] = load_constant(fn + (warp * kWarpOutputs + o) * width + column + h * kHalf);
    }
  }
  wait_for_predecessor();
  release_successor();

  const int begin = blockIdx.y * block_rows, end = min(rows, begin + block_rows);
  Quad<T> next[kRows][2] = {};
  const auto fetch = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = min(first + i, end - 1);  // past the end: any row that is there
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (inside(h)) next[i][h] = *reinterpret_cast<const Quad<T>*>(streams + row * stride + column + h * kHalf);
      }
    }
  };
  fetch(begin);
  for (int first = begin; first < end; first += kRows) {
    float x[kRows][2][kLaneChannels];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int c = 0; c < 2 * kLaneChannels; ++c) x[i][c / 4][c % 4] = to_float(next[i][c / 4].values[c % 4]);
    }
    if (first + kRows < end) fetch(first + kRows);
    // Eight values per row: six projections, the sum of squares (one warp per row), zero for the padding.
    float values[kWarp];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int o = 0; o < kWarpOutputs; ++o) {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < 2 * kLaneChannels; ++c) {
          sum = __fmaf_rn(weights[o][c / 4].values[c % 4], x[i][c / 4][c % 4], sum);
        }
        values[i * 8 + o] = sum;
      }
      float square = 0;
      if (i == warp) {
#pragma unroll
        for (int c = 0; c < 2 * kLaneChannels; ++c) square = __fmaf_rn(x[i][c / 4][c % 4], x[i][c / 4][c % 4], square);
      }
      values[i * 8 + kWarpOutputs] = square;
      values[i * 8 + 7] = 0;
    }
    const float sum = reduce_lanes(values, lane);
    const int i = lane / 8, value = lane % 8;
    const int target = value < kWarpOutputs ? warp * kWarpOutputs + value : value == 7 ? kOutputs + 1 + warp : kOutputs;
    if (first + i < end && (value != kWarpOutputs || i == warp)) {
      partials[(static_cast<int64_t>(first + i) * gridDim.x + blockIdx.x) * kColumns + target] = sum;
    }
  }
}

__device__ __forceinline__ float approximate_reciprocal(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// factors_i <- factors_i / (factors_i * sums_i + eps); two quotients share a reciprocal.
__device__ __forceinline__ void normalise(float (&factors)[4], const float (&sums)[4], float eps) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const float d0 = __fmaf_rn(factors[i], sums[i], eps), d1 = __fmaf_rn(factors[i + 1], sums[i + 1], eps);
    const float inverse = approximate_reciprocal(d0 * d1);
    const float f0 = factors[i] * d1, f1 = factors[i + 1] * d0;
    factors[i] = f0 * inverse;
    factors[i + 1] = f1 * inverse;
  }
}

__global__ void __launch_bounds__(kFinishThreads)
    finish_kernel(const float* partials, const float* scale, const float* base, float* pre, float* post, float* comb,
                  int slices, float inverse_count, float rms_eps, float hc_eps, int iterations) {
  constexpr int kQuads = kColumns / 4, kGroups = kFinishThreads / kQuads, kWarps = kFinishThreads / kWarp;
  constexpr int kInFlight = 4;
  __shared__ float4 sums[kWarps][kQuads];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t row = blockIdx.x;
  float factor = 0, offset = 0;
  if (warp == 0 && lane < kOutputs) {
    factor = scale[min(lane / 4, 2)];
    offset = base[lane];
  }
  wait_for_predecessor();
  release_successor();

  const int quad = threadIdx.x % kQuads, group = threadIdx.x / kQuads;
  float4 sum = make_float4(0, 0, 0, 0);
  if (quad < kUsedQuads) {
    const auto* source = reinterpret_cast<const float4*>(partials) + row * slices * kQuads + quad;
    for (int first = group; first < slices; first += kInFlight * kGroups) {
      float4 parts[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int slice = first + i * kGroups;
        parts[i] = slice < slices ? source[slice * kQuads] : make_float4(0, 0, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        sum.x += parts[i].x;
        sum.y += parts[i].y;
        sum.z += parts[i].z;
        sum.w += parts[i].w;
      }
    }
  }
#pragma unroll
  for (int distance = kQuads; distance < kWarp; distance *= 2) {
    sum.x += __shfl_xor_sync(0xffffffffu, sum.x, distance);
    sum.y += __shfl_xor_sync(0xffffffffu, sum.y, distance);
    sum.z += __shfl_xor_sync(0xffffffffu, sum.z, distance);
    sum.w += __shfl_xor_sync(0xffffffffu, sum.w, distance);
  }
  if (lane < kQuads) sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0) return;

  float total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += reinterpret_cast<const float*>(sums[w])[lane];
  const float square = __shfl_sync(0xffffffffu, total, kOutputs);
  const float mix = total * rsqrtf(square * inverse_count + rms_eps);
  const float logit = __fmaf_rn(mix, factor, offset);
  const float sigmoid = approximate_reciprocal(1.0f + expf(-logit));
  if (lane < 4) pre[row * 4 + lane] = sigmoid + hc_eps;
  if (lane >= 4 && lane < 8) post[row * 4 + lane - 4] = 2.0f * sigmoid;

  // Lane 8 + 4j + k holds element (j, k); softmax over k.
  float largest = fmaxf(logit, __shfl_xor_sync(0xffffffffu, logit, 1));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
  const float weight = expf(logit - largest);
  float divisor = weight + __shfl_xor_sync(0xffffffffu, weight, 1);
  divisor += __shfl_xor_sync(0xffffffffu, divisor, 2);
  const float element = __fmaf_rn(weight, approximate_reciprocal(divisor), hc_eps);

  float a[4][4], r[4] = {1, 1, 1, 1}, c[4] = {1, 1, 1, 1}, row_sums[4], column_sums[4];
#pragma unroll
  for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = __shfl_sync(0xffffffffu, element, 8 + i);
  for (int iteration = 0;; ++iteration) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      column_sums[k] = a[0][k] * r[0];
#pragma unroll
      for (int j = 1; j < 4; ++j) column_sums[k] = __fmaf_rn(a[j][k], r[j], column_sums[k]);
    }
    normalise(c, column_sums, hc_eps);
    if (iteration + 1 >= iterations) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      row_sums[j] = a[j][0] * c[0];
#pragma unroll
      for (int k = 1; k < 4; ++k) row_sums[j] = __fmaf_rn(a[j][k], c[k], row_sums[j]);
    }
    normalise(r, row_sums, hc_eps);
  }
  if (lane >= 8 && lane < 8 + 16) {
    const int j = (lane - 8) / 4, k = lane % 4;
    const float row_factor = j < 2 ? (j == 0 ? r[0] : r[1]) : (j == 2 ? r[2] : r[3]);
    const float column_factor = k < 2 ? (k == 0 ? c[0] : c[1]) : (k == 2 ? c[2] : c[3]);
    comb[row * 16 + lane - 8] = element * row_factor * column_factor;
  }
}

int64_t slices_of(const dspark_mhc_coefficients_params* p) { return (p->size_K + kSlice - 1) / kSlice; }

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_mhc_coefficients_workspace(const dspark_mhc_coefficients_params* p) {
  using namespace dspark;
  return std::min<int64_t>(p->size_rows, kChunk) * slices_of(p) * kColumns * sizeof(float);
}

DSPARK_EXPORT int dspark_mhc_coefficients(const dspark_mhc_coefficients_params* p, cudaStream_t stream) {
  using namespace dspark;
  const int64_t stride = kStreams * p->size_H;
  if (p->size_H <= 0 || p->size_H > 1 << 20 || stride % kSlice || (p->size_K != stride && p->size_K != p->size_H) ||
      p->size_rows < 0 || p->size_rows > INT32_MAX || p->sinkhorn_iters < 1) {
    return DSPARK_BAD_SHAPE;
  }
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->streams, p->fn, p->pre, p->post, p->comb, p->workspace) || !p->scale || !p->base) {
    return DSPARK_BAD_POINTER;
  }
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto slices = static_cast<unsigned>(slices_of(p));
    const auto project = p->size_K % kSlice ? project_kernel<T, true> : project_kernel<T, false>;
    auto* partials = static_cast<float*>(p->workspace);
    // Chunks share the workspace: a chunk's first kernel writes it after the last kernel of the one before.
    for (int64_t first = 0; first < p->size_rows; first += kChunk) {
      const int rows = static_cast<int>(std::min(p->size_rows - first, kChunk));
      const int fours = (rows + kRows - 1) / kRows;
      // Up to four blocks per slice: more would read fn more often than they gain.
      const int block_fours = (fours + 3) / 4, tiles = (fours + block_fours - 1) / block_fours;
      int status = launch(project, LaunchShape{dim3(slices, tiles), kProjectThreads}, stream,
                          static_cast<const T*>(p->streams) + first * stride, static_cast<const float*>(p->fn),
                          partials, stride, p->size_K, rows, block_fours * kRows);
      if (status != DSPARK_OK) return status;
      status = launch(finish_kernel, LaunchShape{dim3(rows), kFinishThreads}, stream, partials,
                      static_cast<const float*>(p->scale), static_cast<const float*>(p->base),
                      static_cast<float*>(p->pre) + first * 4, static_cast<float*>(p->post) + first * 4,
                      static_cast<float*>(p->comb) + first * 16, static_cast<int>(slices),
                      1.0f / static_cast<float>(p->size_K), p->rms_eps, p->hc_eps, p->sinkhorn_iters);
      if (status != DSPARK_OK) return status;
    }
    return static_cast<int>(DSPARK_OK);
  });
}
