// One operation in one layer of a network: what the plugins of TensorRT 8 and of TensorRT 10 and up share.
//
// Nothing but the attributes is remembered from one call to the next: every check and every launch reads types
// and sizes from the tensors that it is given. Methods throw `Refusal` with operation, layer, what was found and
// what was expected.
#pragma once
#include <vector>

#include "op_table.h"
#include "tensorrt.h"

namespace dspark {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginField;
using nvinfer1::PluginTensorDesc;

enum class Phase { kBuild, kRuntime };

#if DSPARK_PLUGIN_V3
using Creator = nvinfer1::IPluginCreatorInterface;
#else
using Creator = nvinfer1::IPluginCreator;
#endif

// The creator of an operation's plugins; it lives as long as the process, for TensorRT keeps pointers to it.
Creator* make_creator(const Op& op);

constexpr const char* kAbiField = "plugin_abi";
// The type of a layer's activations, a dspark_activation: networks of TensorRT 8 don't say it (plugin_v2.cpp).
constexpr const char* kActivationField = "activation";

// An operation's attributes as plugin fields without values. TensorRT 8's have `kActivationField` after them.
std::vector<PluginField> attribute_fields(const Op& op);

// The tensors of a call, inputs first.
struct TensorList {
  int inputs = 0;
  std::vector<PluginTensorDesc> tensors;

  TensorList() = default;
  TensorList(const PluginTensorDesc* in, int num_inputs, const PluginTensorDesc* out, int num_outputs);
  // Of a configuration, with sizes at the profile's maximum.
  TensorList(const DynamicPluginTensorDesc* in, int num_inputs, const DynamicPluginTensorDesc* out, int num_outputs);
};

class OpInstance {
 public:
  // Each attribute must be there once with its own type; in the runtime phase also this library's ABI number.
  OpInstance(const Op& op, const char* layer, const PluginField* fields, int count, Phase phase);

  const Op& op() const { return *op_; }
  int num_outputs() const { return static_cast<int>(tensors_.size()) - num_inputs_; }
  const Tensor& output(int index) const { return *tensors_.at(num_inputs_ + index); }
  // The ABI number and the attributes; they point into this object.
  std::vector<PluginField> fields() const;

  DataType output_type(int index, const DataType* inputs, int num_inputs) const;
  DimsExprs output_shape(int index, const DimsExprs* inputs, int num_inputs, nvinfer1::IExprBuilder& builder) const;
  // In what the tensors differ from the declaration, or "": the first few will do, and sizes may be unknown (-1).
  std::string mismatch(const TensorList& list) const;
  // Refuses tensors, of known sizes, that differ from the declaration or that the kernel was not built for.
  void check(const TensorList& list) const;
  size_t workspace_bytes(const TensorList& list) const;
  void enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs, const void* const* inputs,
               void* const* outputs, void* workspace, cudaStream_t stream) const;

 private:
  void read_attributes(const PluginField* fields, int count);
  std::string bind(const TensorList& list, bool whole, Params* params) const;
  Params bound(const TensorList& list) const;
  std::string named(const std::string& text) const;
  std::string kernel_refusal(int status, const Params& params) const;

  const Op* op_;
  std::string layer_;
  Phase phase_;
  Params params_;
  std::vector<const Tensor*> tensors_;  // the inputs that these attributes call for, then such outputs
  int num_inputs_ = 0;
};

}  // namespace dspark
