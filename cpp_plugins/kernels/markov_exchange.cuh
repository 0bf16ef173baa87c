// How the ranks of a vocabulary split agree on a step's winners: each stores its own with every peer.
//
// A rank's region of the mailbox (mailbox.cuh) ends with words [generation][step][request][source rank] of candidates
// (markov_candidates.cuh), which are never 0, so that a word is its own arrival flag. At the end of a step one warp of
// the rank finds the rank's winner of a request and stores it with all ranks, its own included; every block polls its
// own region for one word of each rank and takes the maximum. That is one peer store and one poll more than a rank
// alone needs.
//
// Calls use two generations in turn. Before the kernel of call t, open_call() clears the words of call t - 1, which
// call t + 1 will use, and turns to those that call t - 1 cleared. A peer stores words of call t + 1 only after it has
// met this rank's last words of call t, which its kernel of call t sent when open_call() had ended: so the words are
// empty by then, whatever the request counts are. A graph that is replayed finds its generation in the region.
//
// A peer that stays silent for the mailbox's timeout is noted in the mailbox's fault word, where all warps that wait
// look; from then on calls neither send nor wait, and their results are void.
#pragma once

#include "mailbox.cuh"
#include "markov_candidates.cuh"

namespace dspark {

// What a block knows of its call, in shared memory.
struct Exchange {
  uint64_t* words[DSPARK_MAX_RANKS];  // of this call in the region of this rank, then of those after it, cyclically
  int32_t* header;
  uint64_t timeout_ns;
  int ranks, rank;
  int silent;  // a peer was given up, or the mailbox was made for others
};

constexpr int kExchangeBytes = (sizeof(Exchange) + 15) / 16 * 16;

__device__ __forceinline__ int exchange_words(int ranks) {
  return DSPARK_SAMPLING_STEPS * DSPARK_SAMPLING_REQUESTS * ranks;
}

__device__ __forceinline__ uint64_t* candidate_words(const void* mailbox, int region, int generation) {
  const int32_t* header = reinterpret_cast<const int32_t*>(mailbox_region(mailbox, 0));
  const int ranks = header[DSPARK_MAILBOX_RANKS];
  const int64_t row_bytes = static_cast<int64_t>(header[DSPARK_MAILBOX_HIDDEN]) * header[DSPARK_MAILBOX_CHANNEL_BYTES];
  const int64_t slots = DSPARK_MAILBOX_GENERATIONS * DSPARK_MAILBOX_ROWS * ranks * row_bytes;
  char* words = mailbox_region(mailbox, region) + DSPARK_MAILBOX_HEADER_BYTES + slots;
  return reinterpret_cast<uint64_t*>(words) + static_cast<int64_t>(generation) * exchange_words(ranks);
}

__device__ __forceinline__ bool made_for(const int32_t* header, int ranks, int rank) {
  return header[DSPARK_MAILBOX_RANKS] == ranks && header[DSPARK_MAILBOX_RANK] == rank;
}

static_assert(DSPARK_SAMPLING_GENERATIONS == 2, "the other generation is 1 minus this one");

// Begins a call; by all threads of one block, in a kernel ahead of the sampling kernel.
__device__ __forceinline__ void open_call(const void* mailbox, int ranks, int rank) {
  int32_t* const header = reinterpret_cast<int32_t*>(mailbox_region(mailbox, 0));
  if (!made_for(header, ranks, rank)) return;
  const int used = *static_cast<volatile int32_t*>(header + DSPARK_MAILBOX_SAMPLING_GENERATION);
  __syncthreads();
  uint64_t* const words = candidate_words(mailbox, 0, used);
  for (int i = threadIdx.x; i < exchange_words(ranks); i += blockDim.x) words[i] = 0;
  if (threadIdx.x == 0) header[DSPARK_MAILBOX_SAMPLING_GENERATION] = 1 - used;
}

// By one warp, after wait_for_predecessor(); the block synchronises before the exchange is used.
__device__ __forceinline__ void open_exchange(Exchange& e, const void* mailbox, int ranks, int rank, int lane) {
  int32_t* const header = reinterpret_cast<int32_t*>(mailbox_region(mailbox, 0));
  const bool fits = made_for(header, ranks, rank);
  const volatile int32_t* state = header;
  if (fits && lane < ranks) e.words[lane] = candidate_words(mailbox, lane, state[DSPARK_MAILBOX_SAMPLING_GENERATION]);
  if (lane != 0) return;
  e.header = header;
  e.timeout_ns = static_cast<uint64_t>(header[DSPARK_MAILBOX_TIMEOUT_MS]) * kMillisecond;
  e.ranks = ranks;
  e.rank = rank;
  e.silent = !fits || state[DSPARK_MAILBOX_FAULT] != 0;
  if (!fits) note_fault(header, DSPARK_MAILBOX_MISFIT);
}

__device__ __forceinline__ bool is_silent(const Exchange& e) { return *static_cast<const volatile int*>(&e.silent); }

__device__ __forceinline__ int64_t word_place(const Exchange& e, int step, int request, int source) {
  return (static_cast<int64_t>(step) * DSPARK_SAMPLING_REQUESTS + request) * e.ranks + source;
}

// Stores this rank's winner with all ranks; by one warp of the rank.
__device__ __forceinline__ void send_winner(const Exchange& e, int step, int request, uint64_t winner, int lane) {
  if (lane < e.ranks && !is_silent(e)) store_system(e.words[lane] + word_place(e, step, request, e.rank), winner);
}

// A rank's winner once it is there; kNothing from one that is given up.
__device__ __forceinline__ uint64_t await_word(Exchange& e, int step, int request, int source) {
  if (is_silent(e)) return kNothing;
  const uint64_t* const address = e.words[0] + word_place(e, step, request, source);
  uint64_t start = 0;
  for (unsigned spins = 1;; ++spins) {
    const uint64_t word = load_system(address);
    if (word != 0) return word;
    if (spins % kSpinsAClock != 0) continue;
    const uint64_t now = nanoseconds();
    if (start == 0) start = now;
    if (now - start > e.timeout_ns) note_fault(e.header, DSPARK_MAILBOX_SILENT_RANK + source);
    if (*static_cast<const volatile int32_t*>(e.header + DSPARK_MAILBOX_FAULT) != 0) {
      *static_cast<volatile int*>(&e.silent) = 1;
      return kNothing;
    }
  }
}

// Hands take(request, winner) the winners of requests first, first + stride, .. among all ranks; by one warp, whose
// lanes poll for different requests and ranks at once.
template <typename Take>
__device__ __forceinline__ void receive_winners(Exchange& e, int step, int first, int stride, int requests, int lane,
                                                Take take) {
  const int ranks = e.ranks, at_once = kWarp / ranks;
  for (; first < requests; first += at_once * stride) {
    const int own = first + lane / ranks * stride;
    uint64_t winner = own < requests ? await_word(e, step, own, lane % ranks) : kNothing;
    __syncwarp();
    for (int offset = 1; offset < ranks; offset *= 2)
      winner = larger(winner, __shfl_xor_sync(0xffffffffu, winner, offset));
    for (int i = 0; i < at_once && first + i * stride < requests; ++i)
      take(first + i * stride, __shfl_sync(0xffffffffu, winner, i * ranks));
  }
}

}  // namespace dspark
