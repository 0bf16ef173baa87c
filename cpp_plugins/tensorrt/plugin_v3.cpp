// IPluginV3 and its creators, for TensorRT 10.3 and up and TensorRT-RTX.
#include "op_instance.h"
#if DSPARK_PLUGIN_V3

namespace dspark {
namespace {

using namespace nvinfer1;

class Plugin final : public IPluginV3, public IPluginV3OneCore, public IPluginV3OneBuildV2, public IPluginV3OneRuntime {
 public:
  explicit Plugin(OpInstance instance) : instance_(std::move(instance)) {}

  IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept override {
    switch (type) {
      case PluginCapabilityType::kCORE: return static_cast<IPluginV3OneCore*>(this);
      case PluginCapabilityType::kBUILD: return static_cast<IPluginV3OneBuildV2*>(this);
      case PluginCapabilityType::kRUNTIME: return static_cast<IPluginV3OneRuntime*>(this);
    }
    return nullptr;
  }
  Plugin* clone() noexcept override {
    return guarded(static_cast<Plugin*>(nullptr), [&] { return new Plugin(instance_); });
  }

  const char* getPluginName() const noexcept override { return instance_.op().name; }
  const char* getPluginVersion() const noexcept override { return instance_.op().version; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  int32_t getNbOutputs() const noexcept override { return instance_.num_outputs(); }
  int32_t getAliasedInput(int32_t output) noexcept override { return instance_.output(output).alias; }
  int32_t getOutputDataTypes(DataType* types, int32_t num_outputs, const DataType* inputs,
                             int32_t num_inputs) const noexcept override {
    return status([&] {
      for (int i = 0; i < num_outputs; ++i) types[i] = instance_.output_type(i, inputs, num_inputs);
    });
  }
  int32_t getOutputShapes(const DimsExprs* inputs, int32_t num_inputs, const DimsExprs*, int32_t, DimsExprs* outputs,
                          int32_t num_outputs, IExprBuilder& builder) noexcept override {
    return status([&] {
      for (int i = 0; i < num_outputs; ++i) outputs[i] = instance_.output_shape(i, inputs, num_inputs, builder);
    });
  }
  bool supportsFormatCombination(int32_t position, const DynamicPluginTensorDesc* tensors, int32_t num_inputs,
                                 int32_t) noexcept override {
    return guarded(false, [&] {
      TensorList first;
      first.inputs = num_inputs;
      for (int i = 0; i <= position; ++i) first.tensors.push_back(tensors[i].desc);
      const std::string problem = instance_.mismatch(first);
      // Every format is asked for; of types, in a strongly typed network, only the one there is.
      const bool linear = first.tensors.back().format == TensorFormat::kLINEAR;
      if (linear && !problem.empty()) throw Refusal(problem);
      return problem.empty();
    });
  }
  int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                          int32_t num_outputs) noexcept override {
    return status([&] { instance_.check({in, num_inputs, out, num_outputs}); });
  }
  size_t getWorkspaceSize(const DynamicPluginTensorDesc* in, int32_t num_inputs, const DynamicPluginTensorDesc* out,
                          int32_t num_outputs) const noexcept override {
    return guarded(size_t{0}, [&] { return instance_.workspace_bytes({in, num_inputs, out, num_outputs}); });
  }

  int32_t onShapeChange(const PluginTensorDesc* in, int32_t num_inputs, const PluginTensorDesc* out,
                        int32_t num_outputs) noexcept override {
    return status([&] { instance_.check({in, num_inputs, out, num_outputs}); });
  }
  int32_t enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs, const void* const* inputs,
                  void* const* outputs, void* workspace, cudaStream_t stream) noexcept override {
    return status([&] { instance_.enqueue(input_descs, output_descs, inputs, outputs, workspace, stream); });
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return clone(); }
  const PluginFieldCollection* getFieldsToSerialize() noexcept override {
    return guarded(static_cast<const PluginFieldCollection*>(nullptr), [&] {
      fields_ = instance_.fields();
      collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
      return &collection_;
    });
  }

 private:
  template <typename Body>
  static int32_t status(Body&& body) noexcept {
    return guarded(int32_t{-1}, [&] { return body(), 0; });
  }

  OpInstance instance_;
  std::vector<PluginField> fields_;  // TensorRT reads these after getFieldsToSerialize has returned
  PluginFieldCollection collection_;
};

class OpCreator final : public IPluginCreatorV3One {
 public:
  explicit OpCreator(const Op& op) : op_(op), fields_(attribute_fields(op)) {
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const char* getPluginName() const noexcept override { return op_.name; }
  const char* getPluginVersion() const noexcept override { return op_.version; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }
  const PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
  IPluginV3* createPlugin(const char* layer, const PluginFieldCollection* fields,
                          TensorRTPhase phase) noexcept override {
    return guarded(static_cast<Plugin*>(nullptr), [&] {
      const Phase ours = phase == TensorRTPhase::kBUILD ? Phase::kBuild : Phase::kRuntime;
      return new Plugin({op_, layer, fields->fields, fields->nbFields, ours});
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
