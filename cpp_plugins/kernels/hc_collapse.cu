// HcCollapse: hidden = sum over four streams of pre_i * stream_i (plugins/hc_collapse.py).
//
// Bound by latency up to a hundred rows, then by memory: a thread reads the same 16 bytes of the four
// streams, all loads in flight before the first use, and writes 16 bytes.
#include "mhc.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 64;

template <typename T>
__global__ void __launch_bounds__(kThreads)
    hc_collapse_kernel(const T* streams, const float* pre, T* hidden, int rows, int width) {
  constexpr int kSize = Vector<T>::kSize;
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kSize;
  wait_for_predecessor();
  release_successor();
  if (column >= width) return;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const T* source = streams + row * kStreams * width + column;
    Vector<T> parts[kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) parts[i] = load(source + static_cast<int64_t>(i) * width);
    const float4 weights = *reinterpret_cast<const float4*>(pre + row * kStreams);
    __syncwarp();  // or the compiler moves two of the loads behind the first products
    Vector<T> result;
#pragma unroll
    for (int v = 0; v < kSize; ++v) {
      result.values[v] = from_float<T>(collapse(weights, to_float(parts[0].values[v]), to_float(parts[1].values[v]),
                                                to_float(parts[2].values[v]), to_float(parts[3].values[v])));
    }
    store(hidden + row * width + column, result);
  }
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_hc_collapse_workspace(const dspark_hc_collapse_params*) { return 0; }

DSPARK_EXPORT int dspark_hc_collapse(const dspark_hc_collapse_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (p->size_H <= 0 || p->size_H % 8 || p->size_H > 1 << 20 || p->size_rows < 0 || p->size_rows > INT32_MAX) {
    return DSPARK_BAD_SHAPE;
  }
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->streams, p->pre, p->hidden)) return DSPARK_BAD_POINTER;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int width = static_cast<int>(p->size_H), rows = static_cast<int>(p->size_rows);
    const int vectors = width / Vector<T>::kSize;
    const LaunchShape shape{dim3((vectors + kThreads - 1) / kThreads, min(rows, 65535)), kThreads};
    return launch(hc_collapse_kernel<T>, shape, stream, static_cast<const T*>(p->streams),
                  static_cast<const float*>(p->pre), static_cast<T*>(p->hidden), rows, width);
  });
}
