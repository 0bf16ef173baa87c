// TargetAttention: a row sees the window of positions that ends with its own, read from the ring in position order
// (plugins/target_attention.py).
#include "attention_launch.cuh"

DSPARK_EXPORT size_t dspark_target_attention_workspace(const dspark_target_attention_params*) { return 0; }

DSPARK_EXPORT int dspark_target_attention(const dspark_target_attention_params* p, cudaStream_t stream) {
  using namespace dspark;
  AttentionProblem problem{};
  if (!make_cache_format(p, &problem.format) || p->size_rows < 0 || p->size_rows > 65535 || p->size_N < 1 ||
      p->size_N > 4096 || p->size_S < 1 || p->size_W < 1 || p->size_W > 1 << 30 || p->window < 1 ||
      p->window > p->size_W)
    return DSPARK_BAD_SHAPE;
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->q, p->positions, p->slots, p->ring, p->sink, p->attended)) return DSPARK_BAD_POINTER;
  problem.q = p->q;
  problem.positions = static_cast<const int32_t*>(p->positions);
  problem.slots = static_cast<const int32_t*>(p->slots);
  problem.ring = p->ring;
  problem.sink = static_cast<const float*>(p->sink);
  problem.attended = p->attended;
  problem.groups = static_cast<int>(p->size_rows);
  problem.rows = static_cast<int>(p->size_N);
  problem.heads = static_cast<int>(p->size_N);
  problem.window = p->window;
  problem.ring_rows = static_cast<int>(p->size_W);
  problem.slot_count = p->size_S;
  return attend<false>(problem, p->activation, stream);
}
