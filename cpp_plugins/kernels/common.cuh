// What every kernel file needs: activation types, 16-byte vectors, reductions and launch checks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "dspark_plugins.h"

// Functions of the C interface; everything else stays inside the library.
#define DSPARK_EXPORT extern "C" __attribute__((visibility("default")))

namespace dspark {

constexpr int kStreams = 4;  // residual streams of a row (hc_mult)
constexpr int kWarp = 32;

template <typename T>
__device__ __forceinline__ float to_float(T value);
template <>
__device__ __forceinline__ float to_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ float to_float(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <>
__device__ __forceinline__ float to_float(__half value) {
  return __half2float(value);
}

// Round to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float(float value) {
  return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half from_float(float value) {
  return __float2half_rn(value);
}

// 16 bytes of T: the unit of accesses to rows.
template <typename T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__device__ __forceinline__ Vector<T> load(const T* address) {
  Vector<T> result;
  *reinterpret_cast<uint4*>(&result) = *reinterpret_cast<const uint4*>(address);
  return result;
}

template <typename T>
__device__ __forceinline__ void store(T* address, const Vector<T>& value) {
  *reinterpret_cast<uint4*>(address) = *reinterpret_cast<const uint4*>(&value);
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

inline bool aligned(const void* pointer) {
  return pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

template <typename... P>
bool all_aligned(P... pointers) {
  return (aligned(pointers) && ...);
}

// The status of the launch that just happened; clears CUDA's last error, unless that is a sticky one.
inline int launch_status() { return cudaGetLastError() == cudaSuccess ? DSPARK_OK : DSPARK_LAUNCH_FAILED; }

// Major compute capability of the current device; 0 where it can't be asked.
inline int device_major() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major;
}

// Programmatic dependent launch (Hopper and later): a kernel launched by `launch` may start while its
// predecessor in the stream still runs. Before wait_for_predecessor() returns it may read only constants
// (weights and addresses that no kernel in flight writes) and may write nothing.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the successor start. Called after wait_for_predecessor(), so that at most two kernels of a stream overlap.
__device__ __forceinline__ void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Loads 16 bytes of a constant; stays where it is written, also before wait_for_predecessor() (a load through
// the read-only path would be moved behind it).
template <typename T>
__device__ __forceinline__ Vector<T> load_constant(const T* address) {
  Vector<T> result;
  uint4& bits = *reinterpret_cast<uint4*>(&result);
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return result;
}

struct DeviceLimits {
  int multiprocessors;
  int shared_bytes;  // of one block, after opting in
};

inline bool device_limits(DeviceLimits* limits) {
  int device;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&limits->multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) == cudaSuccess;
}

struct LaunchShape {
  dim3 grid;
  unsigned threads;
  unsigned cluster = 0;       // blocks along x that form a thread block cluster; 0 for none
  unsigned shared_bytes = 0;  // dynamic shared memory of a block
  bool cooperative = false;   // all blocks run at once, and after the predecessor, or the launch fails
};

// Launches a kernel that calls wait_for_predecessor() or is cooperative; returns a dspark_status.
template <typename... Parameters, typename... Arguments>
int launch(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  constexpr unsigned kAlwaysAllowed = 48 * 1024;
  if (shape.shared_bytes > kAlwaysAllowed) {
    DeviceLimits limits;
    // The device's limit rather than this launch's size, so that launches from several threads agree.
    if (device_limits(&limits))
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           limits.shared_bytes);
  }
  if (shape.cooperative) {
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    config.numAttrs = 1;
  } else if (device_major() >= 9) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
    if (shape.cluster > 0) {
      attributes[1].id = cudaLaunchAttributeClusterDimension;
      attributes[1].val.clusterDim.x = shape.cluster;
      attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
      config.numAttrs = 2;
    }
  }
  cudaLaunchKernelEx(&config, kernel, arguments...);
  return launch_status();
}

// Calls `function` with a null pointer of the activation type, so that it can be a generic lambda.
template <typename F>
int dispatch_activation(int activation, F&& function) {
  switch (activation) {
    case DSPARK_BFLOAT16: return function(static_cast<__nv_bfloat16*>(nullptr));
    case DSPARK_FLOAT16: return function(static_cast<__half*>(nullptr));
    case DSPARK_FLOAT32: return function(static_cast<float*>(nullptr));
    default: return DSPARK_BAD_ACTIVATION;
  }
}

}  // namespace dspark
