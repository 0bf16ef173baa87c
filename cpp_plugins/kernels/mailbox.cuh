// The mailbox: how ranks of one node exchange a row of partial sums without a barrier (spec 7.4).
//
// Every rank owns a region that all ranks have mapped: a header of DSPARK_MAILBOX_HEADER_BYTES, then slots
// [generation][source rank][row][channel] of the activation type, then what markov_exchange.cuh tells. A slot that
// holds the sentinel -0.0 is empty, so a value is its own arrival flag: the publisher turns -0.0 into +0.0 and stores
// its row in every peer's region; the consumer spins on its own region until no channel is the sentinel, and then
// writes the sentinel back. Calls use the generations in turn. A rank enters call t+1 only after it has consumed call
// t, which needs every peer's call t, which each peer began after clearing call t-1: so a slot is empty again
// long before its generation comes round, whatever the row counts are, and nothing else has to be ordered.
//
// The mailbox tensor holds the mapped addresses of this rank's region, then of the ranks after it, cyclically
// (two 32-bit halves each, low first). All calls of a rank are made on one stream, in the same order on every
// rank. A peer that stays silent for the header's timeout is noted in the header's fault word; from then on
// calls neither publish nor wait, and their results are void: whoever owns the mailbox reads that word.
#pragma once

#include "mhc.cuh"

namespace dspark {

__device__ __forceinline__ uint4 load_volatile(const void* address) {
  uint4 bits;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address)
               : "memory");
  return bits;
}

__device__ __forceinline__ void store_volatile(void* address, const uint4& bits) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(bits.x), "r"(bits.y),
               "r"(bits.z), "r"(bits.w)
               : "memory");
}

// The mapped address of a rank's region: 0 is this rank's, i that of the i-th rank after it.
__device__ __forceinline__ char* mailbox_region(const void* tensor, int i) {
  const uint2 halves = static_cast<const uint2*>(tensor)[i];
  return reinterpret_cast<char*>(static_cast<uint64_t>(halves.y) << 32 | halves.x);
}

constexpr unsigned kSpinsAClock = 256;      // looks at a slot for one at the clock
constexpr unsigned kMillisecond = 1000000;  // in nanoseconds

// The first fault stays.
__device__ __forceinline__ void note_fault(int32_t* header, int fault) {
  atomicCAS(header + DSPARK_MAILBOX_FAULT, 0, fault);
}

// -0.0 in every channel of 32 bits.
template <typename T>
constexpr uint32_t kSentinel = sizeof(T) == 4 ? 0x80000000u : 0x80008000u;

// All ones in every channel of `bits` that holds the sentinel.
template <typename T>
__device__ __forceinline__ uint32_t sentinels(uint32_t bits) {
  if constexpr (sizeof(T) == 4) return bits == kSentinel<T> ? 0xffffffffu : 0u;
  return __vcmpeq2(bits, kSentinel<T>);
}

template <typename T>
__device__ __forceinline__ uint4 without_sentinels(const uint4& v) {
  return make_uint4(v.x & ~sentinels<T>(v.x), v.y & ~sentinels<T>(v.y), v.z & ~sentinels<T>(v.z),
                    v.w & ~sentinels<T>(v.w));
}

template <typename T>
__device__ __forceinline__ bool has_sentinel(const uint4& v) {
  return (sentinels<T>(v.x) | sentinels<T>(v.y) | sentinels<T>(v.z) | sentinels<T>(v.w)) != 0;
}

template <typename T, int kRanks>
class Mailbox {
 public:
  // Reads what never changes; may come before wait_for_predecessor().
  __device__ __forceinline__ Mailbox(const void* tensor, int width) : width_(width) {
#pragma unroll
    for (int i = 0; i < kRanks; ++i) regions_[i] = mailbox_region(tensor, i);
    static_assert(DSPARK_MAILBOX_RANK == 0 && DSPARK_MAILBOX_RANKS == 1 && DSPARK_MAILBOX_HIDDEN == 2 &&
                      DSPARK_MAILBOX_CHANNEL_BYTES == 3,
                  "read at once");
    const int4 constants = *reinterpret_cast<const int4*>(header());
    timeout_ns_ = static_cast<uint64_t>(header()[DSPARK_MAILBOX_TIMEOUT_MS]) * kMillisecond;
    rank_ = constants.x;
    fits_ = (constants.y == kRanks) & (constants.z == width) & (constants.w == static_cast<int>(sizeof(T)));
  }

  // Reads what the call before left; after wait_for_predecessor().
  __device__ __forceinline__ void open() {
    const uint4 state = load_volatile(header() + DSPARK_MAILBOX_GENERATION);
    generation_ = static_cast<int>(state.x);
    silent_ = state.y != 0;
    if (!fits_ && !silent_) {
      note(DSPARK_MAILBOX_MISFIT);
      silent_ = true;
    }
  }

  // Stores this rank's part of a row with every peer.
  __device__ __forceinline__ void publish(const Pack<T>& part, int64_t row, int column) const {
    if (silent_) return;
#pragma unroll
    for (int v = 0; v < Pack<T>::kVectors; ++v) {
      const uint4 bits = without_sentinels<T>(as_bits(part, v));
#pragma unroll
      for (int i = 1; i < kRanks; ++i) store_volatile(slot(i, rank_, row, column) + v * Vector<T>::kSize, bits);
    }
  }

  // The sum over all ranks of their parts of a row, in rank order, rounded once; empties the slots.
  __device__ __forceinline__ Pack<T> collect(const Pack<T>& own, int64_t row, int column) {
    Pack<T> sum;
#pragma unroll
    for (int v = 0; v < Pack<T>::kVectors; ++v) {
      const int place = column + v * Vector<T>::kSize;
      uint4 parts[kRanks];
#pragma unroll
      for (int r = 0; r < kRanks; ++r) parts[r] = without_sentinels<T>(as_bits(own, v));
      wait(parts, row, place);
#pragma unroll
      for (int i = 0; i < Vector<T>::kSize; ++i) {
        float total = to_float(channel(parts[0], i));
#pragma unroll
        for (int r = 1; r < kRanks; ++r) total = __fadd_rn(total, to_float(channel(parts[r], i)));
        sum.vectors[v].values[i] = from_float<T>(total);
      }
      const uint4 empty = make_uint4(kSentinel<T>, kSentinel<T>, kSentinel<T>, kSentinel<T>);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r != rank_ && !silent_) store_volatile(slot(0, r, row, place), empty);
      }
    }
    return sum;
  }

  // Counts a block of the grid's `blocks` once all its threads have opened the mailbox; returns how many came before.
  __device__ __forceinline__ unsigned arrive(unsigned blocks) const {
    return atomicInc(reinterpret_cast<unsigned*>(header() + DSPARK_MAILBOX_ARRIVED), blocks - 1);
  }

  // The block that arrived last moves on to the next generation; the counter has wrapped to 0 by itself.
  __device__ __forceinline__ void advance(unsigned arrived, unsigned blocks) const {
    if (arrived != blocks - 1) return;
    header()[DSPARK_MAILBOX_GENERATION] = generation_ + 1 == DSPARK_MAILBOX_GENERATIONS ? 0 : generation_ + 1;
  }

 private:
  __device__ __forceinline__ int32_t* header() const { return reinterpret_cast<int32_t*>(regions_[0]); }

  __device__ __forceinline__ T* slot(int region, int source, int64_t row, int column) const {
    const int64_t place = (static_cast<int64_t>(generation_ * kRanks + source) * DSPARK_MAILBOX_ROWS + row) * width_;
    return reinterpret_cast<T*>(regions_[region] + DSPARK_MAILBOX_HEADER_BYTES) + place + column;
  }

  // Spins until every other rank's part is here.
  __device__ __forceinline__ void wait(uint4 (&parts)[kRanks], int64_t row, int place) {
    uint64_t start = 0;
    for (unsigned spins = 1; !silent_; ++spins) {
      int missing = -1;
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        if (r == rank_) continue;
        parts[r] = load_volatile(slot(0, r, row, place));
        if (has_sentinel<T>(parts[r])) missing = r;
      }
      if (missing < 0) return;
      if (spins % kSpinsAClock == 0) {
        const uint64_t now = nanoseconds();
        if (start == 0) start = now;
        if (now - start > timeout_ns_) {
          note(DSPARK_MAILBOX_SILENT_RANK + missing);
          silent_ = true;
        }
      }
    }
  }

  __device__ __forceinline__ void note(int fault) const { note_fault(header(), fault); }

  static __device__ __forceinline__ uint4 as_bits(const Pack<T>& pack, int v) {
    return *reinterpret_cast<const uint4*>(&pack.vectors[v]);
  }
  static __device__ __forceinline__ T channel(const uint4& bits, int i) {
    return reinterpret_cast<const Vector<T>*>(&bits)->values[i];
  }

  char* regions_[kRanks];
  uint64_t timeout_ns_;
  int width_, rank_, generation_ = 0;
  bool fits_, silent_ = false;
};

// One rank: nothing to exchange.
template <typename T>
class Mailbox<T, 1> {
 public:
  __device__ __forceinline__ Mailbox(const void*, int) {}
  __device__ __forceinline__ void open() {}
  __device__ __forceinline__ void publish(const Pack<T>&, int64_t, int) const {}
  __device__ __forceinline__ Pack<T> collect(const Pack<T>& own, int64_t, int) { return own; }
  __device__ __forceinline__ unsigned arrive(unsigned) const { return 0; }
  __device__ __forceinline__ void advance(unsigned, unsigned) const {}
};

}  // namespace dspark
