// What the mHC kernels share: packs of channels, the arithmetic on streams, sums over a cluster.
#pragma once

#include "common.cuh"

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

// Thread block clusters. Before Hopper a cluster is one block, and its barrier the block's.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Writes a float of this block's shared memory at the same place in block `rank` of the cluster.
__device__ __forceinline__ void cluster_store(float* address, int rank, float value) {
#if __CUDA_ARCH__ >= 900
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(address));
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(value) : "memory");
#else
  *address = value;
#endif
}

}  // namespace dspark
