// What the attention kernels share: the problem, and which ring rows are a group's keys.
#pragma once

#include "attention.cuh"

namespace dspark {
namespace {

constexpr int kKeyBlock = 64;  // keys that share one running maximum; part of the rounding order
constexpr int kMaxOwnRows = 16;

// A group of query rows shares its keys: all rows of a request's block (draft) or all heads of a row (target).
struct AttentionProblem {
  const void* q;             // [groups, rows, head_dim]
  const void* own;           // [groups, own_rows, head_dim], not rotated, not rounded
  const int32_t* positions;  // [groups], of the first row
  const int32_t* slots;      // [groups]
  const void* ring;          // [slot_count, ring_rows, head_dim]
  const float* sink;         // [heads]
  void* attended;            // as q
  int groups;
  int rows;  // of a group: positions of the group times heads
  int heads;
  int window;    // ring entries that count
  int own_rows;  // keys after them; 0 without kOwn
  int ring_rows;
  int64_t slot_count;
  float scale;
  CacheFormat format;
};

// The keys of a group, numbered as the reference orders them: window ring entries, then the block's own rows. With kOwn
// the window is the ring as it lies and entry i is valid where i < position; without, entry i is
// position - window + 1 + i, wherever the ring keeps that, and valid where that is a position.
template <bool kOwn>
struct Keys {
  int count;  // with those that are not valid
  int window;
  int lower, upper;  // valid ring entries
  int position, ring_rows;

  __device__ __forceinline__ Keys(const AttentionProblem& p, int first_position)
      : count(p.window + (kOwn ? p.own_rows : 0)),
        window(p.window),
        position(max(first_position, -1)),
        ring_rows(p.ring_rows) {
    lower = kOwn ? 0 : max(window - 1 - position, 0);
    upper = kOwn ? min(position, window) : window;
  }

  // With & and |, which don't branch.
  __device__ __forceinline__ bool own(int i) const { return kOwn & (i >= window) & (i < count); }
  __device__ __forceinline__ bool in_ring(int i) const { return (kOwn | (i >= lower)) & (i < upper); }
  __device__ __forceinline__ bool valid(int i) const { return in_ring(i) | own(i); }
  // Row of the slot's ring, for valid entries of the ring.
  __device__ __forceinline__ int ring_row(int i) const { return kOwn ? i : (position - window + 1 + i) % ring_rows; }
};

}  // namespace
}  // namespace dspark
