// Products of quantised weights, as they are stored, with the activation records of a few rows.
//
// Reading the weights is what it costs, so a thread block takes 16 or 32 weight rows over all channels and its warps
// divide the channels among them: warp w has units w, w + warps, .. of 128. A warp shares nothing with the others
// while it works: it copies its weights and the records that meet them into a ring of its own, some units ahead,
// and waits for nothing but its own copies. At the end the warps' sums are added in the order of the warps. Which
// warp has which channels depends on the weight's shape only, and columns of a matrix instruction don't mix, so a
// row's bits are the same in any batch.
//
// Weights are the A operand (16 rows) of mma.m16n8k16, eight activation rows its B operand, both as fp16, which holds
// every e4m3 and FP4 value; products are exact, sums float32. FP4 turns into e4m3 with two shifts and two masks a
// word. The order of channels inside a block is free, so a lane's words, as ldmatrix hands them out, serve as they
// are: the low half of a word of four codes in one half of the operand, the high half in the other. A block's partial
// sum starts at 0, is multiplied by the scales of activation and weight, and added to the row's sum.
#pragma once

#include "activation_records.cuh"
#include "device.cuh"

namespace dspark {

constexpr int kTileRows = 16;  // weight rows of a matrix instruction
constexpr int kGroup = 8;      // activation rows of a matrix instruction
constexpr int kPad = 16;       // bytes between rows in shared memory, so that eight of them lie in different banks

// Four e4m3 codes as fp16 values: the lower two and the upper two.
__device__ __forceinline__ void widen(uint32_t codes, uint32_t& low, uint32_t& high) {
#if __CUDA_ARCH__ >= 890
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#else
  // The bits of a code in fp16's places are 2^-8 times its value, subnormal codes too. A NaN code counts as 480.
  const auto decode = [](uint32_t spread) {
    const uint32_t small = (spread & 0x80008000u) | (spread >> 1 & 0x3F803F80u);
    const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&small), __half2half2(__float2half_rn(256.0f)));
    return *reinterpret_cast<const uint32_t*>(&value);
  };
  low = decode((codes & 0xFFu) << 8 | (codes & 0xFF00u) << 16);
  high = decode((codes & 0xFF0000u) >> 8 | (codes & 0xFF000000u));
#endif
}

// Float value of an E8M0 byte.
__device__ __forceinline__ float e8m0_value(uint32_t byte) {
  const uint32_t special = byte ? 0x7FC00000u : 0x00400000u;  // NaN, or 2^-127, which is subnormal
  return __uint_as_float(byte - 1 < 254 ? byte << 23 : special);
}

// FP8 weights with one scale per square block of kBlock x kBlock: the same for all weight rows here.
template <int kBlock_>
struct Fp8 {
  static constexpr int kBlock = kBlock_;
  static constexpr int kUnitBytes = kUnit;
  static constexpr bool kRowScales = false;
  static constexpr bool kWholeTiles = false;  // there may be fewer weight rows than a tile has

  // Two blocks of 32 channels, half a unit. codes[b]: rows g and g + 8 of one half of the block, then of the other.
  __device__ __forceinline__ static void load_half(const unsigned char* tile, int half, int lane,
                                                   uint32_t (&codes)[2][4]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const uint4 m = load_matrices(tile + lane % 16 * (kUnitBytes + kPad) + half * 64 + b * 32 + lane / 16 * 16);
      codes[b][0] = m.x, codes[b][1] = m.y, codes[b][2] = m.z, codes[b][3] = m.w;
    }
  }
};

// FP4 weights, two to a byte, with a scale for 32 channels of a row.
struct Fp4 {
  static constexpr int kBlock = kSubBlock;
  static constexpr int kUnitBytes = kUnit / 2;
  static constexpr bool kRowScales = true;
  static constexpr bool kWholeTiles = true;

  // A code's exponent and mantissa bits in e4m3's places are 2^-6 times its value.
  __device__ __forceinline__ static uint32_t even_codes(uint32_t word) {
    return (word << 4 & 0x80808080u) | (word << 2 & 0x1C1C1C1Cu);
  }
  __device__ __forceinline__ static uint32_t odd_codes(uint32_t word) {
    return (word & 0x80808080u) | (word >> 2 & 0x1C1C1C1Cu);
  }

  __device__ __forceinline__ static void load_half(const unsigned char* tile, int half, int lane,
                                                   uint32_t (&codes)[2][4]) {
    const uint4 m = load_matrices(tile + lane % 16 * (kUnitBytes + kPad) + half * 32 + lane / 16 * 16);
    codes[0][0] = even_codes(m.x), codes[0][1] = even_codes(m.y);
    codes[0][2] = odd_codes(m.x), codes[0][3] = odd_codes(m.y);
    codes[1][0] = even_codes(m.z), codes[1][1] = even_codes(m.w);
    codes[1][2] = odd_codes(m.z), codes[1][3] = odd_codes(m.w);
  }
};

// The weight rows of a thread block, kTiles times 16 of them; each 16 are contiguous.
template <int kTiles>
struct WeightTile {
  const unsigned char* first[kTiles];
  int row_bytes;
  int valid_rows;  // from the first one on; the others count as zeros and are not read (kWholeTiles: all are valid)
};

// The activation rows of a thread block: `list` names those of the records, divided by `divisor`, or they are
// `first`, `first` + 1, ..
struct RecordRows {
  const unsigned char* records;
  int record_rows;  // of all records
  const int32_t* list;
  int divisor;
  int first;
  int count;
};

// kSlots is what a ring holds: the unit in use and those on their way.
template <typename Format, int kTiles, int kGroups, int kSlots, bool kList>
class Product {
 public:
  static constexpr int kRows = kTiles * kTileRows;
  static constexpr int kPitch = Format::kUnitBytes + kPad;
  static constexpr int kWeightBytes = kRows * kPitch;
  static constexpr int kSumPitch = kRows + 4;  // floats between activation rows in the sums of a warp

  __host__ __device__ static constexpr int slot_bytes(int groups) {
    return kWeightBytes + groups * kGroup * kRecordBytes;
  }
  // Of a warp: float scales of a unit of all weight rows.
  static constexpr int kScaleBytes = Format::kRowScales ? kRows * 16 : 0;

  __host__ __device__ static constexpr int ring_bytes(int groups) { return kSlots * slot_bytes(groups); }

  // `shared` holds the rings of all warps, ring_bytes(groups) each.
  __device__ __forceinline__ Product(const WeightTile<kTiles>& tile, unsigned char* shared, int units, int warps,
                                     int groups)
      : lane_(threadIdx.x % kWarp),
        warp_(threadIdx.x / kWarp),
        warps_(warps),
        slot_bytes_(slot_bytes(groups)),
        valid_rows_(tile.valid_rows - lane_ / kParts),
        row_step_(static_cast<int64_t>(tile.row_bytes) * kRowsAtOnce),
        ring_(shared + warp_ * kSlots * slot_bytes_),
        count_(units > warp_ ? (units - 1 - warp_) / warps + 1 : 0) {
    const int piece = warp_ * Format::kUnitBytes + lane_ % kParts * 16;
    left_ = tile.row_bytes - piece;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
      weights_[m] = tile.first[m] + static_cast<int64_t>(lane_ / kParts) * tile.row_bytes + piece;
  }

  // Starts copying the weights of the first units; they are constants.
  __device__ __forceinline__ void start_weights() {
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) {
      if (i < count_) copy_weights(ring_ + i * slot_bytes_);
    }
  }

  // Back to the first unit, after run().
  __device__ __forceinline__ void rewind() {
    const int passed = count_ * warps_ * Format::kUnitBytes;
    left_ += passed;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) weights_[m] -= passed;
  }

  // Starts copying the records of the same units.
  __device__ __forceinline__ void start_records(const RecordRows& rows) {
    groups_ = (rows.count + kGroup - 1) / kGroup;
    chunks_ = rows.count * kRecordChunks;
    const int64_t unit_bytes = static_cast<int64_t>(rows.record_rows) * kRecordBytes;
    record_step_ = warps_ * unit_bytes;
    records_ = rows.records + warp_ * unit_bytes + static_cast<int64_t>(kList ? 0 : rows.first) * kRecordBytes;
    if constexpr (kList) {
#pragma unroll
      for (int j = 0; j < kRecordCopies; ++j) {
        const int chunk = lane_ + j * kWarp, row = chunk / kRecordChunks;
        offsets_[j] = chunk % kRecordChunks * 16;
        if (row < rows.count) offsets_[j] += rows.list[rows.first + row] / rows.divisor * kRecordBytes;
      }
    }
#pragma unroll
    for (int i = 0; i < kSlots - 1; ++i) {
      if (i < count_) copy_records(ring_ + i * slot_bytes_);
      commit_copies();
    }
  }

  // Computes the warp's sums and leaves them at the start of its ring, [activation row][weight row]. All warps of the
  // block meet once inside, before the first use of what they have copied or stored for each other.
  // Scales, in shared memory: Fp8, floats, one per block; Fp4, bytes [kRows][scale_columns], and `spread`, kScaleBytes
  // of the warp's own.
  __device__ __forceinline__ void run(const void* scales, int scale_columns, float* spread) {
    float sums[kTiles][kGroups][4] = {};
    wait_copies<kSlots - 2>();
    __syncthreads();
    unsigned char *slot = ring_, *next = ring_ + (kSlots - 1) * slot_bytes_;
    const unsigned char* const end = ring_ + kSlots * slot_bytes_;
    for (int i = 0; i < count_; ++i) {
      if (i > 0) {
        wait_copies<kSlots - 2>();
        __syncwarp();
      }
      // Every lane is done with the slot before this one, which the next unit takes.
      if (i + kSlots - 1 < count_) {
        copy_weights(next);
        copy_records(next);
      }
      commit_copies();
      const int unit = warp_ + i * warps_;
      if constexpr (Format::kRowScales) {
        spread_scales(static_cast<const unsigned char*>(scales), scale_columns, unit, spread);
        __syncwarp();
        multiply(slot, spread, sums);
      } else {
        multiply(slot, static_cast<const float*>(scales) + unit * (kUnit / Format::kBlock), sums);
      }
      next = slot;
      slot = slot + slot_bytes_ == end ? ring_ : slot + slot_bytes_;
    }
    wait_copies<0>();
    __syncwarp();
    float* target = reinterpret_cast<float*>(ring_) + lane_ % 4 * 2 * kSumPitch + lane_ / 4;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (group >= groups_) break;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          target[(group * kGroup + i % 2) * kSumPitch + m * kTileRows + i / 2 * 8] = sums[m][group][i];
      }
    }
  }

  // The sum over all channels, after run() and a barrier of the block.
  __device__ __forceinline__ float sum(const unsigned char* shared, int activation_row, int weight_row) const {
    const int place = activation_row * kSumPitch + weight_row;
    float total = reinterpret_cast<const float*>(shared)[place];
    for (int warp = 1; warp < warps_; ++warp)
      total += reinterpret_cast<const float*>(shared + warp * kSlots * slot_bytes_)[place];
    return total;
  }

 private:
  static constexpr int kParts = Format::kUnitBytes / 16;  // 16-byte pieces of a row in a unit
  static constexpr int kRowsAtOnce = kWarp / kParts;
  static constexpr int kRecordCopies = (kGroups * kGroup * kRecordChunks + kWarp - 1) / kWarp;

  // The warp's next unit.
  __device__ __forceinline__ void copy_weights(unsigned char* slot) {
    unsigned char* target = slot + lane_ / kParts * kPitch + lane_ % kParts * 16;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const unsigned char* source = weights_[m];
#pragma unroll
      for (int row = 0; row < kTileRows; row += kRowsAtOnce) {
        const bool valid = left_ > 0 && (Format::kWholeTiles || m * kTileRows + row < valid_rows_);
        copy_async(target + (m * kTileRows + row) * kPitch, source, valid);
        source += row_step_;
      }
      weights_[m] += warps_ * Format::kUnitBytes;
    }
    left_ -= warps_ * Format::kUnitBytes;
  }

  __device__ __forceinline__ void copy_records(unsigned char* slot) {
    unsigned char* target = slot + kWeightBytes + lane_ * 16;
    const int wanted = (kGroups > 1 ? groups_ : 1) * kGroup * kRecordChunks;
#pragma unroll
    for (int j = 0; j < kRecordCopies; ++j) {
      const int chunk = lane_ + j * kWarp;
      if (chunk < wanted)
        copy_async(target + j * kWarp * 16, records_ + (kList ? offsets_[kList ? j : 0] : chunk * 16), chunk < chunks_);
    }
    records_ += record_step_;
  }

  // Decodes the scales of a unit's weight rows, a row a lane.
  __device__ __forceinline__ void spread_scales(const unsigned char* bytes, int columns, int unit, float* spread) {
#pragma unroll
    for (int row = lane_; row < kRows; row += kWarp) {
      const unsigned char* source = bytes + row * columns + unit * 4;
      // Where rows are words, no unit goes beyond them; 0 and 255 are no exponents.
      const uint32_t word = columns % 4 == 0 ? *reinterpret_cast<const uint32_t*>(source) : 0;
      const uint32_t special = ((word - 0x01010101u) & ~word) | ((~word - 0x01010101u) & word);
      float values[4];
      if (special & 0x80808080u) {
#pragma unroll
        for (int b = 0; b < 4; ++b) values[b] = unit * 4 + b < columns ? e8m0_value(source[b]) : 0.0f;
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b)
          values[b] = __uint_as_float((b < 3 ? word << (23 - 8 * b) : word >> 1) & 0x7F800000u);
      }
      reinterpret_cast<float4*>(spread)[row] = make_float4(values[0], values[1], values[2], values[3]);
    }
  }

  __device__ __forceinline__ void multiply(const unsigned char* slot, const float* scales,
                                           float (&sums)[kTiles][kGroups][4]) {
    const int g = lane_ / 4, t = lane_ % 4;
    const unsigned char* records = slot + kWeightBytes;
    constexpr bool kWhole = Format::kBlock == kUnit;  // one block a unit: partial sums outlive the loop below
    float partial[kWhole ? kTiles : 1][kWhole ? kGroups : 1][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[kTiles][2][2][4];
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t codes[2][4];
        Format::load_half(slot + m * kTileRows * kPitch, half, lane_, codes);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t (&operand)[4] = a[m][i / 4][i % 4 / 2];
          widen(codes[i / 4][i % 4], operand[i % 2], operand[i % 2 + 2]);
        }
      }
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (kGroups > 1 && group >= groups_) break;
        const unsigned char* rows = records + group * kGroup * kRecordBytes;
        const uint4 words = load_matrices(rows + lane_ % 8 * kRecordBytes + half * 64 + lane_ / 8 * 16);
        const uint32_t codes[2][2] = {{words.x, words.y}, {words.z, words.w}};
        // Of activation rows 2 t and 2 t + 1, two blocks each.
        const float* row_scales = reinterpret_cast<const float*>(rows + 2 * t * kRecordBytes + kUnit) + half * 2;
        const float2 even = *reinterpret_cast<const float2*>(row_scales);
        const float2 odd = *reinterpret_cast<const float2*>(row_scales + kRecordBytes / 4);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const float x_scale[2] = {b ? even.y : even.x, b ? odd.y : odd.x};
          uint32_t x[2][2];
#pragma unroll
          for (int k = 0; k < 2; ++k) widen(codes[b][k], x[k][0], x[k][1]);
#pragma unroll
          for (int m = 0; m < kTiles; ++m) {
            float fresh[4] = {};
            float (&products)[4] = kWhole ? partial[kWhole ? m : 0][kWhole ? group : 0] : fresh;
#pragma unroll
            for (int k = 0; k < 2; ++k)
              multiply_add<__half>(products, a[m][b][k][0], a[m][b][k][1], a[m][b][k][2], a[m][b][k][3], x[k][0],
                                   x[k][1]);
            if constexpr (!kWhole)
              add_scaled(products, x_scale, scales, m * kTileRows + g, half * 2 + b, sums[m][group]);
          }
        }
      }
    }
    if constexpr (kWhole) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        if (kGroups > 1 && group >= groups_) break;
        const unsigned char* row = records + (group * kGroup + 2 * t) * kRecordBytes + kUnit;
        const float x_scale[2] = {*reinterpret_cast<const float*>(row),
                                  *reinterpret_cast<const float*>(row + kRecordBytes)};
#pragma unroll
        for (int m = 0; m < kTiles; ++m) add_scaled(partial[m][group], x_scale, scales, 0, 0, sums[m][group]);
      }
    }
  }

  // Multiplying by powers of two is exact, in whatever order.
  __device__ __forceinline__ static void add_scaled(const float (&products)[4], const float (&x_scale)[2],
                                                    const float* scales, int weight_row, int block, float (&sums)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Format::kRowScales) {
        sums[i] = fmaf(products[i] * x_scale[i % 2], scales[(weight_row + i / 2 * 8) * 4 + block], sums[i]);
      } else {
        sums[i] = fmaf(products[i], x_scale[i % 2] * scales[block], sums[i]);
      }
    }
  }

  const int lane_, warp_, warps_, slot_bytes_;
  const int valid_rows_;  // from the lane's first one on
  const int64_t row_step_;
  unsigned char* const ring_;
  const int count_;  // units of this warp
  // Of the unit to copy next: the lane's first bytes, how far they are from the row's end, its records.
  const unsigned char* weights_[kTiles];
  int left_;
  const unsigned char* records_ = nullptr;
  int64_t record_step_ = 0;
  int groups_ = 0, chunks_ = 0;
  uint32_t offsets_[kList ? kRecordCopies : 1];
};

__device__ __forceinline__ float round_to(float value, int activation) {
  if (activation == DSPARK_BFLOAT16) return to_float(from_float<__nv_bfloat16>(value));
  return activation == DSPARK_FLOAT16 ? to_float(from_float<__half>(value)) : value;
}

__device__ __forceinline__ void store_as(void* output, int64_t index, float value, int activation) {
  if (activation == DSPARK_BFLOAT16) {
    static_cast<__nv_bfloat16*>(output)[index] = from_float<__nv_bfloat16>(value);
  } else if (activation == DSPARK_FLOAT16) {
    static_cast<__half*>(output)[index] = from_float<__half>(value);
  } else {
    static_cast<float*>(output)[index] = value;
  }
}

}  // namespace dspark
