// Which rows go to which expert: the first kernel of RoutedExperts sorts all choices by expert.
//
// A choice is a pair of row and place in the row, numbered row * top_k + place. Sorted, experts ascending and choices
// ascending within one, it gets a position; an expert that is out of range gets none. One thread block per expert
// counts the choices of experts before its own, which gives its first position, and the distinct experts among them,
// which gives its place among the experts that have any; then it writes its own choices in order. Blocks don't talk
// to each other and the order is that of the choices, so nothing depends on timing.
#pragma once

#include "common.cuh"

namespace dspark {

constexpr int kMaxExperts = 1024;
constexpr int kRoutingThreads = 128;
constexpr int kRoutingWarps = kRoutingThreads / kWarp;
constexpr int kRoutingShared = (kMaxExperts / kWarp + 2 * kRoutingWarps) * 4;  // bytes

// An expert with work; count 0 where there are fewer of them than the grid has room for.
struct alignas(16) ExpertWork {
  int32_t expert;
  int32_t first;  // position
  int32_t count;
  int32_t unused;
};

struct Routing {
  const int32_t* indices;  // [choices]
  int32_t* choices_at;     // [choices], position -> choice
  int32_t* positions;      // [choices], choice -> position or -1
  ExpertWork* work;        // [max_work]
  int choices;
  int experts;
  int max_work;
};

// What the thread block of expert `own` does; `shared` has kRoutingShared bytes.
__device__ __forceinline__ void route_expert(const Routing& r, int own, unsigned char* shared) {
  uint32_t* const seen = reinterpret_cast<uint32_t*>(shared);  // a bit for each expert before this one
  int* const totals = reinterpret_cast<int*>(shared) + kMaxExperts / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int i = threadIdx.x; i < kMaxExperts / kWarp; i += kRoutingThreads) seen[i] = 0;
  __syncthreads();
  int before = 0, mine = 0;
  for (int choice = threadIdx.x; choice < r.choices; choice += kRoutingThreads) {
    const int expert = r.indices[choice];
    if (expert < 0 || expert >= r.experts) {
      if (own == 0) r.positions[choice] = -1;
    } else if (expert < own) {
      ++before;
      atomicOr(&seen[expert / kWarp], 1u << expert % kWarp);
    } else if (expert == own) {
      ++mine;
    }
  }
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    before += __shfl_xor_sync(0xffffffffu, before, offset);
    mine += __shfl_xor_sync(0xffffffffu, mine, offset);
  }
  if (lane == 0) totals[warp] = before, totals[kRoutingWarps + warp] = mine;
  __syncthreads();
  int first = 0, count = 0, place = 0;
  for (int i = 0; i < kRoutingWarps; ++i) first += totals[i], count += totals[kRoutingWarps + i];
  for (int i = 0; i <= own / kWarp; ++i) place += __popc(seen[i]);

  if (count > 0 && threadIdx.x == 0) r.work[place] = ExpertWork{own, first, count, 0};
  if (own == r.experts - 1) {
    for (int i = place + (count > 0) + threadIdx.x; i < r.max_work; i += kRoutingThreads)
      r.work[i] = ExpertWork{0, 0, 0, 0};
  }
  if (count == 0) return;
  int position = first;
  for (int base = 0; base < r.choices; base += kRoutingThreads) {
    const int choice = base + threadIdx.x;
    const bool match = choice < r.choices && r.indices[choice] == own;
    const uint32_t matches = __ballot_sync(0xffffffffu, match);
    __syncthreads();  // the totals have been read
    if (lane == 0) totals[warp] = __popc(matches);
    __syncthreads();
    int target = position + __popc(matches & ((1u << lane) - 1));
    for (int i = 0; i < kRoutingWarps; ++i) {
      if (i < warp) target += totals[i];
      position += totals[i];
    }
    if (match) {
      r.choices_at[target] = choice;
      r.positions[choice] = target;
    }
  }
}

}  // namespace dspark
