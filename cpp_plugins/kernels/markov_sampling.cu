// MarkovSampling: the sequential loop of a draft (plugins/markov_sampling.py) as one persistent kernel, see
// markov_kernel.cuh; supported_sizes() in markov_launch.cuh has the sizes that it takes.
#include "markov_launch.cuh"

DSPARK_EXPORT size_t dspark_markov_sampling_workspace(const dspark_markov_sampling_params* p) {
  using namespace dspark;
  return supported_sizes(p, p->size_V) ? candidate_bytes(p, p->size_V) : 0;
}

DSPARK_EXPORT int dspark_markov_sampling(const dspark_markov_sampling_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (!supported_sizes(p, p->size_V)) return DSPARK_BAD_SHAPE;
  if (p->size_requests == 0) return DSPARK_OK;
  if (!aligned_pointers(p) || (p->write_logits && !aligned(p->corrected_logits))) return DSPARK_BAD_POINTER;
  return run_sampling<false>(p, p->size_V, 0, p->size_V, stream, [&](Problem& problem) {
    if (p->write_logits) problem.corrected_logits = static_cast<float*>(p->corrected_logits);
  });
}
