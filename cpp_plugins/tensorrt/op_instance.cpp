#include "op_instance.h"

#include <algorithm>
#include <map>

#pragma weak dspark_plugin_abi

namespace dspark {
namespace {

#include "op_table.inc"

using nvinfer1::PluginFieldType;

constexpr size_t kActivation = 0;  // offset of the activation type in every parameter struct
constexpr int64_t kUnknown = -1;   // a size or activation type that no tensor has told
constexpr bool kTypedNetworks = DSPARK_PLUGIN_V3;

struct TypeName {
  DataType type;
  const char* name;
  int32_t activation;
};
constexpr TypeName kTypes[] = {
#if DSPARK_PLUGIN_V3
    {DataType::kBF16, "bfloat16", DSPARK_BFLOAT16},
#endif
    {DataType::kHALF, "float16", DSPARK_FLOAT16},   {DataType::kFLOAT, "float32", DSPARK_FLOAT32},
    {DataType::kINT32, "int32", kUnknown},          {DataType::kINT8, "int8", kUnknown},
};

const TypeName* find_type(DataType type) {
  const auto* const at = std::find_if(std::begin(kTypes), std::end(kTypes), [&](auto& t) { return t.type == type; });
  return at == std::end(kTypes) ? nullptr : at;
}

std::string type_name(DataType type) {
  const TypeName* const known = find_type(type);
  return known ? known->name : "type " + std::to_string(static_cast<int>(type));
}

// dspark_activation, or kUnknown for a type that activations don't have.
int32_t activation_of(DataType type) {
  const TypeName* const known = find_type(type);
  return known ? known->activation : int32_t{kUnknown};
}

// Null for anything but a dspark_activation that this TensorRT has.
const TypeName* find_activation(int32_t activation) {
  const auto same = [&](const TypeName& type) { return type.activation == activation; };
  const auto* const at = std::find_if(std::begin(kTypes), std::end(kTypes), same);
  return activation == kUnknown || at == std::end(kTypes) ? nullptr : at;
}

DataType type_of(const Tensor& spec, DataType activation) {
  switch (spec.dtype) {
    case Dtype::kActivation: return activation;
    case Dtype::kFloat32: return DataType::kFLOAT;
    case Dtype::kInt32: return DataType::kINT32;
    case Dtype::kInt8: return DataType::kINT8;
  }
  return activation;
}

int64_t size_of(const Dim& dim, const Params& params) {
  if (dim.source == Dim::kNumber) return dim.number;
  if (dim.source == Dim::kAttribute) return params.get<int32_t>(dim.offset) / dim.number;
  return params.get<int64_t>(dim.offset);
}

std::string joined(const std::vector<std::string>& parts, const char* separator) {
  std::string all;
  for (const std::string& part : parts) all += (all.empty() ? "" : separator) + part;
  return all;
}

std::string listed(const std::vector<std::string>& words) { return "[" + joined(words, ", ") + "]"; }

// "streams T[rows, 4, H]"
std::string declared(const Tensor& spec, const Params& params) {
  std::vector<std::string> dims;
  for (const Dim& dim : spec.dims) dims.push_back(dim.is_symbol() ? dim.name : std::to_string(size_of(dim, params)));
  const bool is_activation = spec.dtype == Dtype::kActivation;
  return std::string(spec.name) + " " + (is_activation ? "T" : type_name(type_of(spec, {}))) + listed(dims);
}

// "float32[5, 4, 128]"
std::string found(const PluginTensorDesc& tensor) {
  std::vector<std::string> sizes;
  for (int i = 0; i < tensor.dims.nbDims; ++i) sizes.push_back(std::to_string(tensor.dims.d[i]));
  const bool linear = tensor.format == nvinfer1::TensorFormat::kLINEAR;
  return type_name(tensor.type) + listed(sizes) + (linear ? "" : " in a format that is not linear");
}

// "int", "float[2]"
std::string found(const PluginField& field) {
  const bool is_int = field.type == PluginFieldType::kINT32, is_float = field.type == PluginFieldType::kFLOAT32;
  const std::string type = is_int ? "int" : is_float ? "float" : "neither int nor float";
  return type + (field.length == 1 ? "" : "[" + std::to_string(field.length) + "]");
}

// The activation type and sizes known so far, each once: "T = float32, rows = 5".
std::string known(const std::vector<const Tensor*>& tensors, const Params& params) {
  std::vector<std::string> facts;
  for (const TypeName& type : kTypes) {
    if (type.activation != kUnknown && type.activation == params.get<int32_t>(kActivation)) {
      facts.push_back(std::string("T = ") + type.name);
    }
  }
  for (const Tensor* spec : tensors) {
    for (const Dim& dim : spec->dims) {
      const std::string fact = std::string(dim.name) + " = " + std::to_string(size_of(dim, params));
      const bool told = dim.is_symbol() && size_of(dim, params) != kUnknown;
      if (told && std::find(facts.begin(), facts.end(), fact) == facts.end()) facts.push_back(fact);
    }
  }
  return joined(facts, ", ");
}

constexpr const char* kNoKernel = "libdspark_plugins.so has no kernel for it";

}  // namespace

const std::vector<Op>& ops() {
  static const std::vector<Op>* const all = new std::vector<Op>(make_ops());
  return *all;
}

std::vector<PluginField> attribute_fields(const Op& op) {
  std::vector<PluginField> fields;
  for (const Field& field : op.fields) {
    const bool is_float = field.kind == Kind::kFloat;
    fields.emplace_back(field.name, nullptr, is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32, 1);
  }
  if (!kTypedNetworks) fields.emplace_back(kActivationField, nullptr, PluginFieldType::kINT32, 1);
  return fields;
}

TensorList::TensorList(const PluginTensorDesc* in, int num_inputs, const PluginTensorDesc* out, int num_outputs)
    : inputs(num_inputs),
      tensors(in, in + num_inputs) {
  tensors.insert(tensors.end(), out, out + num_outputs);
}

TensorList::TensorList(const DynamicPluginTensorDesc* in, int num_inputs, const DynamicPluginTensorDesc* out,
                       int num_outputs)
    : inputs(num_inputs) {
  for (int i = 0; i < num_inputs + num_outputs; ++i) {
    const DynamicPluginTensorDesc& tensor = i < num_inputs ? in[i] : out[i - num_inputs];
    tensors.push_back(tensor.desc);
    tensors.back().dims = tensor.max;
  }
}

OpInstance::OpInstance(const Op& op, const char* layer, const PluginField* fields, int count, Phase phase)
    : op_(&op),
      layer_(layer ? layer : ""),
      phase_(phase) {
  read_attributes(fields, count);
  const auto add_present = [&](const std::vector<Tensor>& specs) {
    for (const Tensor& spec : specs) {
      if (params_.get<int32_t>(spec.when.offset) > spec.when.limit) tensors_.push_back(&spec);
    }
  };
  add_present(op.inputs);
  num_inputs_ = static_cast<int>(tensors_.size());
  add_present(op.outputs);
#if !DSPARK_PLUGIN_V3
  for (const Tensor* spec : tensors_) {
    if (spec->dtype != Dtype::kInt8) continue;
    throw Refusal(named(declared(*spec, params_) + " carries bytes, which TensorRT 8 takes for quantized numbers and "
                                                   "may rescale; use dequantized numerics, or TensorRT 10 and up"));
  }
#endif
}

void OpInstance::read_attributes(const PluginField* fields, int count) {
  const auto is_one = [](const PluginField& field, PluginFieldType type) {
    return field.type == type && field.length == 1 && field.data;
  };
  std::map<std::string, PluginField> given;
  for (int i = 0; i < count; ++i) given[fields[i].name] = fields[i];
  const std::string ours = std::to_string(DSPARK_PLUGIN_ABI);
  if (phase_ == Phase::kRuntime) {
    const PluginField field = given[kAbiField];
    given.erase(kAbiField);
    const bool readable = is_one(field, PluginFieldType::kINT32);
    const std::string theirs = readable ? std::to_string(*static_cast<const int32_t*>(field.data)) : "of no number";
    if (theirs != ours) {
      throw Refusal(
          named("the plan was built with plugin ABI " + theirs + ", this library has " + ours + "; build it again"));
    }
  }
  if (dspark_plugin_abi && dspark_plugin_abi() != DSPARK_PLUGIN_ABI) {
    throw Refusal(named("libdspark_plugins.so has ABI " + std::to_string(dspark_plugin_abi()) +
                        ", this library wants " + ours + "; build both together"));
  }
  params_.set(kActivation, int32_t{kUnknown});
  std::vector<Field> wanted = op_->fields;
  if (!kTypedNetworks) wanted.push_back({kActivationField, Kind::kInt, kActivation});
  std::vector<std::string> missing, unknown, wrong;
  for (const Field& field : wanted) {
    const auto at = given.find(field.name);
    if (at == given.end()) {
      missing.push_back(field.name);
      continue;
    }
    const bool is_float = field.kind == Kind::kFloat;
    if (is_one(at->second, is_float ? PluginFieldType::kFLOAT32 : PluginFieldType::kINT32)) {
      const int32_t bits = *static_cast<const int32_t*>(at->second.data);
      params_.set(field.offset, field.kind == Kind::kBool ? int32_t{bits != 0} : bits);
    } else {
      wrong.push_back(field.name + (" (" + found(at->second)) + ", expected " + (is_float ? "float)" : "int)"));
    }
    given.erase(at);
  }
  for (const auto& [name, _] : given) unknown.push_back(name);
  if (missing.empty() && unknown.empty() && wrong.empty()) {
    const auto activation = params_.get<int32_t>(kActivation);
    if (kTypedNetworks || find_activation(activation)) return;
    throw Refusal(named(std::string(kActivationField) + " is " + std::to_string(activation) + ", expected " +
                        std::to_string(DSPARK_FLOAT16) + " (float16) or " + std::to_string(DSPARK_FLOAT32) +
                        " (float32), which is all that TensorRT 8 has"));
  }
  throw Refusal(named("attributes missing " + listed(missing) + ", unknown " + listed(unknown) + ", of wrong type " +
                      listed(wrong) + "; the model was exported by another version of this package, export it again"));
}

std::vector<PluginField> OpInstance::fields() const {
  static const int32_t abi = DSPARK_PLUGIN_ABI;
  std::vector<PluginField> fields = attribute_fields(*op_);
  for (size_t i = 0; i < op_->fields.size(); ++i) fields[i].data = &params_.bytes[op_->fields[i].offset];
  if (!kTypedNetworks) fields.back().data = &params_.bytes[kActivation];
  fields.insert(fields.begin(), {kAbiField, &abi, PluginFieldType::kINT32, 1});
  return fields;
}

std::string OpInstance::named(const std::string& text) const {
  return std::string(kNamespace) + "." + op_->name + ", layer " + layer_ + ": " + text;
}

std::string OpInstance::kernel_refusal(int status, const Params& params) const {
  const bool in_table = status >= 0 && status < static_cast<int>(std::size(kStatusTexts));
  std::string text = (in_table ? kStatusTexts[status] : "status " + std::to_string(status)) + ": ";
  text += known(tensors_, params);
  for (const Field& field : op_->fields) {
    const bool is_float = field.kind == Kind::kFloat;
    text += std::string(", ") + field.name + " = " +
            (is_float ? std::to_string(params.get<float>(field.offset))
                      : std::to_string(params.get<int32_t>(field.offset)));
  }
  return named(text);
}

// Reads activation type, if the attributes don't tell it, and sizes from the tensors into the parameters, and returns
// where tensors contradict the declaration or each other. Not `whole`: later tensors may be absent and dynamic sizes
// unknown.
std::string OpInstance::bind(const TensorList& list, bool whole, Params* params) const {
  if (list.inputs != num_inputs_) {
    return std::to_string(list.inputs) + " inputs, expected " + std::to_string(num_inputs_);
  }
  if (whole ? list.tensors.size() != tensors_.size() : list.tensors.size() > tensors_.size()) {
    return std::to_string(list.tensors.size()) + " inputs and outputs, expected " + std::to_string(tensors_.size());
  }
  for (const Tensor* spec : tensors_) {
    for (const Dim& dim : spec->dims) {
      if (dim.is_symbol()) params->set(dim.offset, kUnknown);
    }
  }
  std::vector<std::string> problems;
  for (size_t i = 0; i < list.tensors.size(); ++i) {
    const Tensor& spec = *tensors_[i];
    const PluginTensorDesc& tensor = list.tensors[i];
    const auto rank = static_cast<int>(spec.dims.size());
    bool wrong = tensor.format != nvinfer1::TensorFormat::kLINEAR || tensor.dims.nbDims != rank ||
                 tensor.type != type_of(spec, tensor.type);
    if (spec.dtype == Dtype::kActivation) {
      const int32_t type = activation_of(tensor.type);
      if (params->get<int32_t>(kActivation) == kUnknown) params->set(kActivation, type);
      wrong |= type == kUnknown || type != params->get<int32_t>(kActivation);
    }
    for (int k = 0; k < std::min(rank, tensor.dims.nbDims); ++k) {
      const Dim& dim = spec.dims[k];
      const int64_t size = tensor.dims.d[k];
      if (dim.is_symbol() && size == kUnknown) {
        wrong |= whole || dim.source == Dim::kStatic;
      } else {
        if (dim.is_symbol() && size_of(dim, *params) == kUnknown) params->set(dim.offset, size);
        wrong |= size != size_of(dim, *params);
      }
    }
    if (wrong) {
      const std::string facts = known(tensors_, *params);
      problems.push_back(std::string(spec.name) + " is " + found(tensor) + ", expected " + declared(spec, *params) +
                         (facts.empty() ? "" : " with " + facts));
    }
  }
  return joined(problems, "; ");
}

std::string OpInstance::mismatch(const TensorList& list) const {
  Params params = params_;
  const std::string problems = bind(list, false, &params);
  return problems.empty() ? "" : named(problems);
}

Params OpInstance::bound(const TensorList& list) const {
  Params params = params_;
  const std::string problems = bind(list, true, &params);
  if (!problems.empty()) throw Refusal(named(problems));
  return params;
}

DataType OpInstance::output_type(int index, const DataType* inputs, int num_inputs) const {
  bool good = num_inputs == num_inputs_;
  const auto is_activation = [](const Tensor* spec) { return spec->dtype == Dtype::kActivation; };
  const TypeName* const told = find_activation(params_.get<int32_t>(kActivation));
  const auto first = std::find_if(tensors_.begin(), tensors_.end(), is_activation) - tensors_.begin();
  DataType activation = DataType::kFLOAT;  // of operations without T
  if (told) {
    activation = told->type;
  } else if (good && first < num_inputs) {
    activation = inputs[first];
  }
  good = good && activation_of(activation) != kUnknown;
  for (int i = 0; good && i < num_inputs; ++i) {
    // TensorRT 8 also asks while it takes computed tensors for float32.
    const bool open = !kTypedNetworks && is_activation(tensors_[i]) && inputs[i] == DataType::kFLOAT;
    good = open || inputs[i] == type_of(*tensors_[i], activation);
  }
  if (good) return type_of(output(index), activation);
  std::vector<std::string> given, wanted;
  for (int i = 0; i < num_inputs; ++i) given.push_back(type_name(inputs[i]));
  for (int i = 0; i < num_inputs_; ++i) wanted.push_back(declared(*tensors_[i], params_));
  throw Refusal(named("inputs are " + listed(given) + ", expected " + listed(wanted)));
}

DimsExprs OpInstance::output_shape(int index, const DimsExprs* inputs, int num_inputs,
                                   nvinfer1::IExprBuilder& builder) const {
  if (num_inputs != num_inputs_) {
    throw Refusal(named(std::to_string(num_inputs) + " inputs, expected " + std::to_string(num_inputs_)));
  }
  std::map<size_t, const nvinfer1::IDimensionExpr*> sizes;
  for (int i = 0; i < num_inputs; ++i) {
    const Tensor& spec = *tensors_[i];
    if (inputs[i].nbDims != static_cast<int>(spec.dims.size())) {
      throw Refusal(named(std::string(spec.name) + " has " + std::to_string(inputs[i].nbDims) +
                          " dimensions, expected " + declared(spec, params_)));
    }
    for (size_t k = 0; k < spec.dims.size(); ++k) sizes.emplace(spec.dims[k].offset, inputs[i].d[k]);
  }
  const std::vector<Dim>& dims = output(index).dims;
  DimsExprs shape{static_cast<int>(dims.size()), {}};
  for (size_t k = 0; k < dims.size(); ++k) {
    shape.d[k] = dims[k].is_symbol() ? sizes.at(dims[k].offset) : builder.constant(size_of(dims[k], params_));
  }
  return shape;
}

void OpInstance::check(const TensorList& list) const {
  const Params params = bound(list);
  if (!op_->launch) {
    log(Severity::kWARNING, named(std::string(kNoKernel) + ", so an engine with it can be built but not run"));
    return;
  }
  // All pointers are null, so nothing is launched, and any other complaint is about types, sizes and attributes.
  const int status = op_->launch(&params, nullptr);
  if (status == DSPARK_OK || status == DSPARK_BAD_POINTER) return;
  const std::string answer = kernel_refusal(status, params);
  if (status != DSPARK_OVER_CAPACITY || phase_ == Phase::kRuntime) throw Refusal(answer);
  log(Severity::kWARNING, answer + "; the profile allows it, but such a call will fail");
}

size_t OpInstance::workspace_bytes(const TensorList& list) const {
  const Params params = bound(list);
  return op_->workspace_bytes ? op_->workspace_bytes(&params) : 0;
}

void OpInstance::enqueue(const PluginTensorDesc* input_descs, const PluginTensorDesc* output_descs,
                         const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const {
  Params params = bound({input_descs, num_inputs_, output_descs, num_outputs()});
  if (!op_->launch) throw Refusal(named(kNoKernel));
  for (int i = 0; i < num_inputs_; ++i) {
    if (phase_ == Phase::kBuild && tensors_[i]->contents == Contents::kAddresses) {
      log(Severity::kWARNING, named(std::string("not run while an engine is built, when ") + tensors_[i]->name +
                                    " holds no addresses yet; serialize the engine and load it to run it"));
      return;
    }
    params.set(tensors_[i]->offset, inputs[i]);
  }
  for (int i = 0; i < num_outputs(); ++i) {
    const Tensor& spec = output(i);
    params.set(spec.offset, outputs[i]);
    if (spec.alias < 0 || inputs[spec.alias] == outputs[i]) continue;
    const Tensor& source = op_->inputs[spec.alias];
    if (phase_ == Phase::kRuntime) {
      throw Refusal(named(std::string(source.name) + " and " + spec.name +
                          " have different addresses, expected one, "
                          "as it is updated in place; bind one address to both names"));
    }
    params.set(source.offset, outputs[i]);  // timed in place on whatever memory TensorRT gives
  }
  params.set(op_->workspace_offset, workspace);
  const int status = op_->launch(&params, stream);
  if (status != DSPARK_OK) throw Refusal(kernel_refusal(status, params));
}

}  // namespace dspark
