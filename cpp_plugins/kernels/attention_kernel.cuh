// Attention with sinks over a ring cache, one KV head that is key and value (plugins/attention.py sink_attention).
//
// The 16-bit kernel for few rows and for windows of any length; attention_wide_kernel.cuh is the one for many rows, and
// attention_launch.cuh chooses. A cluster of blocks serves a tile of 16 query rows; each block has its own slice of 64
// channels, of the queries, the keys and the result, so every byte is loaded once per tile and the loads of a tile are
// spread over eight multiprocessors. Everything that does not depend on a loaded value is loaded at once; then the
// keys, which depend on the slot. Keys pass in chunks of up to 192 (a released window and its block are one chunk):
//   1. each block multiplies its channels of the queries with those of the keys and sends each of the 16 rows of
//      partial scores to the block that owns the row (ClusterMail);
//   2. the owner adds the partial scores in channel order and goes through the reference's blocks of 64 keys, a warp
//      a block of a row: running maximum, probabilities relative to it, rounded to T, their sum. These and the
//      factors for what came before go to all blocks;
//   3. each block adds probabilities times keys to its channels of the result, a warp 8 of each slice: one sum a
//      block of keys, joined with the factors as the reference does.
// Keys that are not valid are zeros in shared memory, whatever the cache holds. A row's bits depend on its own numbers
// alone, not on the other rows, the chunks or the cluster (attention_arithmetic.cuh). Without clusters (before Hopper,
// or slices that are no power of two) one block has all slices.
#pragma once

#include "attention_arithmetic.cuh"
#include "cluster_mail.cuh"

namespace dspark {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileRows = kRowTile;
constexpr int kChunkBlocks = 3;
constexpr int kKeyStep = 32;  // keys that one ldmatrix of values takes; chunks are filled up to a multiple
constexpr int kChunkSteps = kChunkBlocks * kKeyBlock / kKeyStep;

// The boxes of a block's mail.
constexpr int kScores = 0, kWeights = 1;

struct TileState {
  ClusterMail<2>::Storage mail;
  int steps[kTileRows];  // of a row: its position is the group's plus this
  float sinks[kTileRows];
  // Of an owned row: the maximum of each block of keys, and of all blocks so far; rounds take turns.
  float maxima[2][kChunkBlocks + 1][kTileRows];
  // Of a row, from its owner: a block's factor for what came before it and its sum of probabilities; after these
  // the sink's part of the denominator.
  float2 shares[kTileRows][kChunkBlocks + 1];
};

// Where things lie in shared memory, in bytes from its start; made by the host.
struct TileLayout {
  int chunk;                              // keys of a chunk
  int slices;                             // of a block
  int ring_step;                          // 32 rows further in the ring
  int score_pitch;                        // of a row of partial scores [source block][owned row][key]
  int weight_pitch;                       // of a row of probabilities
  int scores, weights, turns, keys, end;  // queries and own rows lie after TileState

  TileLayout() = default;
  TileLayout(const AttentionProblem& p, int chunk, int slices) : chunk(chunk), slices(slices) {
    const int count = p.window + p.own_rows;
    const int rows = ((count < chunk ? count : chunk) + kKeyStep - 1) / kKeyStep * kKeyStep;
    ring_step = kKeyStep % p.ring_rows;
    score_pitch = rows * 4 + 16;
    weight_pitch = rows * 2 + 16;
    scores = sizeof(TileState) + (kTileRows + p.own_rows) * row_pitch(slices);
    weights = scores + kTileRows * score_pitch;
    turns = weights + kTileRows * weight_pitch;
    keys = turns + (((p.own_rows > 0 ? p.own_rows : 1) * p.format.pairs * static_cast<int>(sizeof(float2)) + 15) & ~15);
    end = keys + rows * row_pitch(slices);
  }
};
static_assert(sizeof(TileState) % 16 == 0);

// Step 2, by the whole block: a warp takes a block of 64 keys of a row that this block owns, a lane two of them.
// `cluster` is a constant where the kernel knows it, as everywhere below; then a warp has one such part at most.
template <typename T, bool kSliced, bool kOwn>
__device__ __forceinline__ void share_probabilities(const TileLayout& layout, const Keys<kOwn>& keys, float scale,
                                                    const ClusterMail<2>& mail, int cluster, int start, int padded,
                                                    int round) {
  unsigned char* const shared = dynamic_shared();
  TileState& state = *reinterpret_cast<TileState*>(shared);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int owned_rows = kTileRows / cluster, blocks = (padded + kKeyBlock - 1) / kKeyBlock;
  const int parts = owned_rows * blocks;
  float (&maxima)[kChunkBlocks + 1][kTileRows] = state.maxima[round % 2];

  const auto add_scores = [&](int block, int owned) {
    const int key = block * kKeyBlock + 2 * lane, i = start + key;
    const unsigned char* partial = shared + layout.scores + owned * layout.score_pitch + key * 4;
    const bool inside = key < padded;  // what follows is the next chunk's
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (int source = 0; source < cluster; ++source, partial += owned_rows * layout.score_pitch) {
      if (!inside) continue;
      const float2 more = *reinterpret_cast<const float2*>(partial);
      sum = make_float2(sum.x + more.x, sum.y + more.y);
    }
    return finish_scores(sum, scale, keys, i, inside);
  };

  float2 s = {};
  for (int part = warp; part < parts; part += kWarps) {
    const int block = part / owned_rows, owned = part % owned_rows;
    s = add_scores(block, owned);
    const float highest = warp_max(fmaxf(s.x, s.y));
    if (lane == 0) maxima[block][owned] = highest;
  }
  __syncthreads();
  for (int part = warp; part < parts; part += kWarps) {
    const int block = part / owned_rows, owned = part % owned_rows, row = owned * cluster + blockIdx.x;
    if (!kSliced) s = add_scores(block, owned);
    float maximum = start > 0 ? state.maxima[(round + 1) % 2][kChunkBlocks][owned] : kNoMaximum;
    float before = 0.0f, mine = 0.0f;
#pragma unroll
    for (int other = 0; other < kChunkBlocks; ++other) {
      if (other == block) before = maximum;
      if (other < blocks) maximum = fmaxf(maximum, maxima[other][owned]);
      if (other == block) mine = maximum;
    }
    const float2 probabilities = make_probabilities(s, mine);
    const int key = block * kKeyBlock + 2 * lane;
    if (key < padded) {
      unsigned char* const place = shared + layout.weights + row * layout.weight_pitch + key * 2;
      const uint32_t rounded = pack<T>(probabilities);
#pragma unroll 8
      for (int to = 0; to < cluster; ++to) mail.send(kWeights, place, rounded, to);
    }
    const float factor = block_factor(before, mine), sum = warp_sum(lane_sum(probabilities));
    const uint2 share = make_uint2(__float_as_uint(factor), __float_as_uint(sum));
    if (lane < cluster) mail.send(kWeights, &state.shares[row][block], share, lane);
    if (block == 0) {
      const uint2 sink = make_uint2(__float_as_uint(sink_share(state.sinks[row], maximum)), 0);
      if (lane < cluster) mail.send(kWeights, &state.shares[row][kChunkBlocks], sink, lane);
      if (lane == 0) maxima[kChunkBlocks][owned] = maximum;
    }
  }
}

// kSliced: a cluster of eight, one slice a block, which are all released sizes on GPUs that have clusters.
template <typename T, bool kSliced, bool kOwn>
__global__ void __launch_bounds__(kThreads, kSliced ? 3 : 1)
    attention_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ TileLayout layout) {
  constexpr int kSlices = kSliced ? 1 : kMaxSlices;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int cluster = kSliced ? kMaxSlices : gridDim.x, slices = kSliced ? 1 : layout.slices;
  const int dim = kSliced ? kMaxHeadDim : p.format.head_dim, unrotated = p.format.unrotated, pairs = p.format.pairs;
  const int owned_rows = kTileRows / cluster;
  const int group = blockIdx.z, tile_row = blockIdx.y * kTileRows, first_channel = blockIdx.x * slices * kSpan;
  const int pitch = row_pitch(slices);
  const bool rotates = first_channel + slices * kSpan > unrotated;

  unsigned char* const shared = dynamic_shared();
  TileState& state = *reinterpret_cast<TileState*>(shared);
  unsigned char* const queries = shared + sizeof(TileState);
  unsigned char* const stage = shared + layout.keys;
  float2* const turns = reinterpret_cast<float2*>(shared + layout.turns);
  const ClusterMail<2> mail(state.mail, cluster);

  // Eight threads per row, of 16 rows of queries and of up to 16 own rows. Rows past the end repeat the last one.
  const int piece_row = threadIdx.x / 8, piece_channel = first_channel + threadIdx.x % 8 * 8;
  const bool of_query = piece_row < kTileRows;
  const int own = piece_row - kTileRows;
  const int64_t tile_offset =
      (static_cast<int64_t>(group) * p.rows + min(tile_row + piece_row, p.rows - 1)) * dim + piece_channel;
  const T* piece_source = static_cast<const T*>(p.q) + tile_offset;
  if (kOwn && !of_query)
    piece_source = static_cast<const T*>(p.own) +
                   (static_cast<int64_t>(group) * p.own_rows + min(own, p.own_rows - 1)) * dim + piece_channel;
  const int row_of_thread = min(tile_row + static_cast<int>(threadIdx.x), p.rows - 1);  // in the first threads
  float sink = 0.0f;
  if (threadIdx.x < kTileRows) {
    const int step = row_of_thread / p.heads;
    state.steps[threadIdx.x] = step;
    // A constant; volatile, so that it is loaded here.
    sink = static_cast<const volatile float*>(p.sink)[row_of_thread - step * p.heads];
  }
  unsigned char* const piece = queries + piece_row * pitch + threadIdx.x % 8 * 16;  // own rows lie after the queries
  unsigned char* const piece_stage = stage + piece_row * pitch + threadIdx.x % 8 * 16;

  wait_for_predecessor();
  release_successor();
  // Volatile, so that all are on their way before the first is looked at.
  const int slot = static_cast<const volatile int32_t*>(p.slots)[group];
  const int position = static_cast<const volatile int32_t*>(p.positions)[group];
  if (of_query || own < p.own_rows) {
    for (int s = 0; s < slices; ++s) copy_async(piece + s * kSpan * 2, piece_source + s * kSpan, true);
  }
  commit_copies();

  if (!has_slot(p, slot)) {
    wait_copies<0>();
    mail.meet();
    if (!of_query || tile_row + piece_row >= p.rows) return;
    for (int s = 0; s < slices; ++s) store(static_cast<T*>(p.attended) + tile_offset + s * kSpan, Vector<T>{});
    return;
  }
  const Keys<kOwn> keys(p, position);
  const unsigned char* const ring =
      static_cast<const unsigned char*>(p.ring) + 2 * (static_cast<int64_t>(slot) * p.ring_rows * dim + piece_channel);

  float sums[kSlices][4] = {};
  float denominators[2] = {};  // of rows g and g + 8
#pragma unroll 1
  for (int start = 0, round = 0; start < keys.count; start += layout.chunk, ++round) {
    const int count = min(layout.chunk, keys.count - start), padded = (count + kKeyStep - 1) / kKeyStep * kKeyStep;
    if (start > 0) __syncthreads();
    // Ring rows, zeros where they are not valid; the block's own rows follow, then zeros up to the next key step.
    int ring_row = start + piece_row;
    if (!kOwn) ring_row = ((keys.position - keys.window + 1 + ring_row) % p.ring_rows + p.ring_rows) % p.ring_rows;
    const int ring_end = min(count, keys.window - start);
#pragma unroll
    for (int i = 0; i < kChunkBlocks * kKeyBlock; i += kThreads / 8) {
      if (i + piece_row >= ring_end) break;
      const unsigned char* const source = ring + static_cast<int64_t>(ring_row) * (2 * dim);
      for (int s = 0; s < slices; ++s)
        copy_async(piece_stage + i * pitch + s * kSpan * 2, source + s * kSpan * 2,
                   keys.in_ring(start + i + piece_row));
      ring_row += kOwn ? kThreads / 8 : layout.ring_step;
      if (!kOwn && ring_row >= p.ring_rows) ring_row -= p.ring_rows;
    }
    commit_copies();
    if (start == 0 && threadIdx.x < kTileRows) state.sinks[threadIdx.x] = sink;
    if (count + piece_row < padded) {
      for (int s = 0; s < slices; ++s)
        *reinterpret_cast<uint4*>(piece_stage + count * pitch + s * kSpan * 2) = make_uint4(0, 0, 0, 0);
    }

    if (rotates && start == 0) {
      make_turns(turns, keys.position, kOwn ? p.own_rows : 1, p.format, kWarps);
      __syncthreads();
    }
    wait_copies<1>();  // the thread's pieces
    // Whole warps are of queries, which are rotated where they lie, or of own rows, which become keys.
    if (of_query ? rotates && start == 0 : kOwn) {
      const float2* const row_turns = turns + (of_query ? state.steps[piece_row] : min(own, p.own_rows - 1)) * pairs;
      const int place = p.window + own - start;
#pragma unroll 1
      for (int s = 0; s < slices; ++s) {
        Vector<T> values{};
        if (of_query || own < p.own_rows) values = load(reinterpret_cast<const T*>(piece + s * kSpan * 2));
        if (rotates) rotate_piece(values, piece_channel + s * kSpan, p.format, row_turns);
        unsigned char* target = piece;
        if (!of_query) {
          round_piece(values, piece_channel + s * kSpan, p.format);
          if (own >= p.own_rows || place < 0 || place >= count) continue;
          target = stage + place * pitch + threadIdx.x % 8 * 16;
        }
        store(reinterpret_cast<T*>(target + s * kSpan * 2), values);
      }
    }
    if (threadIdx.x == 0) {
      mail.expect(kScores, kTileRows * 4 * ((count + 15) / 16 * 16));
      mail.expect(kWeights, kTileRows * (2 * padded + 8 * ((padded + kKeyBlock - 1) / kKeyBlock + 1)));
    }
    wait_copies<0>();
    __syncthreads();
    if (start == 0) mail.meet();

    // Partial scores of 16 keys at a time.
#pragma unroll 1
    for (int key = warp * kKeyTile; key < count; key += kWarps * kKeyTile) {
      float scores[1][2][4] = {};
      const unsigned char* const query_lane = queries + lane_of_rows(lane, pitch);
      const unsigned char* const key_lane = stage + key * pitch + lane_of_columns(lane, pitch);
#pragma unroll 1
      for (int s = 0; s < slices; ++s)
        add_slice_scores<T, 1, 1>(query_lane + s * kSpan * 2, key_lane + s * kSpan * 2, pitch, scores);
      unsigned char* const from_here =
          shared + layout.scores + static_cast<int>(blockIdx.x) * owned_rows * layout.score_pitch;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float x = scores[0][n][2 * half], y = scores[0][n][2 * half + 1];
          unsigned char* const place =
              from_here + (g + 8 * half) / cluster * layout.score_pitch + (key + n * 8 + 2 * t) * 4;
          mail.send(kScores, place, make_uint2(__float_as_uint(x), __float_as_uint(y)), g % cluster);
        }
      }
    }

    mail.wait(kScores, round);
    share_probabilities<T, kSliced>(layout, keys, p.scale, mail, cluster, start, padded, round);

    uint4 values[kChunkSteps];
    const auto load_values = [&](int s) {
#pragma unroll
      for (int i = 0; i < kChunkSteps; ++i) {
        if (i * kKeyStep >= padded) break;
        values[i] = load_matrices_transposed(stage + (i * kKeyStep + lane) * pitch + (s * kSpan + warp * 8) * 2);
      }
    };
    load_values(0);
    mail.wait(kWeights, round);
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (s >= slices) break;
      if (s > 0) load_values(s);
      const auto load_weights = [&](int key) {
        return load_matrices(shared + layout.weights + key * 2 + lane_of_rows(lane, layout.weight_pitch));
      };
      // The next probabilities are on their way while these are used.
      uint4 a = load_weights(0), b = load_weights(16);
#pragma unroll
      for (int block = 0; block < kChunkBlocks; ++block) {
        if (block * kKeyBlock >= padded) break;
        BlockValues<T> products;
#pragma unroll
        for (int key = block * kKeyBlock; key < (block + 1) * kKeyBlock; key += kKeyStep) {
          if (key >= padded) break;
          const int next = min(key + kKeyStep, padded - kKeyStep);
          const uint4 next_a = load_weights(next), next_b = load_weights(next + 16), value = values[key / kKeyStep];
          products.add(0, a, value.x, value.y);
          products.add(1, b, value.z, value.w);
          a = next_a;
          b = next_b;
        }
        const float2 upper = state.shares[g][block], lower = state.shares[g + 8][block];
        products.join(sums[s], upper.x, lower.x);
        if (s == 0) {
          denominators[0] = join_denominator(denominators[0], upper.x, upper.y);
          denominators[1] = join_denominator(denominators[1], lower.x, lower.y);
        }
      }
    }
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = tile_row + g + 8 * half;
    if (row >= p.rows) continue;
    const float inverse = inverse_denominator(denominators[half], state.shares[g + 8 * half][kChunkBlocks].x);
    const float2* const row_turns = turns + state.steps[g + 8 * half] * pairs;
    T* const target = static_cast<T*>(p.attended) + (static_cast<int64_t>(group) * p.rows + row) * dim;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (s >= slices) break;
      const int channel = first_channel + s * kSpan + warp * 8 + 2 * t;
      const uint32_t rounded = round_pair<T>(sums[s][2 * half], sums[s][2 * half + 1], inverse);
      *reinterpret_cast<uint32_t*>(target + channel) = rotate_pair_back<T>(rounded, channel, p.format, row_turns);
    }
  }
}

}  // namespace
}  // namespace dspark
