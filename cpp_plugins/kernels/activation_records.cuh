// Activations quantised to FP8 (plugins/numerics.py act_quant), laid out for the products in weight_product.cuh.
//
// A record is what one row has in one unit of 128 channels: 128 e4m3 codes, then the float32 scales of its four blocks
// of 32 channels (the same one four times where a group has 128). The records of a unit lie side by side, unit after
// unit, so that a warp copies those of eight rows in one piece, and 144 bytes from row to row leave its reads without
// bank conflicts. Beyond the last channel codes and scales are 0.
//
// FP4 weights come as words of eight nibbles, which decode into the four even and the four odd ones. Records for them
// hold the 32 codes of a block in that order: the even ones of channels 8 t .. 8 t + 7 at 4 t, the odd ones at
// 16 + 4 t. Decoded FP4 values come out 64 times too small; `factor` corrects this in the scales.
#pragma once

#include "fp8.cuh"

namespace dspark {

constexpr int kUnit = 128;     // channels
constexpr int kSubBlock = 32;  // channels of the smallest block that has a scale
constexpr int kRecordBytes = kUnit + 4 * (kUnit / kSubBlock);
constexpr int kRecordChunks = kRecordBytes / 16;
constexpr int kMaxRecordRows = 1024;  // of one launch; more rows go in turns, which keeps the workspace small

constexpr int kPart = 8;  // channels of a thread
constexpr int kQuantizeThreads = 128;

struct Quantization {
  const void* x;  // [rows, channels]
  unsigned char* records;
  int rows;
  int channels;  // a multiple of the group
  int group;     // 32 or 128
  bool fp4_order;
  float factor;
};

__host__ __device__ constexpr int unit_count(int channels) { return (channels + kUnit - 1) / kUnit; }
__host__ __device__ constexpr int quantize_blocks(int channels) {  // thread blocks of a row
  return (unit_count(channels) * (kUnit / kPart) + kQuantizeThreads - 1) / kQuantizeThreads;
}
constexpr size_t record_bytes(int64_t rows, int channels) {
  return static_cast<size_t>(rows) * unit_count(channels) * kRecordBytes;
}

__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// Quantises what thread block `block` of rows * quantize_blocks has to do.
template <typename T>
__device__ __forceinline__ void quantize_part(const Quantization& q, int block) {
  const int blocks = quantize_blocks(q.channels);
  const int row = block / blocks;
  const int part = block % blocks * kQuantizeThreads + threadIdx.x;
  const bool inside = part * kPart < q.channels;

  float values[kPart] = {};
  if (inside) {
    const T* source = static_cast<const T*>(q.x) + static_cast<int64_t>(row) * q.channels + part * kPart;
#pragma unroll
    for (int i = 0; i < kPart; i += Vector<T>::kSize) {
      const Vector<T> vector = load(source + i);
#pragma unroll
      for (int v = 0; v < Vector<T>::kSize; ++v) values[i + v] = to_float(vector.values[v]);
    }
  }
  // Of the bits, so that NaN is larger than every number.
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kPart; ++i) amax = max(amax, __float_as_uint(values[i]) & 0x7FFFFFFFu);
#pragma unroll
  for (int lanes = 1; lanes < kUnit / kPart; lanes *= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, amax, lanes);
    if (lanes * kPart < q.group) amax = max(amax, other);
  }
  if (part >= unit_count(q.channels) * (kUnit / kPart)) return;

  const bool finite = amax < 0x7F800000u;
  const float scale = finite ? quantization_scale(__uint_as_float(amax)) : __uint_as_float(0x7FC00000u);
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
  uint32_t pairs[kPart / 2];
  // Even channels 0 2 4 6 and odd ones 1 3 5 7, or the channels as they come.
  if (q.fp4_order) {
    pairs[0] = e4m3_pair(values[0] * inverse, values[2] * inverse);
    pairs[1] = e4m3_pair(values[4] * inverse, values[6] * inverse);
    pairs[2] = e4m3_pair(values[1] * inverse, values[3] * inverse);
    pairs[3] = e4m3_pair(values[5] * inverse, values[7] * inverse);
  } else {
#pragma unroll
    for (int i = 0; i < kPart / 2; ++i) pairs[i] = e4m3_pair(values[2 * i] * inverse, values[2 * i + 1] * inverse);
  }
  constexpr int kParts = kUnit / kPart, kBlockParts = kSubBlock / kPart;
  unsigned char* record = q.records + (static_cast<int64_t>(part / kParts) * q.rows + row) * kRecordBytes;
  const int place = part % kParts;
  uint32_t* first = reinterpret_cast<uint32_t*>(record + place / kBlockParts * kSubBlock) +
                    (q.fp4_order ? place % kBlockParts : 2 * (place % kBlockParts));
  first[0] = pairs[0] | pairs[1] << 16;
  first[q.fp4_order ? kBlockParts : 1] = pairs[2] | pairs[3] << 16;
  if (place % kBlockParts == 0)
    reinterpret_cast<float*>(record + kUnit)[place / kBlockParts] = inside ? __fmul_rn(scale, q.factor) : 0.0f;
}

namespace {

template <typename T>
__global__ void __launch_bounds__(kQuantizeThreads) quantize_kernel(const __grid_constant__ Quantization q) {
  wait_for_predecessor();
  release_successor();
  quantize_part<T>(q, blockIdx.x);
}

template <typename T>
int launch_quantization(const Quantization& q, cudaStream_t stream) {
  const LaunchShape shape{dim3(q.rows * quantize_blocks(q.channels)), kQuantizeThreads};
  return launch(quantize_kernel<T>, shape, stream, q);
}

}  // namespace
}  // namespace dspark
