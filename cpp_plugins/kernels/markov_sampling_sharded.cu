// MarkovSamplingSharded: the loop of MarkovSampling on a rank's part of the vocabulary
// (plugins/markov_sampling_sharded.py), see markov_kernel.cuh and markov_exchange.cuh.
#include "markov_launch.cuh"

namespace dspark {
namespace {

// Tokens of a rank, and how many of them are this one's.
int64_t share_of(const dspark_markov_sampling_sharded_params* p) { return (p->size_V + p->tp_size - 1) / p->tp_size; }

int64_t tokens_of(const dspark_markov_sampling_sharded_params* p) {
  const int64_t rest = p->size_V - p->rank * share_of(p);
  return rest < 0 ? 0 : rest < share_of(p) ? rest : share_of(p);
}

bool supported(const dspark_markov_sampling_sharded_params* p) {
  const int ranks = p->tp_size;
  if (ranks != 1 && ranks != 2 && ranks != 4 && ranks != 8) return false;
  return supported_sizes(p, p->size_L) && p->rank >= 0 && p->rank < ranks && (ranks == 1 || p->size_P == ranks) &&
         p->size_L >= tokens_of(p) && p->size_L <= share_of(p);
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_markov_sampling_sharded_workspace(const dspark_markov_sampling_sharded_params* p) {
  using namespace dspark;
  return supported(p) ? candidate_bytes(p, p->size_L) : 0;
}

DSPARK_EXPORT int dspark_markov_sampling_sharded(const dspark_markov_sampling_sharded_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (!supported(p)) return DSPARK_BAD_SHAPE;
  if (p->size_requests == 0) return DSPARK_OK;
  if (!aligned_pointers(p) || (p->tp_size > 1 && !aligned(p->mailbox))) return DSPARK_BAD_POINTER;
  if (p->tp_size == 1) {
    // The whole loop, which the other operation holds.
    dspark_markov_sampling_params whole = {};
    whole.activation = p->activation;
    whole.base_logits = p->base_logits;
    whole.anchor_ids = p->anchor_ids;
    whole.embed = p->embed;
    whole.head = p->head;
    whole.positions = p->positions;
    whole.temperature = p->temperature;
    whole.seeds = p->seeds;
    whole.draft_tokens = p->draft_tokens;
    whole.features = p->features;
    whole.workspace = p->workspace;
    whole.size_requests = p->size_requests;
    whole.size_V = p->size_V;
    whole.size_R = p->size_R;
    whole.block_size = p->block_size;
    whole.sampling = p->sampling;
    whole.float64_noise = p->float64_noise;
    return dspark_markov_sampling(&whole, stream);
  }
  return run_sampling<true>(p, p->size_L, p->rank * share_of(p), tokens_of(p), stream, [&](Problem& problem) {
    problem.mailbox = p->mailbox;
    problem.ranks = p->tp_size;
    problem.rank = p->rank;
  });
}
