// Drives one plugin object as TensorRT does, for tests: see plugin_object.py. Needs TensorRT's headers only; both
// generations of plugins have the same functions here.
#include <NvInfer.h>

#include <cstring>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

using namespace nvinfer1;

struct Tensor {
  int32_t type;
  int32_t linear;
  int32_t rank;
  int64_t dims[8];
  int64_t max[8];
};

// Tensors as TensorRT describes them, inputs first.
struct Descs {
  std::vector<PluginTensorDesc> call;
  std::vector<DynamicPluginTensorDesc> configuration;

  Descs(const Tensor* tensors, int count) {
    for (const Tensor* t = tensors; t < tensors + count; ++t) {
      DynamicPluginTensorDesc desc{};
      desc.desc.type = static_cast<DataType>(t->type);
      desc.desc.format = t->linear ? TensorFormat::kLINEAR : TensorFormat::kCHW4;
      desc.desc.dims.nbDims = desc.max.nbDims = t->rank;
      for (int i = 0; i < t->rank; ++i) {
        desc.desc.dims.d[i] = t->dims[i];
        desc.max.d[i] = t->max[i];
      }
      desc.min = desc.max;
      call.push_back(desc.desc);
      configuration.push_back(desc);
    }
  }
};

#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 10

using Plugin = IPluginV3;
using Creators = IPluginCreatorInterface* const* (*)(int32_t&);

static IPluginCreatorV3One* creator(Creators list, const char* op) {
  int32_t count = 0;
  IPluginCreatorInterface* const* const all = list(count);
  for (int i = 0; i < count; ++i) {
    auto* const found = static_cast<IPluginCreatorV3One*>(all[i]);
    if (!std::strcmp(found->getPluginName(), op)) return found;
  }
  return nullptr;
}
static auto* build(Plugin* p) {
  return static_cast<IPluginV3OneBuildV2*>(p->getCapabilityInterface(PluginCapabilityType::kBUILD));
}
static auto* runtime(Plugin* p) {
  return static_cast<IPluginV3OneRuntime*>(p->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

API Plugin* create(Creators list, const char* op, const PluginField* fields, int count, int at_runtime) {
  const PluginFieldCollection collection{count, fields};
  return creator(list, op)->createPlugin("a_layer", &collection,
                                         at_runtime ? TensorRTPhase::kRUNTIME : TensorRTPhase::kBUILD);
}
// What a plan would make of the plugin; the fields go through memory of our own, as through a file.
API Plugin* reload(Creators list, const char* op, Plugin* p) {
  const PluginFieldCollection* const stored = runtime(p)->getFieldsToSerialize();
  std::vector<PluginField> fields(stored->fields, stored->fields + stored->nbFields);
  std::vector<int32_t> words;
  for (const PluginField& field : fields) words.push_back(*static_cast<const int32_t*>(field.data));
  for (size_t i = 0; i < fields.size(); ++i) fields[i].data = &words[i];
  return create(list, op, fields.data(), static_cast<int>(fields.size()), 1);
}
API int stored_words(Plugin* p, int32_t* words) {
  const PluginFieldCollection* const stored = runtime(p)->getFieldsToSerialize();
  for (int i = 0; i < stored->nbFields; ++i) words[i] = *static_cast<const int32_t*>(stored->fields[i].data);
  return stored->nbFields;
}
API void destroy(Plugin* p) { delete p; }
API Plugin* attach(Plugin* p) { return runtime(p)->attachToContext(nullptr); }
API int alias(Plugin* p, int output) { return build(p)->getAliasedInput(output); }
API int output_type(Plugin* p, int index, const int32_t* inputs, int count) {
  std::vector<DataType> types(build(p)->getNbOutputs());
  const auto* const in = reinterpret_cast<const DataType*>(inputs);
  const int status = build(p)->getOutputDataTypes(types.data(), static_cast<int>(types.size()), in, count);
  return status ? -1 : static_cast<int>(types[index]);
}
API int supports(Plugin* p, int position, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  return build(p)->supportsFormatCombination(position, d.configuration.data(), inputs, outputs);
}
API int configure(Plugin* p, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  return build(p)->configurePlugin(d.configuration.data(), inputs, d.configuration.data() + inputs, outputs);
}
API size_t workspace_bytes(Plugin* p, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  return build(p)->getWorkspaceSize(d.configuration.data(), inputs, d.configuration.data() + inputs, outputs);
}
API int shape_change(Plugin* p, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  return runtime(p)->onShapeChange(d.call.data(), inputs, d.call.data() + inputs, outputs);
}
API int enqueue(Plugin* p, const Tensor* tensors, int inputs, int outputs, void** pointers, void* workspace,
                cudaStream_t stream) {
  Descs d(tensors, inputs + outputs);
  return runtime(p)->enqueue(d.call.data(), d.call.data() + inputs, pointers, pointers + inputs, workspace, stream);
}

#else

using Plugin = IPluginV2DynamicExt;
using Creators = IPluginCreator* const* (*)(int32_t&);

static IPluginCreator* creator(Creators list, const char* op) {
  int32_t count = 0;
  IPluginCreator* const* const all = list(count);
  for (int i = 0; i < count; ++i) {
    if (!std::strcmp(all[i]->getPluginName(), op)) return all[i];
  }
  return nullptr;
}

API Plugin* create(Creators list, const char* op, const PluginField* fields, int count, int at_runtime) {
  IPluginCreator* const made_by = creator(list, op);
  if (at_runtime) {  // of fields, a plan holds the values
    std::vector<int32_t> words;
    for (int i = 0; i < count; ++i) words.push_back(*static_cast<const int32_t*>(fields[i].data));
    return static_cast<Plugin*>(made_by->deserializePlugin("a_layer", words.data(), words.size() * sizeof(int32_t)));
  }
  const PluginFieldCollection collection{count, fields};
  return static_cast<Plugin*>(made_by->createPlugin("a_layer", &collection));
}
API int stored_words(Plugin* p, int32_t* words) {
  p->serialize(words);
  return static_cast<int>(p->getSerializationSize() / sizeof(int32_t));
}
API Plugin* reload(Creators list, const char* op, Plugin* p) {
  int32_t words[64];
  const size_t bytes = stored_words(p, words) * sizeof(int32_t);
  return static_cast<Plugin*>(creator(list, op)->deserializePlugin("a_layer", words, bytes));
}
// A plan that lost or won bytes at its end; words beyond the stored ones are zero.
API Plugin* reload_bytes(Creators list, const char* op, Plugin* p, size_t bytes) {
  int32_t words[64] = {};
  stored_words(p, words);
  return static_cast<Plugin*>(creator(list, op)->deserializePlugin("a_layer", words, bytes));
}
API void destroy(Plugin* p) { p->destroy(); }
API Plugin* attach(Plugin* p) {
  Plugin* const copy = p->clone();
  copy->initialize();
  return copy;
}
API int alias(Plugin*, int) { return -1; }
API int output_type(Plugin* p, int index, const int32_t* inputs, int count) {
  return static_cast<int>(p->getOutputDataType(index, reinterpret_cast<const DataType*>(inputs), count));
}
API int supports(Plugin* p, int position, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  return p->supportsFormatCombination(position, d.call.data(), inputs, outputs);
}
API int configure(Plugin* p, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  p->configurePlugin(d.configuration.data(), inputs, d.configuration.data() + inputs, outputs);
  return 0;
}
API size_t workspace_bytes(Plugin* p, const Tensor* tensors, int inputs, int outputs) {
  Descs d(tensors, inputs + outputs);
  for (size_t i = 0; i < d.call.size(); ++i) d.call[i].dims = d.configuration[i].max;
  return p->getWorkspaceSize(d.call.data(), inputs, d.call.data() + inputs, outputs);
}
API int shape_change(Plugin*, const Tensor*, int, int) { return 0; }
API int enqueue(Plugin* p, const Tensor* tensors, int inputs, int outputs, void** pointers, void* workspace,
                cudaStream_t stream) {
  Descs d(tensors, inputs + outputs);
  return p->enqueue(d.call.data(), d.call.data() + inputs, pointers, pointers + inputs, workspace, stream);
}

#endif
