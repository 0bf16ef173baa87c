// MarkovSampling: the sequential loop of a draft (plugins/markov_sampling.py) as one persistent kernel.
//
// The cost is reading W2 [V, R] once a step. Blocks, one a multiprocessor, own fixed ranges of it, in tiles of
// 16 vocabulary rows that go round the block's warps, so what a block has read it can keep: tiles in registers
// (kKept a warp), tiles in shared memory, and only the rest is streamed again in each step, through one shared
// memory slot a warp. Every thread copies exactly the bytes that it will multiply, so tiles need no barrier.
//
// A tile is the A operand (16 rows) of mma.m16n8k16, up to 8 requests are its B operand. The order of channels
// inside a product is free, so a thread's 16-byte piece of a row serves two instructions as it is: in a 64-byte
// piece of a row, lane (g, t) holds bytes 16 t .. 16 t + 15 of rows g and g + 8, and likewise of request g's
// feature row. One request alone takes the same path as eight: a request's logits don't depend on the others.
//
// A step ends with every block's best candidate of every request in global memory. A candidate packs the score
// (as an ordered integer) over the inverted id, so that the maximum is the winner and a tie goes to the lowest
// id, and it is never 0. Slots start as 0 and are written once: a block polls them and needs no other signal,
// then finds the winner for itself. All blocks must run at once, which the cooperative launch guarantees.
// With float64 noise the score has 44 bits of the word, to which it was rounded, and the id 20.
#include "device.cuh"
#include "gumbel.cuh"

namespace dspark {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileRows = 16;
constexpr int kGroup = 8;         // requests of one matrix instruction
constexpr int kPieceBytes = 64;   // of a row: four lanes with 16 bytes each
constexpr int kMaxRequests = 64;
constexpr int kMaxBlock = 8;
constexpr int kMaxGrid = 192;
constexpr int kKept = 3;          // tiles that a warp keeps in registers,
constexpr int kKeptPieces = 8;    // for rows of this many pieces
constexpr int kWideIdBits = 20;   // of a candidate with a float64 score
constexpr uint64_t kWideIdMask = (1u << kWideIdBits) - 1;

struct Problem {
  const float* base_logits;
  const int32_t* anchor_ids;
  const unsigned char* embed;
  const unsigned char* head;
  const int32_t* positions;  // with `temperature` and `seeds`, or null
  const float* temperature;
  const int32_t* seeds;
  int32_t* draft_tokens;
  unsigned char* features;
  float* corrected_logits;  // or null
  uint64_t* candidates;     // [block, requests, blocks of the grid]
  int requests;
  int vocab;
  int block;
  int row_bytes;
  int pieces;          // of a row, the last one may be partly beyond it
  int tiles;
  int workers;         // warps that process tiles
  int resident_slots;  // shared memory slots beside the workers' own
};

__host__ __device__ constexpr int slot_bytes(int pieces) { return kTileRows * kPieceBytes * pieces; }
__host__ __device__ constexpr int feature_bytes(int groups, int pieces) { return groups * kGroup * kPieceBytes * pieces; }
// Best candidate of each warp, key and temperature of each request.
__host__ __device__ constexpr int scratch_bytes(int groups) { return groups * kGroup * (kWarps * 8 + 4 + 4); }

// Partial products of a tile and a group of requests, in four chains of instructions that don't wait for each other.
template <typename T>
struct Products {
  float chains[4][4] = {};

  template <int kPair>
  __device__ __forceinline__ void add(const uint4& upper, const uint4& lower, const uint4* features, int lane, int) {
    const uint4 f = features[lane];
    multiply_add<T>(chains[2 * kPair], upper.x, lower.x, upper.y, lower.y, f.x, f.y);
    multiply_add<T>(chains[2 * kPair + 1], upper.z, lower.z, upper.w, lower.w, f.z, f.w);
  }

  // bias[2 h + c]: row g + 8 h, request 2 t + c.
  __device__ __forceinline__ void finish(float (&bias)[4], int) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }
};

template <>
struct Products<float> {
  float sums[kGroup][2] = {};

  template <int>
  __device__ __forceinline__ void add(const uint4& upper, const uint4& lower, const uint4* features, int lane,
                                      int requests) {
#pragma unroll
    for (int request = 0; request < kGroup; ++request) {
      if (request >= requests) break;
      const uint4 f = features[request * 4 + lane % 4];
      sums[request][0] = dot(upper, f, sums[request][0]);
      sums[request][1] = dot(lower, f, sums[request][1]);
    }
  }

  __device__ __forceinline__ void finish(float (&bias)[4], int lane) {
#pragma unroll
    for (int request = 0; request < kGroup; ++request) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = sums[request][h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (request / 2 == lane % 4) bias[2 * h + request % 2] = sum;
      }
    }
  }

  __device__ __forceinline__ static float dot(const uint4& a, const uint4& b, float sum) {
    sum = fmaf(__uint_as_float(a.x), __uint_as_float(b.x), sum);
    sum = fmaf(__uint_as_float(a.y), __uint_as_float(b.y), sum);
    sum = fmaf(__uint_as_float(a.z), __uint_as_float(b.z), sum);
    return fmaf(__uint_as_float(a.w), __uint_as_float(b.w), sum);
  }
};

// Scores are sums that began at +0, so none is -0 and would lose to 0 here.
__device__ __forceinline__ uint64_t pack_candidate(float score, int id) {
  if (score != score) score = -INFINITY;
  const uint32_t bits = __float_as_uint(score);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~id);
}

// A score whose last 20 bits are clear, so the words of two candidates compare as their scores do.
__device__ __forceinline__ uint64_t pack_candidate(double score, int id) {
  if (score != score) score = -INFINITY;
  const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(score));
  const uint64_t ordered = bits >> 63 ? ~bits : bits | 1ull << 63;
  return (ordered & ~kWideIdMask) | (~static_cast<uint64_t>(id) & kWideIdMask);
}

template <bool Wide>
__device__ __forceinline__ int candidate_id(uint64_t candidate) {
  return static_cast<int>(Wide ? ~candidate & kWideIdMask : ~static_cast<uint32_t>(candidate));
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

template <int kFirst>
__device__ __forceinline__ uint64_t lanes_max(uint64_t value) {
#pragma unroll
  for (int offset = kFirst; offset < kWarp; offset *= 2) value = larger(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The best of all blocks' candidates, once they are there; each lane polls every 32nd slot.
__device__ __forceinline__ uint64_t await_winner(const uint64_t* slots, int count, int lane) {
  uint64_t winner = 0;
  uint64_t found[kMaxGrid / kWarp] = {};
  bool waiting = true;
  while (waiting) {
    waiting = false;
#pragma unroll
    for (int i = 0; i < kMaxGrid / kWarp; ++i) {
      const int slot = lane + i * kWarp;
      if (slot < count && found[i] == 0) found[i] = load_relaxed(slots + slot);
    }
#pragma unroll
    for (int i = 0; i < kMaxGrid / kWarp; ++i) waiting |= lane + i * kWarp < count && found[i] == 0;
  }
#pragma unroll
  for (int i = 0; i < kMaxGrid / kWarp; ++i) winner = larger(winner, found[i]);
  return lanes_max<1>(winner);
}

template <typename T, int Kept, int Groups, bool Wide>
__global__ void __launch_bounds__(kThreads, 1) markov_kernel(const __grid_constant__ Problem p) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int g = lane / 4, t = lane % 4;
  const int groups = Groups == 1 ? 1 : (p.requests + kGroup - 1) / kGroup;
  const int pieces = Kept ? kKeptPieces : p.pieces;
  const int workers = Kept ? kWarps : p.workers;

  uint4* const features = reinterpret_cast<uint4*>(dynamic_shared());
  unsigned char* const slots = dynamic_shared() + feature_bytes(groups, pieces);
  uint64_t* const warp_best = reinterpret_cast<uint64_t*>(slots + (workers + p.resident_slots) * slot_bytes(pieces));
  uint32_t* const noise_key = reinterpret_cast<uint32_t*>(warp_best + kWarps * groups * kGroup);
  float* const temperature = reinterpret_cast<float*>(noise_key + groups * kGroup);

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
    const int row = min((first + tile) * kTileRows + g + 8 * half, p.vocab - 1);
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
    const int id = min((first + tile) * kTileRows + (g ? kTileRows - 1 : 0), p.vocab - 1);
#pragma unroll
    for (int group = 0; group < Groups; ++group) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int request = group * kGroup + 2 * t + c;
        if (request < p.requests)
          prefetch_l2(p.base_logits + (static_cast<int64_t>(request) * p.block + step) * p.vocab + id);
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
  for (int tile = warp; works && tile < count; tile += workers) prefetch_base(tile, 0);

  // One warp a request: fetch the token's feature row, lay it out as the B operand, and hand it out.
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
      noise_key[request] = gumbel_key(seed[0], seed[1], p.positions[request], step, kDraftSalt);
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
          const int request = group * kGroup + 2 * t + i % 2, id = top_row + i / 2 * 8;
          base[i] = 0.0f;
          if (request < p.requests && id < p.vocab)
            base[i] = p.base_logits[(static_cast<int64_t>(request) * p.block + step) * p.vocab + id];
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
              products[group].template add<decltype(pair)::value>(upper, lower, features + (group * pieces + piece) * kWarp,
                                                                  lane, p.requests - group * kGroup);
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
          const int request = group * kGroup + 2 * t + i % 2, id = top_row + i / 2 * 8;
          if (request >= p.requests || id >= p.vocab) continue;
          const float logit = base[i] + bias[i];
          if (p.corrected_logits)
            p.corrected_logits[(static_cast<int64_t>(request) * p.block + step) * p.vocab + id] = logit;
          uint64_t candidate;
          if constexpr (Wide) {
            candidate = pack_candidate(wide_score(logit, temperature[request], noise_key[request], id), id);
          } else {
            float score = logit;
            if (p.temperature && temperature[request] > 0.0f)
              score = __fadd_rn(__fdiv_rn(logit, fmaxf(temperature[request], 1e-5f)), gumbel_noise(noise_key[request], id));
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
    for (int request = warp; request < p.requests; request += kWarps) {
      uint64_t* const slot = p.candidates + (static_cast<int64_t>(step) * p.requests + request) * gridDim.x;
      const uint64_t mine = lanes_max<1>(lane < kWarps ? warp_best[request * kWarps + lane] : 0);
      if (lane == 0) store_relaxed(slot + blockIdx.x, mine);
    }
    if (last_step && blockIdx.x != 0) return;
    for (int request = warp; request < p.requests; request += kWarps) {
      const uint64_t* const slot = p.candidates + (static_cast<int64_t>(step) * p.requests + request) * gridDim.x;
      const int token = candidate_id<Wide>(await_winner(slot, gridDim.x, lane));
      if (blockIdx.x == 0 && lane == 0) p.draft_tokens[static_cast<int64_t>(request) * p.block + step] = token;
      if (!last_step) take_token(request, token, step + 1);
    }
    __syncthreads();
  }
}

__global__ void clear_kernel(uint64_t* values, int count) {
  wait_for_predecessor();
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) values[i] = 0;
}

int grid_size(int tiles, int multiprocessors) {
  const int wanted = tiles < multiprocessors ? tiles : multiprocessors;
  return wanted < kMaxGrid ? wanted : kMaxGrid;
}

template <typename T, int Kept, int Groups, bool Wide>
int launch_chain(Problem p, const DeviceLimits& limits, cudaStream_t stream) {
  const int groups = (p.requests + kGroup - 1) / kGroup;
  const int grid = grid_size(p.tiles, limits.multiprocessors);
  const int fixed = feature_bytes(groups, p.pieces) + scratch_bytes(groups);
  const int fitting = (limits.shared_bytes - fixed) / slot_bytes(p.pieces);
  if (fixed > limits.shared_bytes || fitting < 1) return DSPARK_BAD_SHAPE;
  const int tiles_per_block = (p.tiles + grid - 1) / grid;
  p.workers = fitting < kWarps ? fitting : kWarps;
  const int spare = fitting - p.workers;
  p.resident_slots = spare < tiles_per_block ? spare : tiles_per_block;
  const int shared = fixed + (p.workers + p.resident_slots) * slot_bytes(p.pieces);
  const int count = p.block * p.requests * grid;
  LaunchShape shape{dim3((count + kThreads - 1) / kThreads), kThreads};
  const int status = launch(clear_kernel, shape, stream, p.candidates, count);
  if (status) return status;
  shape.grid = dim3(grid);
  shape.shared_bytes = shared;
  shape.cooperative = true;
  return launch(markov_kernel<T, Kept, Groups, Wide>, shape, stream, p);
}

// The requests from `first` on, `count` of them.
Problem part(Problem p, int first, int count) {
  const int64_t rows = static_cast<int64_t>(first) * p.block;
  p.base_logits += rows * p.vocab;
  p.anchor_ids += first;
  if (p.temperature) {
    p.positions += first;
    p.temperature += first;
    p.seeds += 2 * first;
  }
  p.draft_tokens += rows;
  p.features += rows * p.row_bytes;
  if (p.corrected_logits) p.corrected_logits += rows * p.vocab;
  p.requests = count;
  return p;
}

template <typename T, bool Wide>
int sample(const Problem& p, const DeviceLimits& limits, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    // The sums of more than 8 requests don't fit in registers; they go in turns.
    for (int first = 0; first < p.requests; first += kGroup) {
      const int rest = p.requests - first;
      const int status = launch_chain<T, 0, 1, Wide>(part(p, first, rest < kGroup ? rest : kGroup), limits, stream);
      if (status) return status;
    }
    return DSPARK_OK;
  } else {
    if (p.requests > kGroup) return launch_chain<T, 0, kMaxRequests / kGroup, Wide>(p, limits, stream);
    if constexpr (!Wide) {  // float64 logarithms leave no registers for tiles
      const int needed = feature_bytes(1, kKeptPieces) + scratch_bytes(1) + kWarps * slot_bytes(kKeptPieces);
      if (p.row_bytes == kKeptPieces * kPieceBytes && needed <= limits.shared_bytes)
        return launch_chain<T, kKept, 1, Wide>(p, limits, stream);
    }
    return launch_chain<T, 0, 1, Wide>(p, limits, stream);
  }
}

bool supported(const dspark_markov_sampling_params* p) {
  return p->size_requests >= 0 && p->size_requests <= kMaxRequests && p->size_V >= 1 && p->size_V <= 1 << 30 &&
         p->size_R >= 16 && p->size_R % 8 == 0 && p->size_R <= 4096 && p->block_size >= 1 &&
         p->block_size <= kMaxBlock && !(p->float64_noise && p->size_V > 1 << kWideIdBits);
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_markov_sampling_workspace(const dspark_markov_sampling_params* p) {
  using namespace dspark;
  if (!supported(p)) return 0;
  const int64_t tiles = (p->size_V + kTileRows - 1) / kTileRows;
  return sizeof(uint64_t) * p->block_size * p->size_requests * (tiles < kMaxGrid ? tiles : kMaxGrid);
}

DSPARK_EXPORT int dspark_markov_sampling(const dspark_markov_sampling_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (!supported(p)) return DSPARK_BAD_SHAPE;
  if (p->size_requests == 0) return DSPARK_OK;
  if (!all_aligned(p->base_logits, p->anchor_ids, p->embed, p->head, p->draft_tokens, p->features, p->workspace) ||
      (p->sampling && !all_aligned(p->positions, p->temperature, p->seeds)) ||
      (p->write_logits && !all_aligned(p->corrected_logits)))
    return DSPARK_BAD_POINTER;
  DeviceLimits limits;
  if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    Problem problem{};
    problem.base_logits = static_cast<const float*>(p->base_logits);
    problem.anchor_ids = static_cast<const int32_t*>(p->anchor_ids);
    problem.embed = static_cast<const unsigned char*>(p->embed);
    problem.head = static_cast<const unsigned char*>(p->head);
    if (p->sampling) {
      problem.positions = static_cast<const int32_t*>(p->positions);
      problem.temperature = static_cast<const float*>(p->temperature);
      problem.seeds = static_cast<const int32_t*>(p->seeds);
    }
    problem.draft_tokens = static_cast<int32_t*>(p->draft_tokens);
    problem.features = static_cast<unsigned char*>(p->features);
    if (p->write_logits) problem.corrected_logits = static_cast<float*>(p->corrected_logits);
    problem.candidates = static_cast<uint64_t*>(p->workspace);
    problem.requests = static_cast<int>(p->size_requests);
    problem.vocab = static_cast<int>(p->size_V);
    problem.block = p->block_size;
    problem.row_bytes = static_cast<int>(p->size_R * sizeof(T));
    problem.pieces = (problem.row_bytes + kPieceBytes - 1) / kPieceBytes;
    problem.tiles = (problem.vocab + kTileRows - 1) / kTileRows;
    if (p->sampling && p->float64_noise) return sample<T, true>(problem, limits, stream);
    return sample<T, false>(problem, limits, stream);
  });
}
