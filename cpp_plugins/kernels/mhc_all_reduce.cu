// MhcAllReduce and MhcAllReduceResidualOnly: the boundary between two sublayers (plugins/mhc_all_reduce.py).
//
// A cluster of blocks owns a row, a thread eight of its channels. The thread publishes its channels of the
// partial sum in the mailbox (one rank: skips that), loads its channels of the four streams meanwhile,
// collects the other ranks' parts, and mixes, collapses and normalises in registers. Only the norm's sum of
// squares leaves the thread (ClusterSum).
//
// With several ranks the grid holds no more clusters than fit on the device at once, and all rows of a
// cluster are published before the first is awaited: ranks can't wait for blocks that were never started.
#include <algorithm>

#include "mailbox.cuh"

namespace dspark {
namespace {

constexpr int kMinThreads = 128;
constexpr int kHopperThreads = 512;
constexpr int kSingleThreads = 1024;  // before Hopper one block holds a row
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMaxThreads = kSingleThreads;
#else
constexpr int kMaxThreads = kHopperThreads;
#endif
static_assert(ClusterSum::kMaxBlocks * kHopperThreads / kWarp <= ClusterSum::kMaxParts, "parts of a row");
static_assert(kSingleThreads / kWarp <= ClusterSum::kMaxParts, "parts of a row");

template <typename T>
struct Boundary {
  const T* partial;
  const T* streams;
  const float* post;
  const float* comb;
  const float* pre;
  const T* norm_weight;
  const void* mailbox;
  T* streams_out;
  T* hidden;
  T* normed;
  int rows, width;
  float inverse_width, norm_eps;
};

// Stands in where no norm is taken.
struct NoSum {
  __device__ __forceinline__ explicit NoSum(ClusterSum::Storage&) {}
};

__device__ __forceinline__ float at(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

template <typename T, int kRanks, bool kResidualOnly>
__global__ void __launch_bounds__(kMaxThreads, 1) boundary_kernel(const Boundary<T> b) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kPack;
  const bool active = column < b.width;
  const int64_t width = b.width;

  __shared__ ClusterSum::Storage storage;
  std::conditional_t<kResidualOnly, NoSum, ClusterSum> row_sum(storage);
  Pack<T> weight = {};
  if (!kResidualOnly && active) weight = load_constant_pack(b.norm_weight + column);
  Mailbox<T, kRanks> mailbox(b.mailbox, b.width);
  wait_for_predecessor();
  release_successor();

  const bool clerk = threadIdx.x == blockDim.x - 1;  // keeps count of the blocks that have read the generation
  unsigned arrived = 0;
  if constexpr (kRanks > 1) {
    Pack<T> part = {};
    if (active) part = load_pack(b.partial + blockIdx.y * width + column);
    mailbox.open();
    for (int64_t row = blockIdx.y; active && row < b.rows;) {
      mailbox.publish(part, row, column);
      row += gridDim.y;
      if (row < b.rows) part = load_pack(b.partial + row * width + column);
    }
    __syncthreads();
    if (clerk) arrived = mailbox.arrive(gridDim.x * gridDim.y);
  }

  for (int64_t row = blockIdx.y; row < b.rows; row += gridDim.y) {
    Pack<T> hidden = {};
    float square = 0;
    if (active) {
      const T* source = b.streams + row * kStreams * width + column;
      Pack<T> streams[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) streams[j] = load_pack(source + j * width);
      const Pack<T> own = load_pack(b.partial + row * width + column);
      const auto* coefficients = reinterpret_cast<const float4*>(b.comb) + row * kStreams;
      float4 comb[kStreams];
#pragma unroll
      for (int j = 0; j < kStreams; ++j) comb[j] = coefficients[j];
      const float4 post = reinterpret_cast<const float4*>(b.post)[row];
      float4 pre = {};
      if constexpr (!kResidualOnly) pre = reinterpret_cast<const float4*>(b.pre)[row];
      const Pack<T> y = mailbox.collect(own, row, column);

      Pack<T> mixed[kStreams];
#pragma unroll
      for (int k = 0; k < kStreams; ++k) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          float total = __fmul_rn(at(post, k), to_float(y[i]));
#pragma unroll
          for (int j = 0; j < kStreams; ++j) total = __fmaf_rn(at(comb[j], k), to_float(streams[j][i]), total);
          mixed[k][i] = from_float<T>(total);
        }
        store_pack(b.streams_out + (row * kStreams + k) * width + column, mixed[k]);
      }
      if constexpr (!kResidualOnly) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          hidden[i] = from_float<T>(
              collapse(pre, to_float(mixed[0][i]), to_float(mixed[1][i]), to_float(mixed[2][i]), to_float(mixed[3][i])));
          square = __fmaf_rn(to_float(hidden[i]), to_float(hidden[i]), square);
        }
        store_pack(b.hidden + row * width + column, hidden);
      }
    }
    if constexpr (!kResidualOnly) {
      const float inverse_rms = rsqrtf(row_sum(square) * b.inverse_width + b.norm_eps);
      if (active) {
        Pack<T> normed;
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          normed[i] = from_float<T>(__fmul_rn(to_float(weight[i]), __fmul_rn(to_float(hidden[i]), inverse_rms)));
        }
        store_pack(b.normed + row * width + column, normed);
      }
    }
  }
  // The count has long come back: nothing waited for it.
  if (kRanks > 1 && clerk) mailbox.advance(arrived, gridDim.x * gridDim.y);
}

template <typename T, int kRanks, bool kResidualOnly>
int launch_boundary(const Boundary<T>& b, cudaStream_t stream) {
  const int packs = b.width / kPack;
  int threads = kMinThreads, blocks = (packs + threads - 1) / threads;
  if (!kResidualOnly && device_major() >= 9) {
    for (; blocks > ClusterSum::kMaxBlocks && threads < kHopperThreads; blocks = (packs + threads - 1) / threads) threads *= 2;
    if (blocks > ClusterSum::kMaxBlocks) return DSPARK_BAD_SHAPE;
  } else if (!kResidualOnly) {
    threads *= blocks;
    blocks = 1;
    if (threads > kSingleThreads) return DSPARK_BAD_SHAPE;
  }
  int clusters = std::min(b.rows, 65535);
  if (kRanks > 1) {
    // Registers allow 512 threads a multiprocessor; "+ 1" leaves room for clusters that don't fill one group of them.
    DeviceLimits limits;
    if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
    const int resident = std::max(1, limits.multiprocessors * (kHopperThreads / threads) / (blocks + 1));
    const int turns = (b.rows + resident - 1) / resident;
    clusters = (b.rows + turns - 1) / turns;
  }
  const LaunchShape shape{dim3(blocks, clusters), static_cast<unsigned>(threads),
                          kResidualOnly ? 0u : static_cast<unsigned>(blocks)};
  return launch(boundary_kernel<T, kRanks, kResidualOnly>, shape, stream, b);
}

// Shapes and the mailbox; pointers come after, when there is a row at all.
template <typename P>
int check(const P* p) {
  if (p->size_H <= 0 || p->size_H % kPack || p->size_H > 1 << 20 || p->size_rows < 0 || p->size_rows > INT32_MAX) {
    return DSPARK_BAD_SHAPE;
  }
  if (p->tp_size != 1 && p->tp_size != 2 && p->tp_size != 4 && p->tp_size != 8) return DSPARK_BAD_SHAPE;
  if (p->tp_size == 1) return DSPARK_OK;
  if (p->size_P != p->tp_size) return DSPARK_BAD_SHAPE;
  return p->size_rows > DSPARK_MAILBOX_ROWS ? DSPARK_OVER_CAPACITY : DSPARK_OK;
}

template <bool kResidualOnly, typename T, typename P>
int run(const P* p, Boundary<T> b, cudaStream_t stream) {
  b.partial = static_cast<const T*>(p->partial);
  b.streams = static_cast<const T*>(p->streams);
  b.post = static_cast<const float*>(p->post);
  b.comb = static_cast<const float*>(p->comb);
  b.streams_out = static_cast<T*>(p->streams_out);
  b.rows = static_cast<int>(p->size_rows);
  b.width = static_cast<int>(p->size_H);
  b.inverse_width = 1.0f / static_cast<float>(b.width);
  if (!all_aligned(p->partial, p->streams, p->post, p->comb, p->streams_out)) return DSPARK_BAD_POINTER;
  if (p->tp_size == 1) return launch_boundary<T, 1, kResidualOnly>(b, stream);
  b.mailbox = p->mailbox;
  if (!aligned(p->mailbox)) return DSPARK_BAD_POINTER;
  if (p->tp_size == 2) return launch_boundary<T, 2, kResidualOnly>(b, stream);
  if (p->tp_size == 4) return launch_boundary<T, 4, kResidualOnly>(b, stream);
  return launch_boundary<T, 8, kResidualOnly>(b, stream);
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_mhc_all_reduce_workspace(const dspark_mhc_all_reduce_params*) { return 0; }

DSPARK_EXPORT int dspark_mhc_all_reduce(const dspark_mhc_all_reduce_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (const int status = check(p); status != DSPARK_OK || p->size_rows == 0) return status;
  if (!all_aligned(p->pre, p->norm_weight, p->hidden, p->normed)) return DSPARK_BAD_POINTER;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Boundary<T> b = {};
    b.pre = static_cast<const float*>(p->pre);
    b.norm_weight = static_cast<const T*>(p->norm_weight);
    b.hidden = static_cast<T*>(p->hidden);
    b.normed = static_cast<T*>(p->normed);
    b.norm_eps = p->norm_eps;
    return run<false>(p, b, stream);
  });
}

DSPARK_EXPORT size_t dspark_mhc_all_reduce_residual_only_workspace(const dspark_mhc_all_reduce_residual_only_params*) {
  return 0;
}

DSPARK_EXPORT int dspark_mhc_all_reduce_residual_only(const dspark_mhc_all_reduce_residual_only_params* p,
                                                      cudaStream_t stream) {
  using namespace dspark;
  if (const int status = check(p); status != DSPARK_OK || p->size_rows == 0) return status;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    return run<true>(p, Boundary<T>{}, stream);
  });
}
