// Launches of the kernel of MarkovSampling and MarkovSamplingSharded: from the parameters of a call to the variant that
// serves it.
#pragma once

#include "markov_kernel.cuh"

namespace dspark {

constexpr int kMaxRequests = DSPARK_SAMPLING_REQUESTS;
constexpr int kMaxBlock = DSPARK_SAMPLING_STEPS;

// Empties the slots of candidates ahead of a call.
template <bool Sharded>
__global__ void clear_kernel(uint64_t* values, int count, const void* mailbox, int ranks, int rank) {
  wait_for_predecessor();
  if constexpr (Sharded) {
    release_successor();
    if (blockIdx.x + 1 == gridDim.x) return open_call(mailbox, ranks, rank);
  }
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) values[i] = 0;
}

inline int grid_size(int tiles, int multiprocessors) {
  const int wanted = tiles < multiprocessors ? tiles : multiprocessors;
  return wanted < kMaxGrid ? wanted : kMaxGrid;
}

template <typename T, int Kept, int Groups, bool Wide, bool Sharded>
int launch_chain(Problem p, const DeviceLimits& limits, cudaStream_t stream) {
  const int groups = (p.requests + kGroup - 1) / kGroup;
  const int grid = grid_size(p.tiles, limits.multiprocessors);
  const int fixed = fixed_bytes<Sharded>(groups, p.pieces);
  const int fitting = (limits.shared_bytes - fixed) / slot_bytes(p.pieces);
  if (fixed > limits.shared_bytes || fitting < 1) return DSPARK_BAD_SHAPE;
  const int tiles_per_block = (p.tiles + grid - 1) / grid;
  p.workers = fitting < kWarps ? fitting : kWarps;
  const int spare = fitting - p.workers;
  p.resident_slots = spare < tiles_per_block ? spare : tiles_per_block;
  const int shared = fixed + (p.workers + p.resident_slots) * slot_bytes(p.pieces);
  const int count = p.block * p.requests * grid;
  const unsigned clearing = (count + kThreads - 1) / kThreads;
  // Sharded, one more block begins the call in the mailbox.
  const int status = launch(clear_kernel<Sharded>, {dim3(clearing + Sharded), kThreads}, stream, p.candidates, count,
                            p.mailbox, p.ranks, p.rank);
  if (status) return status;
  LaunchShape shape{dim3(grid), kThreads};
  shape.shared_bytes = shared;
  shape.cooperative = !Sharded;
  return launch(markov_kernel<T, Kept, Groups, Wide, Sharded>, shape, stream, p);
}

// The requests from `first` on, `count` of them.
inline Problem part(Problem p, int first, int count) {
  const int64_t rows = static_cast<int64_t>(first) * p.block;
  p.base_logits += rows * p.rows;
  p.anchor_ids += first;
  if (p.temperature) {
    p.positions += first;
    p.temperature += first;
    p.seeds += 2 * first;
  }
  p.draft_tokens += rows;
  p.features += rows * p.row_bytes;
  if (p.corrected_logits) p.corrected_logits += rows * p.rows;
  p.requests = count;
  return p;
}

template <typename T, bool Wide, bool Sharded>
int sample(const Problem& p, const DeviceLimits& limits, cudaStream_t stream) {
  if constexpr (std::is_same_v<T, float>) {
    // The sums of more than 8 requests don't fit in registers; they go in turns.
    for (int first = 0; first < p.requests; first += kGroup) {
      const int rest = p.requests - first;
      const Problem turn = part(p, first, rest < kGroup ? rest : kGroup);
      const int status = launch_chain<T, 0, 1, Wide, Sharded>(turn, limits, stream);
      if (status) return status;
    }
    return DSPARK_OK;
  } else {
    if (p.requests > kGroup) return launch_chain<T, 0, kMaxRequests / kGroup, Wide, Sharded>(p, limits, stream);
    if constexpr (!Wide) {  // float64 logarithms leave no registers for tiles
      const int needed = fixed_bytes<Sharded>(1, kKeptPieces) + kWarps * slot_bytes(kKeptPieces);
      if (p.row_bytes == kKeptPieces * kPieceBytes && needed <= limits.shared_bytes)
        return launch_chain<T, kKept<Sharded>, 1, Wide, Sharded>(p, limits, stream);
    }
    return launch_chain<T, 0, 1, Wide, Sharded>(p, limits, stream);
  }
}

// What calls of both operations are checked for; `rows` are those of the head table.
template <typename P>
bool supported_sizes(const P* p, int64_t rows) {
  return p->size_requests >= 0 && p->size_requests <= kMaxRequests && rows >= 1 && p->size_V >= 1 &&
         p->size_V <= 1 << 30 && p->size_R >= 16 && p->size_R % 8 == 0 && p->size_R <= 4096 && p->block_size >= 1 &&
         p->block_size <= kMaxBlock && !(p->float64_noise && p->size_V > 1 << kWideIdBits);
}

template <typename P>
size_t candidate_bytes(const P* p, int64_t rows) {
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return sizeof(uint64_t) * p->block_size * p->size_requests * (tiles < kMaxGrid ? tiles : kMaxGrid);
}

template <typename P>
bool aligned_pointers(const P* p) {
  return all_aligned(p->base_logits, p->anchor_ids, p->embed, p->head, p->draft_tokens, p->features, p->workspace) &&
         (!p->sampling || all_aligned(p->positions, p->temperature, p->seeds));
}

// A call on `rows` rows of the head table, of which `valid` are the tokens from `first_id` on; `more` adds what only
// one of the operations has.
template <bool Sharded, typename P, typename F>
int run_sampling(const P* p, int64_t rows, int64_t first_id, int64_t valid, cudaStream_t stream, F&& more) {
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
    problem.candidates = static_cast<uint64_t*>(p->workspace);
    problem.requests = static_cast<int>(p->size_requests);
    problem.vocab = static_cast<int>(p->size_V);
    problem.rows = static_cast<int>(rows);
    problem.valid_rows = static_cast<int>(valid);
    problem.first_id = static_cast<int>(first_id);
    problem.block = p->block_size;
    problem.row_bytes = static_cast<int>(p->size_R * sizeof(T));
    problem.pieces = (problem.row_bytes + kPieceBytes - 1) / kPieceBytes;
    // A rank without tokens still takes part, with one tile.
    problem.tiles = valid > 0 ? static_cast<int>((valid + kTileRows - 1) / kTileRows) : 1;
    more(problem);
    if (p->sampling && p->float64_noise) return sample<T, true, Sharded>(problem, limits, stream);
    return sample<T, false, Sharded>(problem, limits, stream);
  });
}

}  // namespace dspark
