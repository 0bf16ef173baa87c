// What a block of the kernel for many rows does once it has all scores: probabilities (step 3 of
// attention_wide_kernel.cuh) and results (step 4).
#pragma once

#include "attention_arithmetic.cuh"

namespace dspark {
namespace {

constexpr int kWideWarps = 12;
constexpr int kWideThreads = kWideWarps * kWarp;
constexpr int kWideSteps = 9;  // tiles of keys that a block may have: so many probabilities stay in registers
constexpr int kWideKeys = kWideSteps * kKeyTile;
constexpr int kWideBlocks = (kWideKeys + kKeyBlock - 1) / kKeyBlock;
constexpr int kPair = 2;  // tiles of rows of a warp

template <int kRowTiles>
struct WideState {
  static constexpr int kRows = kRowTiles * kRowTile;
  static constexpr int kPairs = kRowTiles / kPair;        // of tiles of rows; warps take turns with them
  static constexpr int kPairWarps = kWideWarps / kPairs;  // that have the same rows
  static constexpr int kWarpTiles = kPairs;               // of keys, of a warp's scores
  static_assert(kPairWarps * kWarpTiles >= kWideSteps);

  int steps[kRows];  // of a row: its position is the group's plus this
  float sinks[kRows];
  float inverses[kRows];            // of the denominators
  float maxima[kRows][kPairWarps];  // of a warp's tiles of keys
  float sums[kRows][kWideBlocks];   // of a block's probabilities
  float factors[kRows][kWideBlocks];
};

// Step 3, by the whole block; the rows of scores lie `pitch` bytes apart.
template <typename T, int kBlocks, typename State>
__device__ __forceinline__ void make_weights(State& state, unsigned char* rows, int pitch, int padded) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // Over the keys up to a block's end.
  const auto find_maxima = [&](int row, float (&maxima)[kBlocks]) {
    constexpr int kEntries = kKeyBlock / (State::kWarpTiles * kKeyTile);
    float maximum = kNoMaximum;
#pragma unroll
    for (int entry = 0; entry < kBlocks * kEntries; ++entry) {
      maximum = fmaxf(maximum, state.maxima[row][entry]);
      maxima[entry / kEntries] = maximum;
    }
  };
#pragma unroll 1
  for (int row = 2 * warp; row < State::kRows; row += 2 * kWideWarps) {
    float2 scores[2][kBlocks];
    float maxima[2][kBlocks], sums[2][kBlocks];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      find_maxima(row + r, maxima[r]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int key = block * kKeyBlock + 2 * lane;
        scores[r][block] = make_float2(-INFINITY, -INFINITY);
        if (key < padded) scores[r][block] = *reinterpret_cast<const float2*>(rows + (row + r) * pitch + key * 4);
      }
    }
    __syncwarp();  // all scores have been read
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int key = block * kKeyBlock + 2 * lane;
        const float2 probabilities = make_probabilities(scores[r][block], maxima[r][block]);
        if (key < padded) *reinterpret_cast<uint32_t*>(rows + (row + r) * pitch + key * 2) = pack<T>(probabilities);
        sums[r][block] = lane_sum(probabilities);
      }
    }
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float sum = warp_sum_pair(sums[0][block], sums[1][block]);
      if (lane % (kWarp / 2) == 0) state.sums[row + lane / (kWarp / 2)][block] = sum;
    }
  }
  __syncwarp();
  const int row = 2 * warp + lane / 2 * (2 * kWideWarps) + lane % 2;
  if (row < State::kRows) {
    float maxima[kBlocks], before = kNoMaximum, denominator = 0.0f;
    find_maxima(row, maxima);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const float factor = block_factor(before, maxima[block]);
      denominator = join_denominator(denominator, factor, state.sums[row][block]);
      state.factors[row][block] = factor;
      before = maxima[block];
    }
    state.inverses[row] = inverse_denominator(denominator, sink_share(state.sinks[row], before));
  }
}

// Step 4, by the whole block; the rows of probabilities lie `weight_pitch` bytes apart.
template <typename T, typename State>
__device__ __forceinline__ void make_results(const AttentionProblem& p, const State& state, const unsigned char* rows,
                                             int weight_pitch, const unsigned char* keys, int padded, int first_row,
                                             const float2* turns) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int warp_row = warp % State::kPairs * kPair * kRowTile;
  const int dim = p.format.head_dim, pitch = row_pitch(dim / kSpan);

  uint4 weights[kPair][kWideSteps];
#pragma unroll
  for (int step = 0; step < kWideSteps; ++step) {
    if (step * kKeyTile >= padded) break;
#pragma unroll
    for (int r = 0; r < kPair; ++r)
      weights[r][step] = load_matrices(rows + (warp_row + r * kRowTile) * weight_pitch + step * kKeyTile * 2 +
                                       lane_of_rows(lane, weight_pitch));
  }
  // Where the lane stores of row warp_row + g, and of each eighth row after it; see below.
  const int row_of_lane = first_row + warp_row + g;
  T* const target = static_cast<T*>(p.attended) + (static_cast<int64_t>(blockIdx.y) * p.rows + row_of_lane) * dim +
                    t % 2 * 8 + t / 2 * 4;
#pragma unroll 1
  for (int first_channel = warp / State::kPairs * 16; first_channel < dim; first_channel += State::kPairWarps * 16) {
    const unsigned char* const value_lane = keys + lane_of_rows(lane, pitch) + first_channel * 2;
    float sums[kPair][2][4] = {};
#pragma unroll
    for (int block = 0; block < kWideBlocks; ++block) {
      constexpr int kBlockSteps = kKeyBlock / kKeyTile;
      const int first_step = block * kBlockSteps, steps = min(kBlockSteps, kWideSteps - first_step);
      if (first_step * kKeyTile >= padded) break;
      BlockValues<T> products[kPair][2];
      const auto add = [&](int step, const uint4& values) {
#pragma unroll
        for (int r = 0; r < kPair; ++r) {
          products[r][0].add(step, weights[r][first_step + step], values.x, values.y);
          products[r][1].add(step, weights[r][first_step + step], values.z, values.w);
        }
      };
      const auto load_values = [&](int step) {
        return load_matrices_transposed(value_lane + (first_step + step) * kKeyTile * pitch);
      };
      if ((first_step + steps) * kKeyTile <= padded) {  // all blocks but the last: nothing to ask, so loads go ahead
        uint4 values[kBlockSteps];
#pragma unroll
        for (int step = 0; step < steps; ++step) values[step] = load_values(step);
#pragma unroll
        for (int step = 0; step < steps; ++step) add(step, values[step]);
      } else {
#pragma unroll
        for (int step = 0; step < steps; ++step) {
          if ((first_step + step) * kKeyTile < padded) add(step, load_values(step));
        }
      }
#pragma unroll
      for (int r = 0; r < kPair; ++r) {
        const int row = warp_row + r * kRowTile + g;
        const float upper = state.factors[row][block], lower = state.factors[row + 8][block];
        products[r][0].join(sums[r][0], upper, lower);
        products[r][1].join(sums[r][1], upper, lower);
      }
    }
    uint32_t words[2 * kPair][2];
#pragma unroll
    for (int i = 0; i < 2 * kPair; ++i) {
      const float inverse = state.inverses[warp_row + g + 8 * i];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        words[i][n] = round_pair<T>(sums[i / 2][n][i % 2 * 2], sums[i / 2][n][i % 2 * 2 + 1], inverse);
    }
    if (first_channel + 16 > p.format.unrotated) {
#pragma unroll
      for (int i = 0; i < 2 * kPair; ++i) {
        const float2* const row_turns = turns + state.steps[warp_row + g + 8 * i] * p.format.pairs;
#pragma unroll
        for (int n = 0; n < 2; ++n)
          words[i][n] = rotate_pair_back<T>(words[i][n], first_channel + n * 8 + 2 * t, p.format, row_turns);
      }
    }
    // Neighbouring lanes change words, so that four lanes store the 32 bytes of a row at once.
#pragma unroll
    for (int i = 0; i < 2 * kPair; ++i) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, t % 2 ? words[i][0] : words[i][1], 1);
      const uint2 four = t % 2 ? make_uint2(other, words[i][1]) : make_uint2(words[i][0], other);
      if (row_of_lane + 8 * i < p.rows) *reinterpret_cast<uint2*>(target + first_channel + 8 * i * dim) = four;
    }
  }
}

}  // namespace
}  // namespace dspark
