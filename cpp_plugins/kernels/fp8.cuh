// Rounding through FP8 e4m3 with power-of-two scales, as plugins/numerics.py act_quant does.
#pragma once

#include <cuda_fp8.h>

#include "common.cuh"

namespace dspark {

constexpr float kE4m3Max = 448.0f;
constexpr float kAmaxFloor = 1e-4f;

// The scale of a group whose largest magnitude is `amax`: the smallest power of two >= amax / 448.
__device__ __forceinline__ float quantization_scale(float amax) {
  const uint32_t bits = __float_as_uint(__fmul_rn(fmaxf(amax, kAmaxFloor), 1.0f / kE4m3Max));
  return __uint_as_float(((bits >> 23) + ((bits & 0x7FFFFFu) != 0)) << 23);
}

// The value of the e4m3 code next to `value`; ties to even, saturating.
__device__ __forceinline__ float round_to_e4m3(float value) {
  const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

// `value` quantised and dequantised with a power-of-two `scale`; dividing by it is exact, so is multiplying.
__device__ __forceinline__ float quantize_dequantize(float value, float scale) {
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(scale));
  return __fmul_rn(round_to_e4m3(__fmul_rn(value, inverse)), scale);
}

}  // namespace dspark
