// IPluginV2DynamicExt and its creators, for TensorRT 8: float32, float16 and int32 tensors.
//
// Networks of TensorRT 8 are weakly typed: where a plugin took either type, the builder would choose the one that is
// quicker for this layer alone, and ranks or a mailbox would disagree on what a row is. So a layer's activation type is
// an attribute (add_activations in builder/onnx_lowering.py), and any other one is refused.
//
// TensorRT 8 can't be told that an output shares an input's memory. Where an operation updates a tensor in
// place, the host binds one address to both names, and a plan refuses to run if TensorRT put a copy between.
#include "op_instance.h"
#if !DSPARK_PLUGIN_V3

namespace dspark {
namespace {

using namespace nvinfer1;

class Plugin final : public IPluginV2DynamicExt {
 public:
  explicit Plugin(OpInstance instance) : instance_(std::move(instance)) {}

  const char* getPluginType() const noexcept override { return instance_.op().name; }
  const char* getPluginVersion() const noexcept override { return instance_.op().version; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  void setPluginNamespace(const char*) noexcept override {}
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  void destroy() noexcept override { delete this; }
  Plugin* clone() const noexcept override {
    return guarded(static_cast<Plugin*>(nullptr), [&] { return new Plugin(instance_); });
  }

  int32_t getNbOutputs() const noexcept override { return instance_.num_outputs(); }
  DataType getOutputDataType(int32_t index, const DataType* inputs, int32_t num_inputs) const noexcept override {
    return guarded(DataType::kFLOAT, [&] { return instance_.output_type(index, inputs, num_inputs); });
  }
  DimsExprs getOutputDimensions(int32_t index, const DimsExprs* inputs, int32_t num_inputs,
                                IExprBuilder& builder) noexcept override {
    return guarded(DimsExprs{-1, {}}, [&] { return instance_.output_shape(index, inputs, num_inputs, builder); });
  }
  bool supportsFormatCombination(int32_t position, const PluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t) noexcept override {
    return guarded(false, [&] {
      TensorList first(tensors, position + 1, nullptr, 0);
      first.inputs = num_inputs;
      return instance_.mismatch(first).empty();  // every type and format is asked for: no is an everyday answer
    });
  }
  void configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                       int32_t num_outputs) noexcept override {
    guarded(0, [&] { return instance_.check({in, num_inputs, out, num_outputs}), 0; });
  }
  size_t getWorkspaceSize(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc* out,
                          int32_t num_outputs) const noexcept override {
    return guarded(size_t{0}, [&] { return instance_.workspace_bytes({in, num_inputs, out, num_outputs}); });
  }
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return guarded(-1,
                   [&] { return instance_.enqueue(input_descs, output_descs, inputs, outputs, workspace, stream), 0; });
  }

  // A plan holds the fields' values, four bytes each.
  size_t getSerializationSize() const noexcept override { return instance_.fields().size() * sizeof(int32_t); }
  void serialize(void* buffer) const noexcept override {
    guarded(0, [&] {
      auto* at = static_cast<unsigned char*>(buffer);
      for (const PluginField& field : instance_.fields()) {
        std::memcpy(at, field.data, sizeof(int32_t));
        at += sizeof(int32_t);
      }
      return 0;
    });
  }

 private:
  OpInstance instance_;
};

class OpCreator final : public IPluginCreator {
 public:
  explicit OpCreator(const Op& op) : op_(op), fields_(attribute_fields(op)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return op_.version; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  void setPluginNamespace(const char*) noexcept override {}
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV2* createPlugin(const char* layer, const PluginFieldCollection* fields) noexcept override {
    return guarded(static_cast<Plugin*>(nullptr),
                   [&] { return new Plugin({op_, layer, fields->fields, fields->nbFields, Phase::kBuild}); });
  }
  IPluginV2* deserializePlugin(const char* layer, const void* data, size_t bytes) noexcept override {
    return guarded(static_cast<Plugin*>(nullptr), [&] {
      if (bytes % sizeof(int32_t)) {
        throw Refusal(std::string(kNamespace) + "." + op_.name + ", layer " + (layer ? layer : "") +
                      ": the plan holds " + std::to_string(bytes) +
                      " bytes for it, expected four for each field; it is damaged, build it again");
      }
      std::vector<int32_t> words(bytes / sizeof(int32_t));
      std::memcpy(words.data(), data, words.size() * sizeof(int32_t));
      std::vector<PluginField> fields = fields_;
      fields.insert(fields.begin(), {kAbiField, nullptr, PluginFieldType::kINT32, 1});
      fields.resize(std::min(fields.size(), words.size()));  // what is cut off will be missed
      for (size_t i = 0; i < fields.size(); ++i) fields[i].data = &words[i];
      if (words.size() > fields.size()) fields.emplace_back("(surplus)", &words.back(), PluginFieldType::kINT32, 1);
      return new Plugin({op_, layer, fields.data(), static_cast<int>(fields.size()), Phase::kRuntime});
    });
  }

 private:
  const Op& op_;
  std::vector<PluginField> fields_;
  PluginFieldCollection collection_;
};

}  // namespace

Creator* make_creator(const Op& op) { return new OpCreator(op); }

}  // namespace dspark
#endif
