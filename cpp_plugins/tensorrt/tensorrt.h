// TensorRT's headers, which of its plugin interfaces they have, and its log.
#pragma once
#include <NvInferRuntime.h>

#include <stdexcept>
#include <string>

// TRT_MAJOR_RTX is defined by TensorRT-RTX, whose own versions count from 1.
#if defined(TRT_MAJOR_RTX) || NV_TENSORRT_MAJOR >= 10
#define DSPARK_PLUGIN_V3 1
#else
#define DSPARK_PLUGIN_V3 0
#endif

namespace dspark {

constexpr const char* kNamespace = "dspark";

using Severity = nvinfer1::ILogger::Severity;

// Write a line to TensorRT's logger, or to stderr where there is none.
void log(Severity severity, const std::string& line) noexcept;

// Why a plugin does not do what it was asked. Never leaves this library: see `guarded`.
struct Refusal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The value of body(), or `fallback` and a line in the log if it throws: nothing may be thrown into TensorRT.
template <typename R, typename Body>
R guarded(R fallback, Body&& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    log(Severity::kERROR, error.what());
    return fallback;
  }
}

}  // namespace dspark
