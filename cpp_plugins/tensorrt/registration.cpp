// How TensorRT gets to know the plugins, and how they write to its log.
//
// Opened with dlopen (ctypes, polygraphy --plugins, trtexec --staticPlugins), the library registers its creators
// itself, with every TensorRT of the right kind that the process has loaded. IPluginRegistry::loadLibrary opens
// it too, then calls `getCreators` and refuses the library if one of them is registered already; so `getCreators`
// first withdraws what the library registered by itself. The library must be linked with -z nodelete: no dlclose
// may take away code that a registry or a plan still points to.
//
// Nothing is linked to TensorRT: its libraries differ in name by product and version, and Python loads them out
// of sight of the global symbols. They are looked up by name among the libraries that are loaded.
#include <dlfcn.h>

#include <cstdio>
#include <utility>

#include "op_instance.h"

#define DSPARK_API extern "C" __attribute__((visibility("default")))
#define DSPARK_TEXT_(x) #x
#define DSPARK_TEXT(x) DSPARK_TEXT_(x)

namespace dspark {
namespace {

// Libraries that speak the interfaces of the headers this is compiled with; ILogger differs between majors.
constexpr const char* kLibraries[] = {
#if defined(TRT_MAJOR_RTX)
    "libtensorrt_rtx.so." DSPARK_TEXT(TRT_MAJOR_RTX),
#else
    "libnvinfer.so." DSPARK_TEXT(NV_TENSORRT_MAJOR),
#if NV_TENSORRT_MAJOR == 11
    "libtensorrt_rtx.so.1",
#endif
#endif
};

// One creator per operation, in the order of ops().
const std::vector<Creator*>& creators() {
  static const auto* const all = [] {
    auto* const made = new std::vector<Creator*>;
    for (const Op& op : ops()) made->push_back(make_creator(op));
    return made;
  }();
  return *all;
}

// Whether a library has to stay loaded after it has answered: what is remembered of its objects must not dangle.
enum class Answer { kUsedNow, kRemembered };

// What a function of no arguments returns, in each library that is loaded and has it.
template <typename T>
std::vector<std::pair<const char*, T*>> ask_loaded(const char* function, Answer use) {
  std::vector<std::pair<const char*, T*>> answers;
  for (const char* library : kLibraries) {
    void* const handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    auto* const get = handle ? reinterpret_cast<T* (*)()>(dlsym(handle, function)) : nullptr;
    T* const answer = get ? get() : nullptr;
    if (answer) answers.emplace_back(library, answer);
    if (handle && !(answer && use == Answer::kRemembered)) dlclose(handle);
  }
  return answers;
}

nvinfer1::ILoggerFinder* logger_finder = nullptr;
std::vector<std::pair<nvinfer1::IPluginRegistry*, Creator*>> registered;

bool register_creators() {
  const auto registries = ask_loaded<nvinfer1::IPluginRegistry>("getPluginRegistry", Answer::kRemembered);
  for (const auto& [library, registry] : registries) {
    std::string refused;
    for (size_t i = 0; i < ops().size(); ++i) {
      if (registry->registerCreator(*creators()[i], kNamespace)) {
        registered.emplace_back(registry, creators()[i]);
      } else {
        refused += std::string(" ") + ops()[i].name;
      }
    }
    if (!refused.empty()) {
      log(Severity::kERROR,
          std::string(library) + " has creators in namespace " + kNamespace + " already, which stay, of" + refused);
    }
  }
  if (registries.empty()) {
    log(Severity::kWARNING, std::string("libdspark_trt_plugins.so registered no plugins, as ") + kLibraries[0] +
                                " is not loaded in this process; load TensorRT first, or use loadLibrary");
  }
  return !registries.empty();
}

const bool registered_at_load = guarded(false, register_creators);

}  // namespace

void log(Severity severity, const std::string& line) noexcept {
  nvinfer1::ILogger* logger = logger_finder ? logger_finder->findLogger() : nullptr;
  for (const auto& [_, other] : ask_loaded<nvinfer1::ILogger>("getLogger", Answer::kUsedNow)) {
    logger = logger ? logger : other;
  }
  if (logger) {
    logger->log(severity, line.c_str());
  } else if (severity <= Severity::kWARNING) {
    std::fprintf(stderr, "%s\n", line.c_str());
  }
}

}  // namespace dspark

DSPARK_API void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
  // Not one that a TensorRT of another major hands over: it has another layout.
  const auto registries =
      dspark::ask_loaded<nvinfer1::IPluginRegistry>("getPluginRegistry", dspark::Answer::kRemembered);
  dspark::logger_finder = registries.empty() ? nullptr : finder;
}

#if DSPARK_PLUGIN_V3
DSPARK_API dspark::Creator* const* getCreators(int32_t& count) {
#else
DSPARK_API dspark::Creator* const* getPluginCreators(int32_t& count) {
#endif
  for (const auto& [registry, creator] : dspark::registered) registry->deregisterCreator(*creator);
  dspark::registered.clear();
  count = static_cast<int32_t>(dspark::creators().size());
  return dspark::creators().data();
}
