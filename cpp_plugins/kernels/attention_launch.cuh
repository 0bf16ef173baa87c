// Chooses the attention kernel of a problem and enqueues it.
#pragma once

#include "attention_float_kernel.cuh"
#include "attention_kernel.cuh"
#include "attention_wide_kernel.cuh"

namespace dspark {
namespace {

// Blocks of clusters a multiprocessor up to which the cluster kernel is used: as many as fit. On an H200 (cold, us) 20
// tiles take it 6.6 and the wide kernel 13.4, 40 tiles 8.6 and 13.5, 80 tiles 15.6 and 13.7; at 48, the last that fit,
// they are even (12.0 and 11.8).
constexpr int kClusterBlocks = 3;

// Starts the wide kernel if the keys fit into its shared memory; otherwise `status` is left alone.
template <typename T, int kRowTiles, bool kOwn>
bool launch_wide(const AttentionProblem& p, const DeviceLimits& limits, cudaStream_t stream, int* status) {
  if (p.window + p.own_rows > kWideKeys) return false;
  constexpr int rows = WideState<kRowTiles>::kRows;
  const WideLayout layout(p, rows, sizeof(WideState<kRowTiles>));
  if (layout.end > limits.shared_bytes) return false;
  LaunchShape shape{dim3((p.rows + rows - 1) / rows, p.groups), kWideThreads};
  shape.shared_bytes = layout.end;
  *status = launch(attention_wide_kernel<T, kRowTiles, kOwn>, shape, stream, p, layout);
  return true;
}

// Enqueues the attention of a checked problem. The 16-bit kernels give the same bits, so the choice, which depends on
// the batch and on the device, shows in nothing but time.
template <bool kOwn>
int attend(AttentionProblem p, int activation, cudaStream_t stream) {
  DeviceLimits limits;
  if (!device_limits(&limits)) return DSPARK_LAUNCH_FAILED;
  const int dim = p.format.head_dim;
  p.scale = static_cast<float>(std::pow(static_cast<double>(dim), -0.5));
  return dispatch_activation(activation, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    if constexpr (std::is_same_v<T, float>) {
      LaunchShape shape{dim3((p.rows + kFloatWarps - 1) / kFloatWarps, p.groups), kFloatThreads};
      shape.shared_bytes = (kOwn ? p.own_rows : 0) * dim * 4 +
                           (kOwn ? p.own_rows : 1) * p.format.pairs * static_cast<int>(sizeof(float2));
      return launch(attention_float_kernel<kOwn>, shape, stream, p);
    } else {
      if (dim % kSpan) return static_cast<int>(DSPARK_BAD_SHAPE);
      const int slices = dim / kSpan;
      const int cluster = device_major() >= 9 && (slices & (slices - 1)) == 0 ? slices : 1;
      const int64_t tiles = static_cast<int64_t>((p.rows + kTileRows - 1) / kTileRows) * p.groups;
      if (cluster == 1 || tiles * cluster > static_cast<int64_t>(kClusterBlocks) * limits.multiprocessors) {
        // 64 rows per block load the keys half as often as 32 do; but first every multiprocessor should have some.
        const bool many = (tiles + 1) / 2 > limits.multiprocessors && p.rows > 2 * kRowTile;
        int status;
        if (many && launch_wide<T, 4, kOwn>(p, limits, stream, &status)) return status;
        if (launch_wide<T, 2, kOwn>(p, limits, stream, &status)) return status;
      }
      TileLayout layout(p, kChunkBlocks * kKeyBlock, slices / cluster);
      while (layout.end > limits.shared_bytes && layout.chunk > kKeyBlock)
        layout = TileLayout(p, layout.chunk - kKeyBlock, layout.slices);
      if (layout.end > limits.shared_bytes) return static_cast<int>(DSPARK_BAD_SHAPE);
      LaunchShape shape{dim3(cluster, (p.rows + kTileRows - 1) / kTileRows, p.groups), kThreads};
      shape.cluster = cluster > 1 ? cluster : 0;
      shape.shared_bytes = layout.end;
      return cluster == kMaxSlices ? launch(attention_kernel<T, true, kOwn>, shape, stream, p, layout)
                                   : launch(attention_kernel<T, false, kOwn>, shape, stream, p, layout);
    }
  });
}

}  // namespace
}  // namespace dspark
