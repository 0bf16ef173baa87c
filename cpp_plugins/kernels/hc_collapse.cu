// HcCollapse: hidden = sum over four streams of pre_i * stream_i (plugins/hc_collapse.py).
//
// Bound by memory: a thread reads the same 16 bytes of the four streams, all loads in flight before the
// first use, and writes 16 bytes. Streams are added in order in float32, then rounded once.
#include "common.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kThreads) hc_collapse_kernel(const T* streams, const float* pre, T* hidden, int width) {
  constexpr int kSize = Vector<T>::kSize;
  const int64_t row = blockIdx.y;
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kSize;
  if (column >= width) return;
  const T* source = streams + row * kStreams * width + column;
  Vector<T> parts[kStreams];
#pragma unroll
  for (int i = 0; i < kStreams; ++i) parts[i] = load(source + static_cast<int64_t>(i) * width);
  const float4 weights = *reinterpret_cast<const float4*>(pre + row * kStreams);
  Vector<T> result;
#pragma unroll
  for (int v = 0; v < kSize; ++v) {
    // Products and sums stay separate, as in the reference: no contraction into FMA.
    float total = __fmul_rn(weights.x, to_float(parts[0].values[v]));
    total = __fadd_rn(total, __fmul_rn(weights.y, to_float(parts[1].values[v])));
    total = __fadd_rn(total, __fmul_rn(weights.z, to_float(parts[2].values[v])));
    total = __fadd_rn(total, __fmul_rn(weights.w, to_float(parts[3].values[v])));
    result.values[v] = from_float<T>(total);
  }
  store(hidden + row * width + column, result);
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_hc_collapse_workspace(const dspark_hc_collapse_params*) { return 0; }

DSPARK_EXPORT int dspark_hc_collapse(const dspark_hc_collapse_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (p->size_H <= 0 || p->size_H % 8 || p->size_rows < 0 || p->size_rows > 65535) return DSPARK_BAD_SHAPE;
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->streams, p->pre, p->hidden)) return DSPARK_BAD_POINTER;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int vectors = static_cast<int>(p->size_H) / Vector<T>::kSize;
    const dim3 grid((vectors + kThreads - 1) / kThreads, static_cast<unsigned>(p->size_rows));
    hc_collapse_kernel<T><<<grid, kThreads, 0, stream>>>(static_cast<const T*>(p->streams), static_cast<const float*>(p->pre),
                                                         static_cast<T*>(p->hidden), static_cast<int>(p->size_H));
    return launch_status();
  });
}
