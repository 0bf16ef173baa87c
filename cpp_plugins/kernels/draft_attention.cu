// DraftAttention: every row of a draft block sees the request's ring and the whole block
// (plugins/draft_attention.py).
#include "attention_launch.cuh"

DSPARK_EXPORT size_t dspark_draft_attention_workspace(const dspark_draft_attention_params*) { return 0; }

DSPARK_EXPORT int dspark_draft_attention(const dspark_draft_attention_params* p, cudaStream_t stream) {
  using namespace dspark;
  AttentionProblem problem{};
  if (!make_cache_format(p, &problem.format) || p->size_requests < 0 || p->size_requests > 65535 || p->size_B < 1 ||
      p->size_B > kMaxOwnRows || p->size_N < 1 || p->size_N > 4096 || p->size_S < 1 || p->size_W < 1 ||
      p->size_W > 1 << 20)
    return DSPARK_BAD_SHAPE;
  if (p->size_requests == 0) return DSPARK_OK;
  if (!all_aligned(p->q, p->kv, p->positions, p->slots, p->ring, p->sink, p->attended)) return DSPARK_BAD_POINTER;
  problem.q = p->q;
  problem.own = p->kv;
  problem.positions = static_cast<const int32_t*>(p->positions);
  problem.slots = static_cast<const int32_t*>(p->slots);
  problem.ring = p->ring;
  problem.sink = static_cast<const float*>(p->sink);
  problem.attended = p->attended;
  problem.groups = static_cast<int>(p->size_requests);
  problem.rows = static_cast<int>(p->size_B * p->size_N);
  problem.heads = static_cast<int>(p->size_N);
  problem.window = static_cast<int>(p->size_W);
  problem.own_rows = static_cast<int>(p->size_B);
  problem.ring_rows = static_cast<int>(p->size_W);
  problem.slot_count = p->size_S;
  return attend<true>(problem, p->activation, stream);
}
