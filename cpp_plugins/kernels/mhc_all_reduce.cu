// MhcAllReduce and MhcAllReduceResidualOnly: the boundary between two sublayers (plugins/mhc_all_reduce.py).
//
// A cluster of blocks owns a row, a thread eight of its channels. The thread publishes its channels of the
// partial sum in the mailbox (one rank: skips that), loads its channels of the four streams meanwhile,
// collects the other ranks' parts, and mixes, collapses and normalises in registers. Only the norm's sum of
// squares leaves the thread (ClusterSum), and scales of MXFP8 output: four threads share one, sixteen a word of the
// swizzled scales.
//
// With several ranks the grid holds no more clusters than fit on the device at once, and all rows of a
// cluster are published before the first is awaited: ranks can't wait for blocks that were never started.
#include <algorithm>

#include "fp8.cuh"
#include "mailbox.cuh"

namespace dspark {
namespace {

constexpr int kMinThreads = 128, kMaxThreads = 512;
static_assert(ClusterSum::kMaxBlocks * kMaxThreads / kWarp <= ClusterSum::kMaxParts, "parts of a row");
// Before Hopper one block holds a row, and a thread may take several packs of it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kOnePack = false;
#else
constexpr bool kOnePack = true;
#endif

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
  uint2* codes;
  uint8_t* scales;
  uint32_t* swizzled_scales;  // null for none
  int swizzled_tiles;
  int rows, width;
  float inverse_width, norm_eps;
};

// What a call writes beside the streams: nothing, hidden and normed rows, or also the normed rows as MXFP8.
enum class Output { kStreams, kNormed, kQuantized };

// Stands in where no norm is taken.
struct NoSum {
  __device__ __forceinline__ explicit NoSum(ClusterSum::Storage&) {}
};

__device__ __forceinline__ float at(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

constexpr int kGroup = 32;                        // channels that share a scale
constexpr int kWordChannels = 4 * kGroup;         // of a word of swizzled scales
constexpr int kTileRows = 128, kTileWords = 128;  // of a tile of them
constexpr uint32_t kInfinity = 0x7f800000u;       // bits from here on are not finite

// Where a row's word of swizzled scales lies; rows r, r + 32, r + 64 and r + 96 of a tile are neighbours.
__device__ __forceinline__ int64_t swizzled_place(int64_t row, int word, int words) {
  const int in_tile = static_cast<int>(row % kTileRows);
  return (row / kTileRows * words + word) * kTileWords + in_tile % 32 * 4 + in_tile / 32;
}

// Writes a thread's channels of a normed row as e4m3 codes, and their groups' scale bytes. By all threads of a warp.
template <typename T>
__device__ __forceinline__ void write_mxfp8(const Boundary<T>& b, const Pack<T>& normed, bool active, int64_t row,
                                            int column) {
  uint32_t amax = 0;  // bits of magnitudes are ordered as the magnitudes, infinity and NaN above all
#pragma unroll
  for (int i = 0; i < kPack; ++i) amax = max(amax, __float_as_uint(to_float(normed[i])) & 0x7fffffffu);
  amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 1));
  amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, 2));
  const bool finite = amax < kInfinity;
  const uint32_t exponent = __float_as_uint(quantization_scale(__uint_as_float(amax))) >> 23;
  const float inverse = __uint_as_float((254u - exponent) << 23);
  uint32_t halves[2] = {};
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    const __nv_fp8_storage_t code =
        __nv_cvt_float_to_fp8(__fmul_rn(to_float(normed[i]), inverse), __NV_SATFINITE, __NV_E4M3);
    halves[i / 4] |= (finite ? static_cast<uint32_t>(code) : 0x7fu) << 8 * (i % 4);
  }
  const uint32_t scale = finite ? exponent : 0xffu;
  if (active) {
    b.codes[(row * b.width + column) / kPack] = make_uint2(halves[0], halves[1]);
    if (column % kGroup == 0) b.scales[(row * b.width + column) / kGroup] = static_cast<uint8_t>(scale);
  }
  if (b.swizzled_scales == nullptr) return;
  uint32_t word = active ? scale << 8 * (column / kGroup % 4) : 0;
  word |= __shfl_xor_sync(0xffffffffu, word, 4);
  word |= __shfl_xor_sync(0xffffffffu, word, 8);
  if (active && column % kWordChannels == 0) {
    const int words = (b.width + kWordChannels - 1) / kWordChannels;
    b.swizzled_scales[swizzled_place(row, column / kWordChannels, words)] = word;
  }
}

// Writes zeros for the rows that fill up the last tile of swizzled scales and the tiles after it.
template <typename T>
__device__ __forceinline__ void clear_missing_rows(const Boundary<T>& b) {
  const int words = (b.width + kWordChannels - 1) / kWordChannels;
  const int64_t last = static_cast<int64_t>(b.swizzled_tiles) * kTileWords;
  const int64_t step = static_cast<int64_t>(gridDim.x) * gridDim.y * blockDim.x;
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  for (int64_t i = static_cast<int64_t>(b.rows) * words + block * blockDim.x + threadIdx.x; i < last; i += step) {
    b.swizzled_scales[swizzled_place(i / words, static_cast<int>(i % words), words)] = 0;
  }
}

template <typename T, int kRanks, Output kOutput>
__global__ void __launch_bounds__(kMaxThreads, 1) boundary_kernel(const Boundary<T> b) {
  constexpr bool kResidualOnly = kOutput == Output::kStreams;
  // Eight parts may leave no registers for other operands while they are awaited.
  constexpr bool kLate = kRanks == 8 && (sizeof(T) == 4 || !kOnePack);
  constexpr bool kKeepWeight = kOnePack && !kLate && !kResidualOnly;
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * kPack, step = gridDim.x * blockDim.x * kPack;
  const bool active = column < b.width;
  const int64_t width = b.width;

  __shared__ ClusterSum::Storage storage;
  std::conditional_t<kResidualOnly, NoSum, ClusterSum> row_sum(storage);
  Pack<T> weight = {};
  if (kKeepWeight && active) weight = load_constant_pack(b.norm_weight + column);
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
      for (int place = column + step; !kOnePack && place < b.width; place += step) {
        mailbox.publish(load_pack(b.partial + row * width + place), row, place);
      }
      row += gridDim.y;
      if (row < b.rows) part = load_pack(b.partial + row * width + column);
    }
    __syncthreads();
    if (clerk) arrived = mailbox.arrive(gridDim.x * gridDim.y);
  }

  for (int64_t row = blockIdx.y; row < b.rows; row += gridDim.y) {
    Pack<T> hidden = {};
    float square = 0;
    for (int place = column; place < b.width; place += step) {
      Pack<T> streams[kStreams];
      float4 comb[kStreams], post, pre = {};
      const auto load_operands = [&] {
        const T* source = b.streams + row * kStreams * width + place;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) streams[j] = load_pack(source + j * width);
        const auto* coefficients = reinterpret_cast<const float4*>(b.comb) + row * kStreams;
#pragma unroll
        for (int j = 0; j < kStreams; ++j) comb[j] = coefficients[j];
        post = reinterpret_cast<const float4*>(b.post)[row];
        if constexpr (!kResidualOnly) pre = reinterpret_cast<const float4*>(b.pre)[row];
      };
      if constexpr (!kLate) load_operands();
      const Pack<T> y = mailbox.collect(load_pack(b.partial + row * width + place), row, place);
      if constexpr (kLate) load_operands();

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
        store_pack(b.streams_out + (row * kStreams + k) * width + place, mixed[k]);
      }
      if constexpr (!kResidualOnly) {
#pragma unroll
        for (int i = 0; i < kPack; ++i) {
          hidden[i] = from_float<T>(collapse(pre, to_float(mixed[0][i]), to_float(mixed[1][i]), to_float(mixed[2][i]),
                                             to_float(mixed[3][i])));
          square = __fmaf_rn(to_float(hidden[i]), to_float(hidden[i]), square);
        }
        store_pack(b.hidden + row * width + place, hidden);
      }
      if constexpr (kOnePack) break;
    }
    if constexpr (!kResidualOnly) {
      const float inverse_rms = rsqrtf(row_sum(square) * b.inverse_width + b.norm_eps);
      for (int shift = 0; shift < b.width; shift += step) {
        const int place = column + shift;
        const bool inside = place < b.width;
        Pack<T> normed = {};
        if (inside) {
          if constexpr (!kOnePack) hidden = load_pack(b.hidden + row * width + place);
          if constexpr (!kKeepWeight) weight = load_pack(b.norm_weight + place);
#pragma unroll
          for (int i = 0; i < kPack; ++i) {
            normed[i] = from_float<T>(__fmul_rn(to_float(weight[i]), __fmul_rn(to_float(hidden[i]), inverse_rms)));
          }
          store_pack(b.normed + row * width + place, normed);
        }
        if constexpr (kOutput == Output::kQuantized) write_mxfp8(b, normed, inside, row, place);
        if constexpr (kOnePack) break;
      }
    }
  }
  if constexpr (kOutput == Output::kQuantized) {
    if (b.swizzled_scales != nullptr) clear_missing_rows(b);
  }
  // The count has long come back: nothing waited for it.
  if (kRanks > 1 && clerk) mailbox.advance(arrived, gridDim.x * gridDim.y);
}

template <typename T, int kRanks, Output kOutput>
int launch_boundary(const Boundary<T>& b, cudaStream_t stream) {
  constexpr bool kResidualOnly = kOutput == Output::kStreams;
  const int packs = b.width / kPack;
  int threads = kMinThreads, blocks = (packs + threads - 1) / threads;
  // A norm is summed in one cluster; of several ranks, all blocks of a row must be on the device at once.
  if ((!kResidualOnly || kRanks > 1) && packs > ClusterSum::kMaxBlocks * kMaxThreads) return DSPARK_BAD_SHAPE;
  if (!kResidualOnly && device_major() >= 9) {
    for (; blocks > ClusterSum::kMaxBlocks; blocks = (packs + threads - 1) / threads) threads *= 2;
  } else if (!kResidualOnly) {
    threads = std::min(threads * blocks, kMaxThreads);
    blocks = 1;
  }
  int clusters = std::min(b.rows, 65535);
  if (kRanks > 1) {
    // Registers allow 512 threads per multiprocessor; "+ 1" leaves room for clusters that don't fill one group of them.
    DeviceLimits limits;
    if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
    const int resident = std::max(1, limits.multiprocessors * (kMaxThreads / threads) / (blocks + 1));
    const int turns = (b.rows + resident - 1) / resident;
    clusters = (b.rows + turns - 1) / turns;
  }
  const LaunchShape shape{dim3(blocks, clusters), static_cast<unsigned>(threads),
                          kResidualOnly ? 0u : static_cast<unsigned>(blocks)};
  return launch(boundary_kernel<T, kRanks, kOutput>, shape, stream, b);
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

// The MXFP8 output: a row's channels in whole groups, its rows within the tiles.
int check_mxfp8(const dspark_mhc_all_reduce_params* p) {
  const int64_t words = (p->quant_width + kWordChannels - 1) / kWordChannels, tiles = p->swizzled_tiles;
  if (p->quant_width != 0 && (p->quant_width != p->size_H || p->quant_width % kGroup)) return DSPARK_BAD_SHAPE;
  if (tiles == 0) return DSPARK_OK;
  if (tiles < 0 || words == 0 || tiles % words || p->size_rows > tiles / words * kTileRows) return DSPARK_BAD_SHAPE;
  return DSPARK_OK;
}

template <Output kOutput, typename T, typename P>
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
  if (p->tp_size == 1) return launch_boundary<T, 1, kOutput>(b, stream);
  b.mailbox = p->mailbox;
  if (!aligned(p->mailbox)) return DSPARK_BAD_POINTER;
  if (p->tp_size == 2) return launch_boundary<T, 2, kOutput>(b, stream);
  if (p->tp_size == 4) return launch_boundary<T, 4, kOutput>(b, stream);
  return launch_boundary<T, 8, kOutput>(b, stream);
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_mhc_all_reduce_workspace(const dspark_mhc_all_reduce_params*) { return 0; }

DSPARK_EXPORT int dspark_mhc_all_reduce(const dspark_mhc_all_reduce_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (const int status = check_mxfp8(p); status != DSPARK_OK) return status;
  if (const int status = check(p); status != DSPARK_OK || p->size_rows == 0) return status;
  if (!all_aligned(p->pre, p->norm_weight, p->hidden, p->normed)) return DSPARK_BAD_POINTER;
  if (p->quant_width && !all_aligned(p->codes, p->scales)) return DSPARK_BAD_POINTER;
  if (p->swizzled_tiles && !aligned(p->swizzled_scales)) return DSPARK_BAD_POINTER;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Boundary<T> b = {};
    b.pre = static_cast<const float*>(p->pre);
    b.norm_weight = static_cast<const T*>(p->norm_weight);
    b.hidden = static_cast<T*>(p->hidden);
    b.normed = static_cast<T*>(p->normed);
    b.codes = static_cast<uint2*>(p->codes);
    b.scales = static_cast<uint8_t*>(p->scales);
    if (p->swizzled_tiles) b.swizzled_scales = static_cast<uint32_t*>(p->swizzled_scales);
    b.swizzled_tiles = p->swizzled_tiles;
    b.norm_eps = p->norm_eps;
    return p->quant_width ? run<Output::kQuantized>(p, b, stream) : run<Output::kNormed>(p, b, stream);
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
    return run<Output::kStreams>(p, Boundary<T>{}, stream);
  });
}
