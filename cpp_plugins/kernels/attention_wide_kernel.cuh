// The 16-bit attention kernel for many rows. A block has 32 or 64 query rows of a group, all channels and all keys of
// the group (144 at most, which is a released window and the longest block) in shared memory at once, so nothing passes
// between blocks and the keys are loaded once for the rows:
//   1. all loads are started, in stages of 128 channels of queries and keys. While they are on their way, the block's
//      own rows, which came first, are rotated and rounded where they lie after the ring's;
//   2. scores, stage after stage as they arrive: a warp has two tiles of rows and one or two tiles of keys, and adds
//      its slices in channel order. Then the scores take the queries' place, and beside them lies the highest that
//      each warp had of a row;
//   3. a warp turns two whole rows of scores at a time into probabilities, which take the place of the scores, and
//      finds the factors of these rows' blocks of keys and their denominators, a lane a row;
//   4. a warp keeps the probabilities of two tiles of rows in registers and goes through its channels, 16 at a time.
// Rows have the bits that the other kernel gives them (attention_arithmetic.cuh).
#pragma once

#include "attention_wide_rows.cuh"

namespace dspark {
namespace {

constexpr int kStageSlices = 2;
constexpr int kStages = kMaxSlices / kStageSlices;
constexpr int kCopyRows = kWideThreads / 8;  // rows of a slice that the block copies at once, eight threads each

// Where things lie in shared memory, in bytes from its start; made by the host. Queries and then scores and
// probabilities lie after WideState.
struct WideLayout {
  int slices;
  int padded;     // keys, with zeros up to a whole tile
  int ring_step;  // kCopyRows rows further in the ring
  int score_pitch;
  int turns, keys, end;

  WideLayout(const AttentionProblem& p, int rows, int state_bytes) : slices(p.format.head_dim / kSpan) {
    const int pitch = row_pitch(slices);
    padded = (p.window + p.own_rows + kKeyTile - 1) / kKeyTile * kKeyTile;
    ring_step = kCopyRows % p.ring_rows;
    score_pitch = padded * 4 + 16;
    turns = state_bytes + rows * (pitch > score_pitch ? pitch : score_pitch);
    keys = turns + (((p.own_rows > 0 ? p.own_rows : 1) * p.format.pairs * static_cast<int>(sizeof(float2)) + 15) & ~15);
    end = keys + padded * pitch;
  }
};

// Until at most `pending` of the thread's groups of copies are under way.
__device__ __forceinline__ void wait_stages(int pending) {
  static_assert(kStages == 4);
  switch (pending) {
    case 0: wait_copies<0>(); break;
    case 1: wait_copies<1>(); break;
    case 2: wait_copies<2>(); break;
    default: wait_copies<3>();
  }
}

template <typename T, int kRowTiles, bool kOwn>
__global__ void __launch_bounds__(kWideThreads, 1)
    attention_wide_kernel(const __grid_constant__ AttentionProblem p, const __grid_constant__ WideLayout layout) {
  using State = WideState<kRowTiles>;
  constexpr int kRows = State::kRows, kWarpTiles = State::kWarpTiles;
  static_assert(sizeof(State) % 16 == 0);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = warp % State::kPairs * kPair * kRowTile, place = warp / State::kPairs;
  const int dim = p.format.head_dim, unrotated = p.format.unrotated, pairs = p.format.pairs;
  const int group = blockIdx.y, first_row = blockIdx.x * kRows;
  const int slices = layout.slices, padded = layout.padded, pitch = row_pitch(slices);

  unsigned char* const shared = dynamic_shared();
  State& state = *reinterpret_cast<State*>(shared);
  unsigned char* const queries = shared + sizeof(State);
  unsigned char* const stage_keys = shared + layout.keys;
  float2* const turns = reinterpret_cast<float2*>(shared + layout.turns);

  if (threadIdx.x < kRows) {
    const int row = min(first_row + static_cast<int>(threadIdx.x), p.rows - 1), step = row / p.heads;
    state.steps[threadIdx.x] = step;
    // A constant; volatile, so that it is loaded here.
    state.sinks[threadIdx.x] = static_cast<const volatile float*>(p.sink)[row - step * p.heads];
  }
  wait_for_predecessor();
  release_successor();
  const int slot = static_cast<const volatile int32_t*>(p.slots)[group];
  const int position = static_cast<const volatile int32_t*>(p.positions)[group];

  // Own rows go after the ring's, one of their slices to eight threads.
  const int copy_row = threadIdx.x / 8, copy_channel = threadIdx.x % 8 * 8;
  if (kOwn) {
    for (int piece = copy_row; piece < p.own_rows * slices; piece += kCopyRows) {
      const int own = piece / slices, channel = (piece - own * slices) * kSpan + copy_channel;
      copy_async(stage_keys + (p.window + own) * pitch + channel * 2,
                 static_cast<const T*>(p.own) + (static_cast<int64_t>(group) * p.own_rows + own) * dim + channel, true);
    }
    commit_copies();
  }
  const auto of_stage = [&](int stage, auto&& of_slice) {
#pragma unroll
    for (int i = 0; i < kStageSlices; ++i) {
      const int s = stage * kStageSlices + i;
      if (s < slices) of_slice(s * kSpan + copy_channel);
    }
  };
  // Rows past the end repeat the last one.
  const auto copy_queries = [&](int stage) {
#pragma unroll
    for (int row = copy_row; row < kRows; row += kCopyRows) {
      const T* const source =
          static_cast<const T*>(p.q) + (static_cast<int64_t>(group) * p.rows + min(first_row + row, p.rows - 1)) * dim;
      of_stage(stage, [&](int channel) { copy_async(queries + row * pitch + channel * 2, source + channel, true); });
    }
  };
  copy_queries(0);

  if (!has_slot(p, slot)) {
    wait_copies<0>();
    for (int row = copy_row; row < kRows && first_row + row < p.rows; row += kCopyRows) {
      T* const target =
          static_cast<T*>(p.attended) + (static_cast<int64_t>(group) * p.rows + first_row + row) * dim + copy_channel;
      for (int s = 0; s < slices; ++s) store(target + s * kSpan, Vector<T>{});
    }
    return;
  }
  const Keys<kOwn> keys(p, position);
  const T* const ring = static_cast<const T*>(p.ring) + static_cast<int64_t>(slot) * p.ring_rows * dim;
  int first_ring_row = copy_row;
  if (!kOwn) first_ring_row = ((keys.position - keys.window + 1 + copy_row) % p.ring_rows + p.ring_rows) % p.ring_rows;
#pragma unroll 1
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage > 0) copy_queries(stage);
    int ring_row = first_ring_row;
#pragma unroll 1
    for (int row = copy_row; row < keys.window; row += kCopyRows) {
      of_stage(stage, [&](int channel) {
        copy_async(stage_keys + row * pitch + channel * 2, ring + static_cast<int64_t>(ring_row) * dim + channel,
                   keys.in_ring(row));
      });
      ring_row += kOwn ? kCopyRows : layout.ring_step;
      if (!kOwn && ring_row >= p.ring_rows) ring_row -= p.ring_rows;
    }
    commit_copies();
  }
  for (int row = keys.count + copy_row; row < padded; row += kCopyRows) {
    for (int s = 0; s < slices; ++s)
      *reinterpret_cast<uint4*>(stage_keys + row * pitch + (s * kSpan + copy_channel) * 2) = make_uint4(0, 0, 0, 0);
  }
  make_turns(turns, keys.position, kOwn ? p.own_rows : 1, p.format, kWideWarps);
  __syncthreads();
  if (kOwn) {
    wait_copies<kStages>();
    const int pieces = p.own_rows * slices;
    for (int piece = copy_row; piece - lane / 8 < pieces; piece += kCopyRows) {  // whole warps
      const int own = min(piece, pieces - 1) / slices, channel = (piece - own * slices) * kSpan + copy_channel;
      T* const target = reinterpret_cast<T*>(stage_keys + (p.window + own) * pitch + channel * 2);
      Vector<T> values{};
      if (piece < pieces) {
        values = load(target);
        rotate_piece(values, channel, p.format, turns + own * pairs);
      }
      round_piece(values, channel, p.format);
      if (piece < pieces) store(target, values);
    }
  }

  float scores[kPair][2 * kWarpTiles][4] = {};
  const int first_key = place * kWarpTiles * kKeyTile;
#pragma unroll 1
  for (int stage = 0; stage * kStageSlices < slices; ++stage) {
    wait_stages(kStages - 1 - stage);
    if ((stage + 1) * kStageSlices * kSpan > unrotated) {
      for (int row = copy_row; row < kRows; row += kCopyRows) {
        of_stage(stage, [&](int channel) {
          T* const target = reinterpret_cast<T*>(queries + row * pitch + channel * 2);
          Vector<T> values = load(target);
          rotate_piece(values, channel, p.format, turns + state.steps[row] * pairs);
          store(target, values);
        });
      }
    }
    __syncthreads();
    const unsigned char* const query_lane = queries + warp_row * pitch + lane_of_rows(lane, pitch);
    const unsigned char* const key_lane = stage_keys + first_key * pitch + lane_of_columns(lane, pitch);
#pragma unroll 1
    for (int s = stage * kStageSlices; s < min((stage + 1) * kStageSlices, slices); ++s) {
      const int column = s * kSpan * 2;
      if (first_key + kWarpTiles * kKeyTile <= padded)
        add_slice_scores<T, kPair, kWarpTiles>(query_lane + column, key_lane + column, pitch, scores);
      else if (kWarpTiles > 1 && first_key < padded)
        add_slice_scores<T, kPair, 1>(query_lane + column, key_lane + column, pitch, scores);
    }
  }

  __syncthreads();  // the queries have been read
  unsigned char* const rows = queries;
  float highest[2 * kPair];  // of rows g, g + 8, ...
#pragma unroll
  for (int i = 0; i < 2 * kPair; ++i) highest[i] = -INFINITY;
#pragma unroll
  for (int n = 0; n < 2 * kWarpTiles; ++n) {
    const int key = first_key + n * 8 + 2 * t;
#pragma unroll
    for (int i = 0; i < 2 * kPair; ++i) {
      const float* const sum = &scores[i / 2][n][i % 2 * 2];
      const float2 pair = finish_scores(make_float2(sum[0], sum[1]), p.scale, keys, key, key < padded);
      highest[i] = fmaxf(highest[i], fmaxf(pair.x, pair.y));
      if (key < padded) *reinterpret_cast<float2*>(rows + (warp_row + g + 8 * i) * layout.score_pitch + key * 4) = pair;
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kPair; ++i) {
    highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 1));
    highest[i] = fmaxf(highest[i], __shfl_xor_sync(0xffffffffu, highest[i], 2));
    if (t == 0) state.maxima[warp_row + g + 8 * i][place] = highest[i];
  }
  __syncthreads();
  if (padded > 2 * kKeyBlock)
    make_weights<T, 3>(state, rows, layout.score_pitch, padded);
  else if (padded > kKeyBlock)
    make_weights<T, 2>(state, rows, layout.score_pitch, padded);
  else
    make_weights<T, 1>(state, rows, layout.score_pitch, padded);
  __syncthreads();

  make_results<T>(p, state, rows, layout.score_pitch, stage_keys, padded, first_row, turns);
}

}  // namespace
}  // namespace dspark
