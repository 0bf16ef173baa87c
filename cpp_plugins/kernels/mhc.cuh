// What the mHC kernels share: packs of channels, the arithmetic on streams, sums over a cluster.
#pragma once

#include "device.cuh"

namespace dspark {

// Consecutive channels of a row that one thread owns.
constexpr int kPack = 8;

template <typename T>
struct Pack {
  static constexpr int kVectors = kPack / Vector<T>::kSize;
  Vector<T> vectors[kVectors];

  __device__ __forceinline__ T& operator[](int i) { return vectors[i / Vector<T>::kSize].values[i % Vector<T>::kSize]; }
  __device__ __forceinline__ T operator[](int i) const {
    return vectors[i / Vector<T>::kSize].values[i % Vector<T>::kSize];
  }
};

template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* address) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kVectors; ++i) pack.vectors[i] = load(address + i * Vector<T>::kSize);
  return pack;
}

template <typename T>
__device__ __forceinline__ Pack<T> load_constant_pack(const T* address) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kVectors; ++i) pack.vectors[i] = load_constant(address + i * Vector<T>::kSize);
  return pack;
}

template <typename T>
__device__ __forceinline__ void store_pack(T* address, const Pack<T>& pack) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kVectors; ++i) store(address + i * Vector<T>::kSize, pack.vectors[i]);
}

// sum_i weights_i * streams_i, streams in order; products and sums are rounded one by one, as in the reference.
__device__ __forceinline__ float collapse(const float4& weights, float s0, float s1, float s2, float s3) {
  float total = __fmul_rn(weights.x, s0);
  total = __fadd_rn(total, __fmul_rn(weights.y, s1));
  total = __fadd_rn(total, __fmul_rn(weights.z, s2));
  return __fadd_rn(total, __fmul_rn(weights.w, s3));
}

// A sum over the warps of all blocks of a cluster, row after row, with the same bits in every thread. A warp
// sends its part into the shared memory of each block; the stores count on the receiver's barrier, so nobody
// waits for more than the parts, and two sets of slots and barriers take turns. A cluster is the blocks of
// one blockIdx.y. Before Hopper it is a single block.
class ClusterSum {
 public:
  static constexpr int kMaxBlocks = 8, kMaxParts = 128;

  struct Storage {
    float4 parts[2][kMaxParts / 4];
    uint64_t arrived[2];
  };

  // At the kernel's start, by all threads; blockDim.x is a multiple of 128.
  __device__ __forceinline__ explicit ClusterSum(Storage& storage) : storage_(storage) {
#if __CUDA_ARCH__ >= 900
    if (gridDim.x == 1) return;  // one block needs no barrier of a cluster
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&storage.arrived[i])) : "memory");
        expect(i);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // The sum of all threads' values, by all threads.
  __device__ __forceinline__ float operator()(float value) {
    const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int set = turn_ % 2;
    value = warp_sum(value);
#if __CUDA_ARCH__ >= 900
    if (gridDim.x > 1) {
      // Nothing is sent to a block that has not started.
      if (turn_ == 0) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (lane < gridDim.x) send(set, blockIdx.x * warps + warp, lane, value);
      while (!mbarrier_passed(&storage_.arrived[set], turn_ / 2 % 2)) {
      }
      if (threadIdx.x == 0) expect(set);  // the next but one
    } else
#endif
    {
      if (lane == 0) reinterpret_cast<float*>(storage_.parts[set])[warp] = value;
      __syncthreads();
    }
    const int quads = gridDim.x * warps / 4;
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (int first = 0; first < quads; first += kMaxBlocks) {
#pragma unroll
      for (int i = 0; i < kMaxBlocks; ++i) {
        if (first + i >= quads) continue;
        const float4 part = storage_.parts[set][first + i];
        sum.x += part.x;
        sum.y += part.y;
        sum.z += part.z;
        sum.w += part.w;
      }
    }
    ++turn_;
    return (sum.x + sum.y) + (sum.z + sum.w);
  }

 private:
#if __CUDA_ARCH__ >= 900
  __device__ __forceinline__ void expect(int set) {
    const uint32_t bytes = gridDim.x * (blockDim.x / kWarp) * sizeof(float);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&storage_.arrived[set])),
                 "r"(bytes)
                 : "memory");
  }

  __device__ __forceinline__ void send(int set, int part, int block, float value) {
    const float* slot = reinterpret_cast<const float*>(storage_.parts[set]) + part;
    asm volatile(
        "{\n"
        ".reg .b32 slot, barrier;\n"
        "mapa.shared::cluster.u32 slot, %0, %2;\n"
        "mapa.shared::cluster.u32 barrier, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [slot], %3, [barrier];\n"
        "}" ::"r"(shared_address(slot)),
        "r"(shared_address(&storage_.arrived[set])), "r"(block), "r"(__float_as_uint(value))
        : "memory");
  }
#endif

  Storage& storage_;
  int turn_ = 0;
};

}  // namespace dspark
