// QuantizedLinear: y = x W^T with x quantised here and W in FP8 blocks (plugins/quantized_linear.py).
//
// Two kernels. The first one quantises x into activation records. The second one, whose thread blocks start copying
// weights while the first one still runs, multiplies (weight_product.cuh): a thread block has 32 weight rows and four
// warps, or, where there are too few rows to occupy a GPU that way, 16 and eight. It serves up to 64 activation rows;
// thread blocks of the same weights with other activation rows are neighbours in the grid, so that they find the
// weights in L2. How many rows share a thread block changes nothing in their sums.
#include "weight_product.cuh"

namespace dspark {
namespace {

constexpr int kMaxGroups = 8;
constexpr int kFewWeightRows = 4096;  // below it, thread blocks of 16 weight rows

struct Problem {
  const unsigned char* weight;  // [weight_rows, channels]
  const unsigned char* scale;   // [, scale_columns]
  const unsigned char* records;
  void* y;  // [rows, weight_rows]
  int rows;
  int weight_rows;
  int channels;
  int scale_columns;
  int activation;
  int groups;  // of 8 activation rows, of a thread block
};

constexpr int warps_of(int tiles) { return tiles == 1 ? 8 : 4; }
// So that two thread blocks fit a multiprocessor of a data-centre GPU, and one any other.
constexpr int slots_of(int tiles, int groups) { return groups == kMaxGroups ? 2 : groups == 1 && tiles == 2 ? 4 : 3; }

template <int kBlock, int kTiles, int kGroups>
using LinearProduct = Product<Fp8<kBlock>, kTiles, kGroups, slots_of(kTiles, kGroups), false>;

template <int kBlock, int kTiles, int kGroups>
__global__ void __launch_bounds__(warps_of(kTiles) * kWarp, kGroups < kMaxGroups ? 2 : 1)
    linear_kernel(const __grid_constant__ Problem p) {
  constexpr int kWarps = warps_of(kTiles), kThreads = kWarps * kWarp;
  using P = LinearProduct<kBlock, kTiles, kGroups>;
  const int first_weight = blockIdx.y * P::kRows, weights = min(P::kRows, p.weight_rows - first_weight);
  const int first = blockIdx.x * p.groups * kGroup, count = min(p.groups * kGroup, p.rows - first);
  const int units = unit_count(p.channels);

  WeightTile<kTiles> tile;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
    tile.first[m] = p.weight + (static_cast<int64_t>(first_weight) + m * kTileRows) * p.channels;
  tile.row_bytes = p.channels;
  tile.valid_rows = weights;
  unsigned char* const shared = dynamic_shared();
  P product(tile, shared, units, kWarps, p.groups);
  product.start_weights();
  float* const scales = reinterpret_cast<float*>(shared + kWarps * P::ring_bytes(p.groups));
  const unsigned char* scale_row = p.scale + static_cast<int64_t>(first_weight / kBlock) * p.scale_columns;
  for (int i = threadIdx.x; i < units * (kUnit / kBlock); i += kThreads)
    scales[i] = i < p.scale_columns ? e8m0_value(scale_row[i]) : 0.0f;

  wait_for_predecessor();
  release_successor();
  product.start_records({p.records, p.rows, nullptr, 1, first, count});
  product.run(scales, p.scale_columns, nullptr);
  __syncthreads();
  for (int i = threadIdx.x; i < count * P::kRows; i += kThreads) {
    const int row = i / P::kRows, weight = i % P::kRows;
    if (weight < weights)
      store_as(p.y, static_cast<int64_t>(first + row) * p.weight_rows + first_weight + weight,
               product.sum(shared, row, weight), p.activation);
  }
}

template <int kBlock, int kTiles, int kGroups>
int launch_linear(Problem p, int shared_limit, cudaStream_t stream) {
  constexpr int kWarps = warps_of(kTiles);
  using P = LinearProduct<kBlock, kTiles, kGroups>;
  const int scale_bytes = unit_count(p.channels) * (kUnit / kBlock) * static_cast<int>(sizeof(float));
  const auto shared_bytes = [&] { return kWarps * P::ring_bytes(p.groups) + scale_bytes; };
  while (p.groups > 1 && shared_bytes() > shared_limit) --p.groups;
  const int tiles = (p.weight_rows + P::kRows - 1) / P::kRows;
  if (shared_bytes() > shared_limit || tiles > 65535) return DSPARK_BAD_SHAPE;
  LaunchShape shape{dim3((p.rows + p.groups * kGroup - 1) / (p.groups * kGroup), tiles), kWarps * kWarp};
  shape.shared_bytes = shared_bytes();
  return launch(linear_kernel<kBlock, kTiles, kGroups>, shape, stream, p);
}

template <int kBlock, int kTiles>
int choose_groups(Problem p, int shared_limit, cudaStream_t stream) {
  const int groups = (p.rows + kGroup - 1) / kGroup;
  p.groups = groups < kMaxGroups ? groups : kMaxGroups;
  if (groups == 1) return launch_linear<kBlock, kTiles, 1>(p, shared_limit, stream);
  if (groups <= 4) return launch_linear<kBlock, kTiles, 4>(p, shared_limit, stream);
  return launch_linear<kBlock, kTiles, kMaxGroups>(p, shared_limit, stream);
}

template <int kBlock>
int choose_tiles(const Problem& p, int shared_limit, cudaStream_t stream) {
  if (p.weight_rows < kFewWeightRows) return choose_groups<kBlock, 1>(p, shared_limit, stream);
  return choose_groups<kBlock, 2>(p, shared_limit, stream);
}

bool supported(const dspark_quantized_linear_params* p) {
  if (p->block != 32 && p->block != 128) return false;
  return p->size_rows >= 0 && p->size_rows <= 1 << 24 && p->size_K >= p->block && p->size_K <= 1 << 16 &&
         p->size_K % p->block == 0 && p->size_N >= 1 && p->size_N <= 1 << 20 && p->size_J == p->size_K / p->block &&
         p->size_M == (p->size_N + p->block - 1) / p->block;
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_quantized_linear_workspace(const dspark_quantized_linear_params* p) {
  using namespace dspark;
  if (!supported(p)) return 0;
  return record_bytes(p->size_rows < kMaxRecordRows ? p->size_rows : kMaxRecordRows, static_cast<int>(p->size_K));
}

DSPARK_EXPORT int dspark_quantized_linear(const dspark_quantized_linear_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (!supported(p)) return DSPARK_BAD_SHAPE;
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->x, p->weight, p->scale, p->y, p->workspace)) return DSPARK_BAD_POINTER;
  DeviceLimits limits;
  if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
  return dispatch_activation(p->activation, [&](auto* type) -> int {
    using T = std::remove_pointer_t<decltype(type)>;
    Problem problem{};
    problem.weight = static_cast<const unsigned char*>(p->weight);
    problem.scale = static_cast<const unsigned char*>(p->scale);
    problem.records = static_cast<const unsigned char*>(p->workspace);
    problem.weight_rows = static_cast<int>(p->size_N);
    problem.channels = static_cast<int>(p->size_K);
    problem.scale_columns = static_cast<int>(p->size_J);
    problem.activation = p->activation;
    for (int64_t first = 0; first < p->size_rows; first += kMaxRecordRows) {
      const int64_t rest = p->size_rows - first;
      problem.rows = static_cast<int>(rest < kMaxRecordRows ? rest : kMaxRecordRows);
      problem.y = static_cast<T*>(p->y) + first * p->size_N;
      const T* x = static_cast<const T*>(p->x) + first * p->size_K;
      const Quantization quantization{
          x, static_cast<unsigned char*>(p->workspace), problem.rows, problem.channels, p->block, false, 1.0f};
      int status = launch_quantization<T>(quantization, stream);
      if (status) return status;
      status = p->block == 32 ? choose_tiles<32>(problem, limits.shared_bytes, stream)
                              : choose_tiles<128>(problem, limits.shared_bytes, stream);
      if (status) return status;
    }
    return DSPARK_OK;
  });
}
