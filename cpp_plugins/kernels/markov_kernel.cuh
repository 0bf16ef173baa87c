// The persistent kernel of MarkovSampling and MarkovSamplingSharded (plugins/markov_sampling*.py).
//
// The cost is reading W2 [V, R] once per step. Blocks, one per multiprocessor, own fixed ranges of it, in tiles of
// 16 vocabulary rows that go round the block's warps, so what a block has read it can keep: tiles in registers
// (kKept a warp), tiles in shared memory, and only the rest is streamed again in each step, through one shared
// memory slot a warp. Every thread copies exactly the bytes that it will multiply, so tiles need no barrier.
//
// A step ends with every block's best candidate of every request in global memory (markov_candidates.cuh): a block
// polls them and finds the winner for itself. All blocks must run at once: there are no more of them than
// multiprocessors, and a cooperative launch guarantees it.
//
// Sharded, a rank's blocks own the rank's rows of W2 only, one block finds the rank's winner and all find the winner of
// all ranks (markov_exchange.cuh). That launch is programmatic instead: it reads W2 while the kernel before it ends,
// and ranks that share a GPU in tests run side by side. What else occupies multiprocessors then ends without waiting
// for it.
#pragma once

#include "gumbel.cuh"
#include "markov_exchange.cuh"
#include "markov_products.cuh"

namespace dspark {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
// Tiles that a warp keeps in registers, for rows of this many pieces. A part of the vocabulary needs fewer, and the
// exchange a few registers.
template <bool Sharded>
constexpr int kKept = Sharded ? 2 : 3;
constexpr int kKeptPieces = 8;

struct Problem {
  const float* base_logits;
  const int32_t* anchor_ids;
  const unsigned char* embed;
  const unsigned char* head;
  const int32_t* positions;  // with `temperature` and `seeds`, or null
  const float* temperature;
  const int32_t* seeds;
  const void* mailbox;  // of a sharded call
  int32_t* draft_tokens;
  unsigned char* features;
  float* corrected_logits;  // or null
  uint64_t* candidates;     // [block, requests, blocks of the grid]
  int requests;
  int vocab;       // rows of `embed`
  int rows;        // of `head`, and base logits of a slot
  int valid_rows;  // those of them that are tokens
  int first_id;    // the token of row 0
  int ranks, rank;
  int block;
  int row_bytes;
  int pieces;  // of a row, the last one may be partly beyond it
  int tiles;
  int workers;         // warps that process tiles
  int resident_slots;  // shared memory slots beside the workers' own
};

__host__ __device__ constexpr int slot_bytes(int pieces) { return kTileRows * kPieceBytes * pieces; }
__host__ __device__ constexpr int feature_bytes(int groups, int pieces) {
  return groups * kGroup * kPieceBytes * pieces;
}
// Shared memory in front of the slots: feature rows, the best candidate of each warp, key and temperature of each
// request, and what the block knows of the exchange.
template <bool Sharded>
__host__ __device__ constexpr int fixed_bytes(int groups, int pieces) {
  return feature_bytes(groups, pieces) + groups * kGroup * (kWarps * 8 + 4 + 4) + (Sharded ? kExchangeBytes : 0);
}

template <typename T, int Kept, int Groups, bool Wide, bool Sharded>
__global__ void __launch_bounds__(kThreads, 1) markov_kernel(const __grid_constant__ Problem p) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int groups = Groups == 1 ? 1 : (p.requests + kGroup - 1) / kGroup;
  const int pieces = Kept ? kKeptPieces : p.pieces;
  const int workers = Kept ? kWarps : p.workers;

  uint4* const features = reinterpret_cast<uint4*>(dynamic_shared());
  uint64_t* const warp_best = reinterpret_cast<uint64_t*>(dynamic_shared() + feature_bytes(groups, pieces));
  uint32_t* const noise_key = reinterpret_cast<uint32_t*>(warp_best + kWarps * groups * kGroup);
  float* const temperature = reinterpret_cast<float*>(noise_key + groups * kGroup);
  Exchange& exchange = *reinterpret_cast<Exchange*>(temperature + groups * kGroup);  // Sharded only
  unsigned char* const slots = dynamic_shared() + fixed_bytes<Sharded>(groups, pieces);

  // The block's tiles, counted from 0. Tile j belongs to warp j % workers; the first ones are kept in registers,
  // the next in resident slots, the others pass through the warp's own slot.
  const int first = static_cast<int>(static_cast<int64_t>(blockIdx.x) * p.tiles / gridDim.x);
  const int count = static_cast<int>(static_cast<int64_t>(blockIdx.x + 1) * p.tiles / gridDim.x) - first;
  const int kept = Kept * workers;
  const int resident = min(count, kept + p.resident_slots);
  int passing = resident + (warp + workers - resident % workers) % workers;  // the tile in the warp's own slot
  const bool works = warp < workers;
  const int streamed = works && passing < count ? (count - 1 - passing) / workers + 1 : 0;

  // This thread's first bytes of a tile's row g or g + 8; its further ones are kPieceBytes apart.
  const auto row_start = [&](int tile, int half) {
    const int row = min((first + tile) * kTileRows + g + 8 * half, p.rows - 1);
    return p.head + static_cast<int64_t>(row) * p.row_bytes + t * 16;
  };
  const auto copy_tile = [&](int tile, int slot) {
    const unsigned char *upper = row_start(tile, 0), *lower = row_start(tile, 1);
    uint4* target = reinterpret_cast<uint4*>(slots + slot * slot_bytes(pieces)) + lane;
    for (int piece = 0; piece < pieces; ++piece) {
      const bool inside = Kept || piece * kPieceBytes + t * 16 < p.row_bytes;
      copy_async(target + (2 * piece) * kWarp, upper + piece * kPieceBytes, inside);
      copy_async(target + (2 * piece + 1) * kWarp, lower + piece * kPieceBytes, inside);
    }
  };
  // The base logits of a tile are asked for one step ahead; they don't fit anywhere but in L2.
  const auto prefetch_base = [&](int tile, int step) {
    if (g != 0 && g != 7) return;
    const int row = min((first + tile) * kTileRows + (g ? kTileRows - 1 : 0), p.rows - 1);
#pragma unroll
    for (int group = 0; group < Groups; ++group) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int request = group * kGroup + 2 * t + c;
        if (request < p.requests)
          prefetch_l2(p.base_logits + (static_cast<int64_t>(request) * p.block + step) * p.rows + row);
      }
    }
  };

  // Everything that will stay is asked for at once, in the order of use.
  if (streamed > 0) copy_tile(passing, warp);
  commit_copies();
  uint4 kept_rows[Kept ? Kept : 1][kKeptPieces][2];
#pragma unroll
  for (int k = 0; k < Kept; ++k) {
    const unsigned char *upper = row_start(warp + k * kWarps, 0), *lower = row_start(warp + k * kWarps, 1);
#pragma unroll
    for (int piece = 0; piece < kKeptPieces; ++piece) {
      kept_rows[k][piece][0] = load_once(upper + piece * kPieceBytes);
      kept_rows[k][piece][1] = load_once(lower + piece * kPieceBytes);
    }
  }
  for (int tile = kept + warp; works && tile < resident; tile += workers) copy_tile(tile, workers + tile - kept);
  commit_copies();
  commit_copies();
  if constexpr (Sharded) {
    // Up to here only the head table was read.
    wait_for_predecessor();
    if (warp == 0) open_exchange(exchange, p.mailbox, p.ranks, p.rank, lane);
  }
  for (int tile = warp; works && tile < count; tile += workers) prefetch_base(tile, 0);

  // One warp per request: fetch the token's feature row, lay it out as the B operand, and hand it out.
  const auto take_token = [&](int request, int token, int step) {
    token = min(max(token, 0), p.vocab - 1);
    const uint4* row = reinterpret_cast<const uint4*>(p.embed + static_cast<int64_t>(token) * p.row_bytes);
    uint4* copy = reinterpret_cast<uint4*>(p.features + (static_cast<int64_t>(request) * p.block + step) * p.row_bytes);
    for (int chunk = lane; chunk * 16 < p.row_bytes; chunk += kWarp) {
      const uint4 value = row[chunk];
      features[(request / kGroup * pieces + chunk / 4) * kWarp + request % kGroup * 4 + chunk % 4] = value;
      if (blockIdx.x == 0) copy[chunk] = value;
    }
    if (lane == 0 && p.temperature) {
      const int32_t* seed = p.seeds + 2 * request;
      noise_key[request] = gumbel_key(seed[0], seed[1], p.positions[request], step, DSPARK_DRAFT_SALT);
      temperature[request] = p.temperature[request];
    }
  };
  for (int i = threadIdx.x; i < feature_bytes(groups, pieces) / 16; i += kThreads) features[i] = make_uint4(0, 0, 0, 0);
  __syncthreads();
  for (int request = warp; request < p.requests; request += kWarps) take_token(request, p.anchor_ids[request], 0);
  __syncthreads();

  // The warp's tiles that stay: 0, 1, .. are warp, warp + workers, ..; the first Kept of them in registers.
  const int staying = works && warp < resident ? (resident - 1 - warp) / workers + 1 : 0;
  const int share = streamed ? (staying + streamed - 1) / streamed : 0;
  for (int step = 0; step < p.block; ++step) {
    uint64_t best[Groups][2] = {};
    int passed = 0, stayed = 0, since = share;
    while (passed + stayed < staying + streamed) {
      // A streamed tile first, then its share of those that stay, while the next one is on its way. Streamed tiles
      // go back and forth: the last one of a step is still there for the next step.
      const bool streams = passed < streamed && (since >= share || stayed == staying);
      const int tile = streams ? passing : warp + stayed * workers;
      const int top_row = (first + tile) * kTileRows + g;

      float base[4];
      const auto load_base = [&](int group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int request = group * kGroup + 2 * t + i % 2, row = top_row + i / 2 * 8;
          base[i] = 0.0f;
          if (request < p.requests && row < p.valid_rows)
            base[i] = p.base_logits[(static_cast<int64_t>(request) * p.block + step) * p.rows + row];
        }
      };
      if (Groups == 1) load_base(0);

      Products<T> products[Groups];
      const auto multiply = [&](auto rows) {  // rows(piece, half): this thread's bytes of the tile
        const auto add = [&](auto pair, int piece) {
          const uint4 upper = rows(piece, 0), lower = rows(piece, 1);
#pragma unroll
          for (int group = 0; group < Groups; ++group) {
            if (group < groups)
              products[group].template add<decltype(pair)::value>(
                  upper, lower, features + (group * pieces + piece) * kWarp, lane, p.requests - group * kGroup);
          }
        };
#pragma unroll(Kept ? kKeptPieces / 2 : 1)
        for (int piece = 0; piece < pieces; piece += 2) {
          add(std::integral_constant<int, 0>(), piece);
          if (piece + 1 < pieces) add(std::integral_constant<int, 1>(), piece + 1);
        }
      };
      if (!streams && stayed < Kept) {
#pragma unroll
        for (int k = 0; k < Kept; ++k) {
          if (stayed == k) multiply([&](int piece, int half) { return kept_rows[k][piece][half]; });
        }
      } else {
        // Groups of copies: the first streamed tile, the resident tiles, an empty one, then one a streamed tile.
        if (!streams) {
          wait_copies<1>();
        } else if (passed == 0) {
          wait_copies<2>();
        } else {
          wait_copies<0>();
        }
        const int slot = streams ? warp : workers + tile - kept;
        const uint4* source = reinterpret_cast<const uint4*>(slots + slot * slot_bytes(pieces)) + lane;
        multiply([&](int piece, int half) { return source[(2 * piece + half) * kWarp]; });
      }
      if (streams) {
        ++passed;
        since = 0;
        if (passed < streamed) copy_tile(passing += step % 2 ? -workers : workers, warp);
        commit_copies();
      } else {
        ++stayed;
        ++since;
      }

#pragma unroll
      for (int group = 0; group < Groups; ++group) {
        if (group >= groups) break;
        if (Groups > 1) load_base(group);
        float bias[4];
        products[group].finish(bias, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int request = group * kGroup + 2 * t + i % 2, row = top_row + i / 2 * 8;
          if (request >= p.requests || row >= p.valid_rows) continue;
          const int id = Sharded ? p.first_id + row : row;
          const float logit = base[i] + bias[i];
          if (!Sharded && p.corrected_logits)
            p.corrected_logits[(static_cast<int64_t>(request) * p.block + step) * p.rows + row] = logit;
          uint64_t candidate;
          if constexpr (Wide) {
            candidate = pack_candidate(wide_score(logit, temperature[request], noise_key[request], id), id);
          } else {
            float score = logit;
            if (p.temperature && temperature[request] > 0.0f) {
              const float divisor = fmaxf(temperature[request], DSPARK_TEMPERATURE_FLOOR);
              score = __fadd_rn(__fdiv_rn(logit, divisor), gumbel_noise(noise_key[request], id));
            }
            candidate = pack_candidate(score, id);
          }
          best[group][i % 2] = larger(best[group][i % 2], candidate);
        }
      }
      if (step + 1 < p.block) prefetch_base(tile, step + 1);
    }

    // Lanes of equal t hold candidates of the same requests, then warps, then blocks.
#pragma unroll
    for (int group = 0; group < Groups; ++group) {
      if (group >= groups) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint64_t winner = lanes_max<4>(best[group][c]);
        if (g == 0) warp_best[(group * kGroup + 2 * t + c) * kWarps + warp] = winner;
      }
    }
    __syncthreads();
    const bool last_step = step + 1 == p.block;
    const auto slots_of = [&](int request) {
      return p.candidates + (static_cast<int64_t>(step) * p.requests + request) * gridDim.x;
    };
    for (int request = warp; request < p.requests; request += kWarps) {
      uint64_t mine = lanes_max<1>(lane < kWarps ? warp_best[request * kWarps + lane] : 0);
      if (Sharded) mine = larger(mine, kNothing);
      if (lane == 0) store_relaxed(slots_of(request) + blockIdx.x, mine);
    }
    if constexpr (Sharded) {
      // Blocks share the requests: each is gathered and sent by one warp of the rank.
      for (int request = blockIdx.x + warp * gridDim.x; request < p.requests; request += kWarps * gridDim.x)
        send_winner(exchange, step, request, await_winner(slots_of(request), gridDim.x, lane), lane);
    }
    if (last_step && blockIdx.x != 0) return;
    const auto take_winner = [&](int request, uint64_t winner) {
      int token = candidate_id<Wide>(winner);
      if (Sharded) token = min(max(token, 0), p.vocab - 1);  // void results stay in range
      if (blockIdx.x == 0 && lane == 0) p.draft_tokens[static_cast<int64_t>(request) * p.block + step] = token;
      if (!last_step) take_token(request, token, step + 1);
    };
    if constexpr (Sharded) {
      receive_winners(exchange, step, warp, kWarps, p.requests, lane, take_winner);
    } else {
      for (int request = warp; request < p.requests; request += kWarps)
        take_winner(request, await_winner(slots_of(request), gridDim.x, lane));
    }
    __syncthreads();
  }
}

}  // namespace dspark
