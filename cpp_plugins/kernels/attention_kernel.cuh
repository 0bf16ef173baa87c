// Attention with sinks over a ring cache, one KV head that is key and value (plugins/attention.py sink_attention).
//
// A group of query rows shares its keys: all rows of a request's block (draft) or all heads of a row (target). Keys
// are numbered as the reference orders them: window ring entries, then the block's own rows. They pass in blocks of
// 64 through shared memory, up to three blocks under way at once; for each block: scores, running maximum,
// probabilities rounded to T, weighted sum. Keys that are not valid are zeros there, whatever the cache holds.
//
// 16-bit kernel: a block of 256 threads serves kTiles tiles of 16 query rows, 8 / kTiles warps each. For the scores
// a warp holds its tile's queries in registers and takes 8 kTiles keys of a block; for the weighted sum it takes
// 64 kTiles channels. The order of channels inside a dot product is free: in 64 channels, lane (g, t) holds
// channels 16 t .. 16 t + 15 of rows g and g + 8, so queries and keys come in 16-byte pieces as they are stored.
// Key rows lie 16 bytes further apart than they are long, which leaves both kinds of access without bank conflicts.
//
// float32 kernel: one warp a query row, no matrix instructions; for comparisons, not for speed.
#pragma once

#include "attention.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kKeyBlock = 64;
constexpr int kTileRows = 16;
constexpr int kSpan = 64;                       // channels that a warp's lanes hold together
constexpr int kSpans = kMaxHeadDim / kSpan;
constexpr int kScorePitch = kKeyBlock + 8;      // of scores and probabilities, in elements
constexpr int kMaxStages = 3;
constexpr int kMaxOwnRows = 16;

struct AttentionProblem {
  const void* q;         // [groups, rows, head_dim]
  const void* own;       // [groups, own_rows, head_dim], not rotated, not rounded
  const int32_t* positions;  // [groups], of the first row
  const int32_t* slots;  // [groups]
  const void* ring;      // [slot_count, ring_rows, head_dim]
  const float* sink;     // [heads]
  void* attended;        // as q
  int groups;
  int rows;              // of a group: positions of the group times heads
  int heads;
  int window;            // ring entries that count
  int own_rows;          // keys behind them; 0 without kOwn
  int ring_rows;
  int64_t slot_count;
  int stages;            // key blocks that shared memory holds
  float scale;
  CacheFormat format;
};

// The keys of a group. With kOwn the window is the ring as it lies and entry i is valid where i < position;
// without, entry i is position - window + 1 + i, wherever the ring keeps that.
template <bool kOwn>
struct Keys {
  int position, window, ring_rows, count;

  __device__ __forceinline__ Keys(const AttentionProblem& p, int group)
      : position(p.positions[group]), window(p.window), ring_rows(p.ring_rows), count(p.window + (kOwn ? p.own_rows : 0)) {}

  __device__ __forceinline__ bool in_ring(int i) const { return !kOwn || i < window; }
  __device__ __forceinline__ int ring_position(int i) const { return kOwn ? i : position - window + 1 + i; }
  __device__ __forceinline__ bool valid(int i) const {
    if (i >= count) return false;
    if (!in_ring(i)) return true;
    return kOwn ? i < position : ring_position(i) >= 0;
  }
  // Row of the slot's ring, for valid entries.
  __device__ __forceinline__ int ring_row(int i) const { return kOwn ? i : ring_position(i) % ring_rows; }
};

template <typename T>
__device__ __forceinline__ void clear_rows(const AttentionProblem& p, int group, int first_row, int rows) {
  T* const target = static_cast<T*>(p.attended) + (static_cast<int64_t>(group) * p.rows + first_row) * p.format.head_dim;
  const int64_t count = static_cast<int64_t>(min(rows, p.rows - first_row)) * p.format.head_dim / Vector<T>::kSize;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) store(target + i * Vector<T>::kSize, Vector<T>{});
}

// Rotations of the group's positions, [own_rows or 1][pairs], by the whole block.
template <bool kOwn>
__device__ __forceinline__ void make_turns(const AttentionProblem& p, int position, float2* turns) {
  const int count = (kOwn ? p.own_rows : 1) * p.format.pairs;
  for (int i = threadIdx.x; i < count; i += kThreads)
    turns[i] = rotation(p.format, position + i / p.format.pairs, i % p.format.pairs);
}

__host__ __device__ constexpr int key_pitch(int head_dim) { return head_dim * 2 + 16; }  // bytes, 16-bit elements

// Shared memory of the 16-bit kernel without its key blocks: scores, probabilities, corrections, denominators.
__host__ __device__ constexpr int softmax_bytes(int tiles) {
  return tiles * kTileRows * (kScorePitch * (4 + 2) + 4 + 4);
}

template <typename T, int kTiles, bool kOwn>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ AttentionProblem p) {
  wait_for_predecessor();
  constexpr int kTileWarps = kWarps / kTiles;
  constexpr int kRowsPerWarp = kTiles * kTileRows / kWarps;  // in the softmax
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int tile = warp / kTileWarps, part = warp % kTileWarps;
  const int group = blockIdx.y;
  const int block_row = blockIdx.x * kTiles * kTileRows;
  const int tile_row = block_row + tile * kTileRows;
  const int dim = p.format.head_dim, unrotated = p.format.unrotated;
  const int pitch = key_pitch(dim);

  const int slot = p.slots[group];
  if (slot < 0 || slot >= p.slot_count) {
    clear_rows<T>(p, group, block_row, kTiles * kTileRows);
    return;
  }
  const Keys<kOwn> keys(p, group);
  const int blocks = (keys.count + kKeyBlock - 1) / kKeyBlock;

  unsigned char* const stages = dynamic_shared();
  float* const scores = reinterpret_cast<float*>(stages + p.stages * kKeyBlock * pitch);
  float* const corrections = scores + kTiles * kTileRows * kScorePitch;
  float* const denominators = corrections + kTiles * kTileRows;
  T* const probabilities = reinterpret_cast<T*>(denominators + kTiles * kTileRows);
  float2* const turns = reinterpret_cast<float2*>(probabilities + kTiles * kTileRows * kScorePitch);

  const auto stage_of = [&](int b) { return stages + (b % p.stages) * kKeyBlock * pitch; };
  // Keys of block b up to a multiple of 16, a warp a row: copies of the ring, zeros for what is not valid.
  const auto copy_ring = [&](int b) {
    const T* const ring = static_cast<const T*>(p.ring) + static_cast<int64_t>(slot) * p.ring_rows * dim;
    const int rows = min(kKeyBlock, (keys.count - b * kKeyBlock + 15) / 16 * 16);
    for (int row = warp; row < rows; row += kWarps) {
      const int i = b * kKeyBlock + row;
      if (i < keys.count && !keys.in_ring(i)) continue;
      const bool valid = keys.valid(i);
      const T* const source = ring + (valid ? static_cast<int64_t>(keys.ring_row(i)) * dim : 0);
      for (int channel = lane * 8; channel < dim; channel += kWarp * 8)
        copy_async(stage_of(b) + row * pitch + channel * 2, source + channel, valid);
    }
    commit_copies();
  };
  const auto make_own = [&](int b) {
    if constexpr (kOwn) {
      for (int row = warp; row < kKeyBlock; row += kWarps) {
        const int own = b * kKeyBlock + row - keys.window;
        if (own < 0 || own >= p.own_rows) continue;
        T* const target = reinterpret_cast<T*>(stage_of(b) + row * pitch);
        make_cache_entry(static_cast<const T*>(p.own) + (static_cast<int64_t>(group) * p.own_rows + own) * dim, p.format,
                         turns + own * p.format.pairs,
                         [&](int channel, const Vector<T>& entry) { store(target + channel, entry); });
      }
    }
  };

  for (int b = 0; b < min(blocks, p.stages); ++b) copy_ring(b);
  // Pieces 2 t and 2 t + 1 of the eight in a span, of rows g and g + 8. Rows past the end repeat the last one.
  uint4 query[kSpans][2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = min(tile_row + g + 8 * half, p.rows - 1);
    const T* const source = static_cast<const T*>(p.q) + (static_cast<int64_t>(group) * p.rows + row) * dim + t * 16;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      if (span * kSpan >= dim) break;
      query[span][0][half] = *reinterpret_cast<const uint4*>(source + span * kSpan);
      query[span][1][half] = *reinterpret_cast<const uint4*>(source + span * kSpan + 8);
    }
  }
  make_turns<kOwn>(p, keys.position, turns);
  __syncthreads();
  for (int b = 0; b < min(blocks, p.stages); ++b) make_own(b);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2* const row_turns = turns + min(tile_row + g + 8 * half, p.rows - 1) / p.heads * p.format.pairs;
#pragma unroll
    for (int span = 0; span < kSpans; ++span) {
      if (span * kSpan >= dim) break;
      if (span * kSpan + kSpan <= unrotated) continue;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const auto turn = [&](uint32_t word, int i) {
          const int channel = span * kSpan + t * 16 + e * 8 + 2 * i;
          if (channel < unrotated) return word;
          const float2 pair = unpack<T>(word);
          return pack<T>(rotate(pair.x, pair.y, row_turns[(channel - unrotated) / 2]));
        };
        uint4& piece = query[span][e][half];
        piece = make_uint4(turn(piece.x, 0), turn(piece.y, 1), turn(piece.z, 2), turn(piece.w, 3));
      }
    }
  }

  float sums[8 * kTiles][4] = {};  // weighted sums of this warp's channels, 8 in a row
  float maximum[kRowsPerWarp], denominator[kRowsPerWarp];
#pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    maximum[r] = -1e30f;
    denominator[r] = 0.0f;
  }
  const int first_channel = part * kSpan * kTiles;

  for (int b = 0; b < blocks; ++b) {
    const int pending = min(blocks, b + p.stages) - 1 - b;
    if (pending == 0) {
      wait_copies<0>();
    } else if (pending == 1) {
      wait_copies<1>();
    } else {
      wait_copies<2>();
    }
    __syncthreads();
    const unsigned char* const stage = stage_of(b);
    const int left = keys.count - b * kKeyBlock;

    // Scores of the tile's queries with 8 keys at a time, in four chains of instructions.
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int first_key = (part + n * kTileWarps) * 8;
      if (first_key >= left) continue;
      float chains[4][4] = {};
      const unsigned char* const key = stage + (first_key + g) * pitch + t * 32;
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        if (span * kSpan >= dim) break;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint4 k = *reinterpret_cast<const uint4*>(key + span * kSpan * 2 + e * 16);
          const uint4 &upper = query[span][e][0], &lower = query[span][e][1];
          multiply_add<T>(chains[2 * e], upper.x, lower.x, upper.y, lower.y, k.x, k.y);
          multiply_add<T>(chains[2 * e + 1], upper.z, lower.z, upper.w, lower.w, k.z, k.w);
        }
      }
      float dots[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) dots[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
      float* const target = scores + (tile * kTileRows + g) * kScorePitch + first_key + 2 * t;
      *reinterpret_cast<float2*>(target) = make_float2(dots[0], dots[1]);
      *reinterpret_cast<float2*>(target + 8 * kScorePitch) = make_float2(dots[2], dots[3]);
    }
    __syncthreads();

    // Softmax: a warp owns kRowsPerWarp rows throughout, a lane two neighbouring keys.
#pragma unroll
    for (int r = 0; r < kRowsPerWarp; ++r) {
      const int row = warp * kRowsPerWarp + r;
      const int i = b * kKeyBlock + 2 * lane;
      const float2 raw = *reinterpret_cast<const float2*>(scores + row * kScorePitch + 2 * lane);
      const float s0 = keys.valid(i) ? __fmul_rn(raw.x, p.scale) : -INFINITY;
      const float s1 = keys.valid(i + 1) ? __fmul_rn(raw.y, p.scale) : -INFINITY;
      const float new_maximum = fmaxf(maximum[r], warp_max(fmaxf(s0, s1)));
      const float correction = expf(maximum[r] - new_maximum);
      const float p0 = expf(s0 - new_maximum), p1 = expf(s1 - new_maximum);
      denominator[r] = fmaf(denominator[r], correction, warp_sum(p0 + p1));
      maximum[r] = new_maximum;
      *reinterpret_cast<uint32_t*>(probabilities + row * kScorePitch + 2 * lane) = pack<T>(make_float2(p0, p1));
      if (lane == 0) {
        corrections[row] = correction;
        if (b + 1 == blocks) {
          const int head = min(block_row + row, p.rows - 1) % p.heads;
          denominators[row] = denominator[r] + expf(p.sink[head] - new_maximum);
        }
      }
    }
    __syncthreads();

    // sums = sums * correction + probabilities . keys
    if (b > 0) {
      const float upper = corrections[tile * kTileRows + g], lower = corrections[tile * kTileRows + g + 8];
#pragma unroll
      for (int n = 0; n < 8 * kTiles; ++n) {
        sums[n][0] *= upper;
        sums[n][1] *= upper;
        sums[n][2] *= lower;
        sums[n][3] *= lower;
      }
    }
    for (int key = 0; key < min(left, kKeyBlock); key += 16) {
      const uint4 a = load_matrices(probabilities + (tile * kTileRows + lane % 16) * kScorePitch + key + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < 8 * kTiles; n += 2) {
        const int channel = first_channel + n * 8;
        if (channel >= dim) break;
        const uint4 v = load_matrices_transposed(stage + (key + lane % 16) * pitch + (channel + lane / 16 * 8) * 2);
        multiply_add<T>(sums[n], a.x, a.y, a.z, a.w, v.x, v.y);
        multiply_add<T>(sums[n + 1], a.x, a.y, a.z, a.w, v.z, v.w);
      }
    }
    if (b + p.stages < blocks) {
      __syncthreads();
      copy_ring(b + p.stages);
      make_own(b + p.stages);
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile_row + g + 8 * half;
    if (row >= p.rows) continue;
    const float total = denominators[tile * kTileRows + g + 8 * half];
    const float2* const row_turns = turns + row / p.heads * p.format.pairs;
    T* const target = static_cast<T*>(p.attended) + (static_cast<int64_t>(group) * p.rows + row) * dim;
#pragma unroll
    for (int n = 0; n < 8 * kTiles; ++n) {
      const int channel = first_channel + n * 8 + 2 * t;
      if (first_channel + n * 8 >= dim) break;
      uint32_t word = pack<T>(make_float2(__fdiv_rn(sums[n][2 * half], total), __fdiv_rn(sums[n][2 * half + 1], total)));
      if (channel >= unrotated) {
        const float2 pair = unpack<T>(word);
        word = pack<T>(rotate_back(pair.x, pair.y, row_turns[(channel - unrotated) / 2]));
      }
      *reinterpret_cast<uint32_t*>(target + channel) = word;
    }
  }
}

// Channels 4 (lane + 32 i) .. + 3 belong to a lane.
template <bool kOwn>
__global__ void __launch_bounds__(kThreads) attention_float_kernel(const __grid_constant__ AttentionProblem p) {
  wait_for_predecessor();
  constexpr int kPieces = kMaxHeadDim / (4 * kWarp);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int group = blockIdx.y, block_row = blockIdx.x * kWarps;
  const int dim = p.format.head_dim, unrotated = p.format.unrotated;
  const int slot = p.slots[group];
  if (slot < 0 || slot >= p.slot_count) {
    clear_rows<float>(p, group, block_row, kWarps);
    return;
  }
  const Keys<kOwn> keys(p, group);
  float* const own = reinterpret_cast<float*>(dynamic_shared());
  float2* const turns = reinterpret_cast<float2*>(own + (kOwn ? p.own_rows : 0) * dim);
  make_turns<kOwn>(p, keys.position, turns);
  __syncthreads();
  if constexpr (kOwn) {
    for (int row = warp; row < p.own_rows; row += kWarps) {
      make_cache_entry(static_cast<const float*>(p.own) + (static_cast<int64_t>(group) * p.own_rows + row) * dim, p.format,
                       turns + row * p.format.pairs,
                       [&](int channel, const Vector<float>& entry) { store(own + row * dim + channel, entry); });
    }
    __syncthreads();
  }
  const int row = block_row + warp;
  if (row >= p.rows) return;

  const int64_t offset = (static_cast<int64_t>(group) * p.rows + row) * dim;
  const float2* const row_turns = turns + row / p.heads * p.format.pairs;
  const auto turn = [&](Vector<float>& piece, int channel, bool back) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (channel + i < unrotated) continue;
      const float2 by = row_turns[(channel + i - unrotated) / 2];
      const float even = piece.values[i], odd = piece.values[i + 1];
      const float2 turned = back ? rotate_back(even, odd, by) : rotate(even, odd, by);
      piece.values[i] = turned.x;
      piece.values[i + 1] = turned.y;
    }
  };
  Vector<float> query[kPieces], sum[kPieces];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = 4 * (lane + kWarp * i);
    query[i] = sum[i] = Vector<float>{};
    if (channel >= dim) continue;
    query[i] = load(static_cast<const float*>(p.q) + offset + channel);
    turn(query[i], channel, false);
  }
  const float* const ring = static_cast<const float*>(p.ring) + static_cast<int64_t>(slot) * p.ring_rows * dim;
  const auto key_row = [&](int i) {
    return keys.in_ring(i) ? ring + static_cast<int64_t>(keys.ring_row(i)) * dim : own + (i - keys.window) * dim;
  };

  float maximum = -1e30f, denominator = 0.0f;
  for (int start = 0; start < keys.count; start += kKeyBlock) {
    float scores[2] = {-INFINITY, -INFINITY};  // of keys start + lane and start + 32 + lane
    for (int n = 0; n < kKeyBlock; ++n) {
      if (!keys.valid(start + n)) continue;
      const float* const key = key_row(start + n);
      float dot = 0.0f;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int channel = 4 * (lane + kWarp * i);
        if (channel >= dim) continue;
        const Vector<float> k = load(key + channel);
#pragma unroll
        for (int v = 0; v < 4; ++v) dot = fmaf(query[i].values[v], k.values[v], dot);
      }
      dot = __fmul_rn(warp_sum(dot), p.scale);
      if (n == lane) scores[0] = dot;
      if (n == lane + kWarp) scores[1] = dot;
    }
    const float new_maximum = fmaxf(maximum, warp_max(fmaxf(scores[0], scores[1])));
    const float correction = expf(maximum - new_maximum);
    const float p0 = expf(scores[0] - new_maximum), p1 = expf(scores[1] - new_maximum);
    denominator = fmaf(denominator, correction, warp_sum(p0 + p1));
    maximum = new_maximum;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
#pragma unroll
      for (int v = 0; v < 4; ++v) sum[i].values[v] *= correction;
    }
    for (int n = 0; n < kKeyBlock; ++n) {
      const float weight = __shfl_sync(0xffffffffu, n < kWarp ? p0 : p1, n % kWarp);
      if (!keys.valid(start + n)) continue;
      const float* const key = key_row(start + n);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int channel = 4 * (lane + kWarp * i);
        if (channel >= dim) continue;
        const Vector<float> k = load(key + channel);
#pragma unroll
        for (int v = 0; v < 4; ++v) sum[i].values[v] = fmaf(weight, k.values[v], sum[i].values[v]);
      }
    }
  }
  denominator += expf(p.sink[row % p.heads] - maximum);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = 4 * (lane + kWarp * i);
    if (channel >= dim) continue;
#pragma unroll
    for (int v = 0; v < 4; ++v) sum[i].values[v] = __fdiv_rn(sum[i].values[v], denominator);
    turn(sum[i], channel, true);
    store(static_cast<float*>(p.attended) + offset + channel, sum[i]);
  }
}

// Enqueues the attention of a checked problem.
template <bool kOwn>
int attend(AttentionProblem p, int activation, cudaStream_t stream) {
  DeviceLimits limits;
  if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
  p.scale = static_cast<float>(std::pow(static_cast<double>(p.format.head_dim), -0.5));
  const int turn_bytes = (kOwn ? p.own_rows : 1) * p.format.pairs * static_cast<int>(sizeof(float2));
  const auto shape = [&](int rows, int shared_bytes) {
    LaunchShape result{dim3((p.rows + rows - 1) / rows, p.groups), kThreads};
    result.shared_bytes = shared_bytes;
    return result;
  };
  return dispatch_activation(activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, float>) {
      const int shared = (kOwn ? p.own_rows : 0) * p.format.head_dim * 4 + turn_bytes;
      return launch(attention_float_kernel<kOwn>, shape(kWarps, shared), stream, p);
    } else {
      if (p.format.head_dim % kSpan) return static_cast<int>(DSPARK_BAD_SHAPE);
      // Two tiles a block where one would not find a multiprocessor of its own.
      const int64_t tiles = static_cast<int64_t>((p.rows + kTileRows - 1) / kTileRows) * p.groups;
      const int tiles_per_block = tiles > limits.multiprocessors ? 2 : 1;
      const int fixed = softmax_bytes(tiles_per_block) + turn_bytes;
      const int block_bytes = kKeyBlock * key_pitch(p.format.head_dim);
      const int blocks = (p.window + p.own_rows + kKeyBlock - 1) / kKeyBlock;
      p.stages = (limits.shared_bytes - fixed) / block_bytes;
      if (p.stages > kMaxStages) p.stages = kMaxStages;
      if (p.stages > blocks) p.stages = blocks;
      if (p.stages < 1) return static_cast<int>(DSPARK_BAD_SHAPE);
      const int shared = p.stages * block_bytes + fixed;
      return tiles_per_block == 1 ? launch(attention_kernel<T, 1, kOwn>, shape(kTileRows, shared), stream, p)
                                  : launch(attention_kernel<T, 2, kOwn>, shape(2 * kTileRows, shared), stream, p);
    }
  });
}

}  // namespace
}  // namespace dspark
