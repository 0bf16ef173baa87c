// What the TensorRT plugins know about an operation. The table itself, op_table.inc, is generated from the
// declarations in plugins/ and reads like them: a dimension is a number, a word for a static or dynamic size,
// an attribute, or an attribute divided; some tensors exist only where an attribute exceeds a limit.
//
// An operation's parameter struct (dspark_plugins.h) is the only storage: attributes, sizes and pointers are
// written at their offsets in it, so what a plugin keeps between calls is what a kernel will get.
#pragma once
#include <dspark_plugins.h>

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace dspark {

// Any operation's parameter struct, as bytes.
struct Params {
  alignas(8) std::array<unsigned char, 256> bytes{};

  template <typename T>
  T get(size_t offset) const {
    T value;
    std::memcpy(&value, &bytes[offset], sizeof value);
    return value;
  }
  template <typename T>
  void set(size_t offset, T value) {
    std::memcpy(&bytes[offset], &value, sizeof value);
  }
};

enum class Kind { kInt, kBool, kFloat };  // of an attribute; all take four bytes
enum class Dtype { kActivation, kFloat32, kInt32, kInt8 };
enum class Contents { kValues, kAddresses };

struct Field {
  const char* name;
  Kind kind;
  size_t offset;
};

struct Condition {  // holds where the integer at this offset exceeds the limit
  size_t offset;
  int32_t limit;
};
constexpr Condition kAlways{0, INT_MIN};
constexpr int kNoAlias = -1;

struct Dim {
  enum Source { kNumber, kStatic, kDynamic, kAttribute };
  Source source;
  const char* name;
  size_t offset;   // of the size or the attribute
  int32_t number;  // the size itself, or what the attribute is divided by

  Dim(int size) : Dim(kNumber, "", 0, size) {}
  Dim(Source from, const char* word, size_t at, int32_t n) : source(from), name(word), offset(at), number(n) {}
  bool is_symbol() const { return source == kStatic || source == kDynamic; }
};

inline Dim static_size(const char* name, size_t offset) { return {Dim::kStatic, name, offset, 0}; }
inline Dim dynamic_size(const char* name, size_t offset) { return {Dim::kDynamic, name, offset, 0}; }
inline Dim attribute(const char* name, size_t offset) { return {Dim::kAttribute, name, offset, 1}; }
inline Dim operator/(const Dim& whole, int divisor) { return {whole.source, whole.name, whole.offset, divisor}; }
inline Condition operator>(const Dim& value, int limit) { return {value.offset, limit}; }

struct Tensor {
  const char* name;
  Dtype dtype;
  size_t offset;  // of its pointer
  std::vector<Dim> dims;
  Condition when = kAlways;  // inputs and outputs with a condition come last
  int alias = kNoAlias;      // of an output: index of the input whose memory it shares
  Contents contents = Contents::kValues;
};

struct Op {
  const char* name;
  const char* version;
  int (*launch)(const void* params, cudaStream_t stream);  // null where libdspark_plugins.so has no kernel
  size_t (*workspace_bytes)(const void* params);
  size_t workspace_offset;
  std::vector<Field> fields;
  std::vector<Tensor> inputs, outputs;
};

template <typename P>
Op make_op(const char* name, const char* version, int (*launch)(const P*, cudaStream_t), size_t (*workspace)(const P*),
           std::vector<Field> fields, std::vector<Tensor> inputs, std::vector<Tensor> outputs) {
  static_assert(sizeof(P) <= sizeof(Params::bytes) && offsetof(P, activation) == 0);
  return {name,
          version,
          reinterpret_cast<int (*)(const void*, cudaStream_t)>(launch),
          reinterpret_cast<size_t (*)(const void*)>(workspace),
          offsetof(P, workspace),
          std::move(fields),
          std::move(inputs),
          std::move(outputs)};
}

const std::vector<Op>& ops();

}  // namespace dspark
