// ContextKvInsert: rows become entries of a ring cache, in place (plugins/context_kv_insert.py).
//
// One warp per row. Which rows stay depends on the newest position that the call carries for the row's slot, so
// every block looks through all (slot, position) pairs of the call, once for its eight rows together; no block
// waits for another, and the result is the same whatever their order.
#include "attention.cuh"

namespace dspark {
namespace {

constexpr int kRows = 8;  // of a block, one per warp
constexpr int kThreads = kRows * kWarp;

struct Problem {
  const void* kv;
  const int32_t* positions;
  const int32_t* slots;
  void* ring;
  int rows;
  int64_t slot_count;
  int64_t window;
  CacheFormat format;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) context_kv_insert_kernel(const __grid_constant__ Problem p) {
  constexpr int kSize = Vector<T>::kSize, kPieces = kMaxHeadDim / (kWarp * kSize);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first = blockIdx.x * kRows, row = first + warp;
  int* const newest_seen = reinterpret_cast<int*>(dynamic_shared());  // [row][warp]
  float2* const turns = reinterpret_cast<float2*>(newest_seen + kRows * kRows) + warp * p.format.pairs;

  wait_for_predecessor();
  release_successor();
  // All that doesn't depend on a loaded value is loaded at once.
  Vector<T> pieces[kPieces] = {};
  int slot = -1, position = 0;
  if (row < p.rows) {
    slot = p.slots[row];
    position = p.positions[row];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int channel = (i * kWarp + lane) * kSize;
      if (channel < p.format.head_dim)
        pieces[i] = load(static_cast<const T*>(p.kv) + static_cast<int64_t>(row) * p.format.head_dim + channel);
    }
  }
  int mine[kRows], newest[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mine[r] = first + r < p.rows ? p.slots[first + r] : -1;
    newest[r] = INT32_MIN;
  }
  for (int other = threadIdx.x; other < p.rows; other += kThreads) {
    const int its_slot = p.slots[other], its_position = p.positions[other];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (its_slot == mine[r]) newest[r] = max(newest[r], its_position);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      newest[r] = max(newest[r], __shfl_xor_sync(0xffffffffu, newest[r], offset));
    if (lane == 0) newest_seen[r * kRows + warp] = newest[r];
  }
  for (int i = lane; i < p.format.pairs; i += kWarp) turns[i] = rotation(position, p.format.frequencies[i]);
  __syncthreads();

  if (slot < 0 || slot >= p.slot_count) return;
  int last = INT32_MIN;
#pragma unroll
  for (int i = 0; i < kRows; ++i) last = max(last, newest_seen[warp * kRows + i]);
  if (position <= last - p.window) return;
  const int64_t place = (position % p.window + p.window) % p.window;
  T* const target = static_cast<T*>(p.ring) + (slot * p.window + place) * p.format.head_dim;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) {
    const int channel = (i * kWarp + lane) * kSize;
    if (i * kWarp * kSize >= p.format.head_dim) break;
    if (channel < p.format.head_dim) rotate_piece(pieces[i], channel, p.format, turns);
    round_piece(pieces[i], channel, p.format);
    if (channel < p.format.head_dim) store(target + channel, pieces[i]);
  }
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_context_kv_insert_workspace(const dspark_context_kv_insert_params*) { return 0; }

DSPARK_EXPORT int dspark_context_kv_insert(const dspark_context_kv_insert_params* p, cudaStream_t stream) {
  using namespace dspark;
  Problem problem{};
  if (!make_cache_format(p, &problem.format) || p->size_rows < 0 || p->size_rows > 1 << 20 || p->size_S < 1 ||
      p->size_W < 1)
    return DSPARK_BAD_SHAPE;
  if (p->size_rows == 0) return p->ring_out == p->ring ? DSPARK_OK : DSPARK_BAD_POINTER;
  if (!all_aligned(p->kv, p->positions, p->slots, p->ring) || p->ring_out != p->ring) return DSPARK_BAD_POINTER;
  problem.kv = p->kv;
  problem.positions = static_cast<const int32_t*>(p->positions);
  problem.slots = static_cast<const int32_t*>(p->slots);
  problem.ring = p->ring_out;
  problem.rows = static_cast<int>(p->size_rows);
  problem.slot_count = p->size_S;
  problem.window = p->size_W;
  return dispatch_activation(p->activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    LaunchShape shape{dim3((problem.rows + kRows - 1) / kRows), kThreads};
    shape.shared_bytes = kRows * (kRows * sizeof(int) + problem.format.pairs * sizeof(float2));
    return launch(context_kv_insert_kernel<T>, shape, stream, problem);
  });
}
