// RoutedExperts: the chosen FP4 experts of each row, weighted and summed (plugins/routed_experts.py).
//
// Five kernels, none of which needs the host in between:
//   prepare   sorts the choices by expert (expert_routing.cuh) and quantises x into activation records;
//   expand    gate = w1 x, up = w3 x and the activation, times the routing weight, for all chosen rows of an expert;
//   quantise  the result;
//   contract  w2 times that, rounded;
//   combine   adds up each row's experts, in ascending order.
// expand and contract are products as weight_product.cuh makes them, with a grid of 32 weight rows by experts that
// have work (for expand 16 rows of w1 and the same 16 of w3); an expert's weights are read once for up to 8 or 32 of
// its rows. How many experts have work is known on the device only: the grid has room for as many as there can be,
// and blocks without work end at once. contract starts copying weights while quantise still runs.
#include "expert_routing.cuh"
#include "weight_product.cuh"

namespace dspark {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTiles = 2;
constexpr int kSlots = 3;
constexpr int kManyGroups = 4;  // of 8 activation rows, where there are more than 8 rows
constexpr float kFp4Factor = 64.0f;
constexpr int kCombineThreads = 128;
constexpr int kMaxTopK = 16;

struct ExpertProduct {
  const unsigned char* weights[2];  // w1 and w3, or w2 twice
  const unsigned char* scales[2];
  const unsigned char* records;
  int record_rows;
  const ExpertWork* work;
  const int32_t* choices_at;
  const float* routing_weights;  // [choices]
  void* output;                  // [positions, width]
  int width;                     // weight rows of an expert
  int channels;
  int top_k;
  int activation;
  float limit;
  int groups;
};

template <int kGroups, bool kExpand>
using FourBitProduct = Product<Fp4, kTiles, kGroups, kSlots, kExpand>;

// Scale bytes of a thread block's weight rows, after the rings and what the warps decode of them.
__host__ __device__ constexpr int scale_bytes(int channels) { return kTiles * kTileRows * (channels / kSubBlock); }

// silu(min(gate, limit)) * clamp(up, -limit, limit); comparisons that keep NaN.
__device__ __forceinline__ float swiglu(float gate, float up, float limit) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return __fmul_rn(__fdiv_rn(gate, 1.0f + expf(-gate)), up);
}

template <bool kExpand, int kGroups>
__global__ void __launch_bounds__(kThreads, kGroups == 1 ? 4 : 2)
    expert_kernel(const __grid_constant__ ExpertProduct p) {
  using P = FourBitProduct<kGroups, kExpand>;
  if (kExpand) {
    wait_for_predecessor();
    release_successor();
  }
  // For contract this was written by prepare, which has ended: quantise, the predecessor, waited for expand.
  const Vector<int32_t> raw = load_constant(reinterpret_cast<const int32_t*>(p.work + blockIdx.y));
  const ExpertWork work{raw.values[0], raw.values[1], raw.values[2], 0};
  if (work.count == 0) {
    wait_for_predecessor();
    return;
  }
  const int first_row = blockIdx.x * (kExpand ? kTileRows : P::kRows);
  const int scale_columns = p.channels / kSubBlock;
  unsigned char* const shared = dynamic_shared();
  float* const spread = reinterpret_cast<float*>(shared + kWarps * P::ring_bytes(p.groups));
  unsigned char* const scales = reinterpret_cast<unsigned char*>(spread) + kWarps * P::kScaleBytes;

  WeightTile<kTiles> tile;
  tile.row_bytes = p.channels / 2;
  tile.valid_rows = P::kRows;
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
    const int64_t row = static_cast<int64_t>(work.expert) * p.width + first_row + (kExpand ? 0 : m * kTileRows);
    tile.first[m] = p.weights[m] + row * tile.row_bytes;
    // The scales of 16 rows are one piece of 16 * scale_columns bytes.
    for (int i = threadIdx.x; i < scale_columns; i += kThreads)
      copy_async(scales + (m * scale_columns + i) * 16, p.scales[m] + row * scale_columns + i * 16, true);
  }
  P product(tile, shared, unit_count(p.channels), kWarps, p.groups);
  product.start_weights();
  if (!kExpand) {
    wait_for_predecessor();
    release_successor();
  }
  for (int first = 0; first < work.count; first += p.groups * kGroup) {
    if (first > 0) {
      __syncthreads();  // all sums have been read
      product.rewind();
      product.start_weights();
    }
    const int count = min(p.groups * kGroup, work.count - first), start = work.first + first;
    product.start_records({p.records, p.record_rows, p.choices_at, p.top_k, start, count});
    product.run(scales, scale_columns, spread + threadIdx.x / kWarp * (P::kScaleBytes / 4));
    __syncthreads();
    constexpr int kResults = kExpand ? kTileRows : P::kRows;
    for (int i = threadIdx.x; i < count * kResults; i += kThreads) {
      const int row = i / kResults, weight = i % kResults;
      float value = product.sum(shared, row, weight);
      if constexpr (kExpand) {
        const float gate = round_to(value, p.activation);
        const float up = round_to(product.sum(shared, row, weight + kTileRows), p.activation);
        value = __fmul_rn(swiglu(gate, up, p.limit), p.routing_weights[p.choices_at[start + row]]);
      }
      store_as(p.output, static_cast<int64_t>(start + row) * p.width + first_row + weight, value, p.activation);
    }
  }
}

// The first `experts` thread blocks sort, the others quantise.
template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads)
    prepare_kernel(const __grid_constant__ Routing routing, const __grid_constant__ Quantization quantization) {
  static_assert(kQuantizeThreads == kRoutingThreads);
  wait_for_predecessor();
  release_successor();
  const int block = blockIdx.x;
  if (block < routing.experts) {
    route_expert(routing, block, dynamic_shared());
  } else {
    quantize_part<T>(quantization, block - routing.experts);
  }
}

template <typename T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const T* products, const int32_t* positions, float* y, int width, int top_k) {
  // Written by prepare, which has ended, as in expert_kernel.
  int* const sorted = reinterpret_cast<int*>(dynamic_shared());
  const int64_t row = blockIdx.y;
  if (threadIdx.x < top_k) {
    const volatile int32_t* mine = positions + row * top_k;
    const int position = mine[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < top_k; ++i) {
      const int other = mine[i];
      rank += other < position || (other == position && i < threadIdx.x);
    }
    sorted[rank] = position;
  }
  __syncthreads();
  wait_for_predecessor();
  release_successor();
  constexpr int kSize = Vector<T>::kSize;
  const int column = (blockIdx.x * kCombineThreads + threadIdx.x) * kSize;
  if (column >= width) return;
  float sums[kSize] = {};
#pragma unroll 4
  for (int i = 0; i < top_k; ++i) {
    const int position = sorted[i];
    if (position < 0) continue;
    const Vector<T> part = load(products + static_cast<int64_t>(position) * width + column);
#pragma unroll
    for (int v = 0; v < kSize; ++v) sums[v] += to_float(part.values[v]);
  }
#pragma unroll
  for (int v = 0; v < kSize; v += 4)
    *reinterpret_cast<float4*>(y + row * width + column + v) =
        make_float4(sums[v], sums[v + 1], sums[v + 2], sums[v + 3]);
}

template <bool kExpand, int kGroups>
int launch_product(ExpertProduct p, int max_work, int shared_limit, cudaStream_t stream) {
  using P = FourBitProduct<kGroups, kExpand>;
  const int fixed = kWarps * P::kScaleBytes + scale_bytes(p.channels);
  const auto shared_bytes = [&] { return kWarps * P::ring_bytes(p.groups) + fixed; };
  while (p.groups > 1 && shared_bytes() > shared_limit) --p.groups;
  if (shared_bytes() > shared_limit) return DSPARK_BAD_SHAPE;
  LaunchShape shape{dim3(p.width / (kExpand ? kTileRows : P::kRows), max_work), kThreads};
  shape.shared_bytes = shared_bytes();
  return launch(expert_kernel<kExpand, kGroups>, shape, stream, p);
}

template <bool kExpand>
int launch_product(ExpertProduct p, int rows, int max_work, int shared_limit, cudaStream_t stream) {
  // An expert has at most as many rows as there are, unless a row chose it twice; then it takes turns.
  const int groups = (rows + kGroup - 1) / kGroup;
  p.groups = groups < kManyGroups ? groups : kManyGroups;
  if (groups == 1) return launch_product<kExpand, 1>(p, max_work, shared_limit, stream);
  return launch_product<kExpand, kManyGroups>(p, max_work, shared_limit, stream);
}

// Where everything lies in the workspace of a call with `rows` rows; an offset's end is the next one's start.
struct Workspace {
  size_t x_records, inner, inner_records, products, choices_at, positions, work, bytes;

  Workspace(const dspark_routed_experts_params* p, int64_t rows, size_t activation_bytes) {
    const auto place = [this](size_t size) {
      const size_t start = bytes;
      bytes = (start + size + 127) / 128 * 128;
      return start;
    };
    const int64_t choices = rows * p->size_K;
    bytes = 0;
    x_records = place(record_bytes(rows, p->hidden_size));
    inner = place(choices * p->intermediate_size * activation_bytes);
    inner_records = place(record_bytes(choices, p->intermediate_size));
    products = place(choices * p->hidden_size * activation_bytes);
    choices_at = place(choices * sizeof(int32_t));
    positions = place(choices * sizeof(int32_t));
    work = place(p->size_E * sizeof(ExpertWork));
  }
};

template <typename T>
int run(const dspark_routed_experts_params* p, int64_t first, int rows, const DeviceLimits& limits,
        cudaStream_t stream) {
  const int hidden = p->hidden_size, inner = p->intermediate_size, top_k = static_cast<int>(p->size_K);
  const int experts = static_cast<int>(p->size_E), choices = rows * top_k;
  const int max_work = experts < choices ? experts : choices;
  const Workspace places(p, rows, sizeof(T));
  unsigned char* const workspace = static_cast<unsigned char*>(p->workspace);
  const auto bytes = [](const void* pointer) { return static_cast<const unsigned char*>(pointer); };

  Routing routing{};
  routing.indices = static_cast<const int32_t*>(p->indices) + first * top_k;
  routing.choices_at = reinterpret_cast<int32_t*>(workspace + places.choices_at);
  routing.positions = reinterpret_cast<int32_t*>(workspace + places.positions);
  routing.work = reinterpret_cast<ExpertWork*>(workspace + places.work);
  routing.choices = choices;
  routing.experts = experts;
  routing.max_work = max_work;
  const Quantization quantization{static_cast<const T*>(p->x) + first * hidden,
                                  workspace + places.x_records,
                                  rows,
                                  hidden,
                                  p->group,
                                  true,
                                  kFp4Factor};
  LaunchShape shape{dim3(experts + rows * quantize_blocks(hidden)), kQuantizeThreads};
  shape.shared_bytes = kRoutingShared;
  int status = launch(prepare_kernel<T>, shape, stream, routing, quantization);
  if (status) return status;

  ExpertProduct expand{};
  expand.weights[0] = bytes(p->w1), expand.weights[1] = bytes(p->w3);
  expand.scales[0] = bytes(p->w1_scale), expand.scales[1] = bytes(p->w3_scale);
  expand.records = workspace + places.x_records;
  expand.record_rows = rows;
  expand.work = routing.work;
  expand.choices_at = routing.choices_at;
  expand.routing_weights = static_cast<const float*>(p->weights) + first * top_k;
  expand.output = workspace + places.inner;
  expand.width = inner;
  expand.channels = hidden;
  expand.top_k = top_k;
  expand.activation = p->activation;
  expand.limit = p->swiglu_limit;
  status = launch_product<true>(expand, rows, max_work, limits.shared_bytes, stream);
  if (status) return status;

  const Quantization again{
      workspace + places.inner, workspace + places.inner_records, choices, inner, p->group, true, kFp4Factor};
  status = launch_quantization<T>(again, stream);
  if (status) return status;

  ExpertProduct contract = expand;
  contract.weights[0] = contract.weights[1] = bytes(p->w2);
  contract.scales[0] = contract.scales[1] = bytes(p->w2_scale);
  contract.records = workspace + places.inner_records;
  contract.record_rows = choices;
  contract.output = workspace + places.products;
  contract.width = hidden;
  contract.channels = inner;
  status = launch_product<false>(contract, rows, max_work, limits.shared_bytes, stream);
  if (status) return status;

  const int columns = kCombineThreads * Vector<T>::kSize;
  shape = LaunchShape{dim3((hidden + columns - 1) / columns, rows), kCombineThreads};
  shape.shared_bytes = kMaxTopK * sizeof(int);
  return launch(combine_kernel<T>, shape, stream, reinterpret_cast<const T*>(workspace + places.products),
                static_cast<const int32_t*>(routing.positions), static_cast<float*>(p->y) + first * hidden, hidden,
                top_k);
}

bool supported(const dspark_routed_experts_params* p) {
  const auto fits = [p](int size) { return size >= p->group && size <= 1 << 16 && size % p->group == 0; };
  return (p->group == 32 || p->group == 128) && fits(p->hidden_size) && fits(p->intermediate_size) &&
         p->size_rows >= 0 && p->size_rows <= 1 << 24 && p->size_K >= 1 && p->size_K <= kMaxTopK && p->size_E >= 1 &&
         p->size_E <= kMaxExperts;
}

}  // namespace
}  // namespace dspark

DSPARK_EXPORT size_t dspark_routed_experts_workspace(const dspark_routed_experts_params* p) {
  using namespace dspark;
  if (!supported(p)) return 0;
  const int64_t rows = p->size_rows < kMaxRecordRows ? p->size_rows : kMaxRecordRows;
  return Workspace(p, rows, p->activation == DSPARK_FLOAT32 ? 4 : 2).bytes;
}

DSPARK_EXPORT int dspark_routed_experts(const dspark_routed_experts_params* p, cudaStream_t stream) {
  using namespace dspark;
  if (!supported(p)) return DSPARK_BAD_SHAPE;
  if (p->size_rows == 0) return DSPARK_OK;
  if (!all_aligned(p->x, p->indices, p->weights, p->w1, p->w1_scale, p->w2, p->w2_scale, p->w3, p->w3_scale, p->y,
                   p->workspace))
    return DSPARK_BAD_POINTER;
  DeviceLimits limits;
  if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
  return dispatch_activation(p->activation, [&](auto* type) -> int {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t first = 0; first < p->size_rows; first += kMaxRecordRows) {
      const int64_t rest = p->size_rows - first;
      const int rows = static_cast<int>(rest < kMaxRecordRows ? rest : kMaxRecordRows);
      const int status = run<T>(p, first, rows, limits, stream);
      if (status) return status;
    }
    return DSPARK_OK;
  });
}
