// Messages between the blocks of a cluster: a store into another block's shared memory counts its bytes on a barrier of
// the receiver, so a receiver waits for its data and for nothing else. A cluster is the blocks of one (blockIdx.y,
// blockIdx.z). Where it is a single block, and before Hopper always, messages are plain stores and waiting is
// __syncthreads().
#pragma once

#include "device.cuh"

namespace dspark {

// kBoxes kinds of messages; the messages of a box come in rounds, counted from 0.
template <int kBoxes>
class ClusterMail {
 public:
  struct Storage {
    uint64_t arrived[kBoxes];
  };

  // At the kernel's start, by all threads. `blocks` is gridDim.x, as a constant where the kernel knows it.
  __device__ __forceinline__ ClusterMail(Storage& storage, int blocks) : storage_(storage), blocks_(blocks) {
#if __CUDA_ARCH__ >= 900
    if (blocks_ == 1) return;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&storage.arrived[box])) : "memory");
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // Once, by all threads, before the first message or the end: the other blocks have started.
  __device__ __forceinline__ void meet() const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // By one thread, once per round: the bytes that this block will receive, its own included.
  __device__ __forceinline__ void expect(int box, int bytes) const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1)
      asm volatile(
          "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&storage_.arrived[box])),
          "r"(bytes)
          : "memory");
#endif
  }

  // To `place` of block `to`; `place` is given as an address of this block's shared memory.
  __device__ __forceinline__ void send(int box, void* place, uint32_t value, int to) const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                       of_block(shared_address(place), to)),
                   "r"(value), "r"(of_block(shared_address(&storage_.arrived[box]), to))
                   : "memory");
      return;
    }
#endif
    *static_cast<uint32_t*>(place) = value;
  }

  __device__ __forceinline__ void send(int box, void* place, uint2 value, int to) const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) {
      asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                       of_block(shared_address(place), to)),
                   "r"(value.x), "r"(value.y), "r"(of_block(shared_address(&storage_.arrived[box]), to))
                   : "memory");
      return;
    }
#endif
    *static_cast<uint2*>(place) = value;
  }

  // Until the messages of a round have arrived; by any threads, but by all where the cluster is one block.
  __device__ __forceinline__ void wait(int box, int round) const {
#if __CUDA_ARCH__ >= 900
    if (blocks_ > 1) {
      while (!mbarrier_passed(&storage_.arrived[box], round % 2)) {
      }
      return;
    }
#endif
    __syncthreads();
  }

 private:
#if __CUDA_ARCH__ >= 900
  // The address in the shared memory of another block of the cluster; no memory is looked at, so it may move.
  static __device__ __forceinline__ uint32_t of_block(uint32_t address, int block) {
    uint32_t result;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(block));
    return result;
  }
#endif

  Storage& storage_;
  const int blocks_;
};

}  // namespace dspark
