#include "oscar/options.h"

#include <fmt/core.h>

#include <cmath>

namespace oscar {
namespace {

// NaN and infinities in a field are as wrong as values out of range. The bounds are floats as the
// fields are: 0.01f lies below 0.01.
Status CheckField(const char* name, float value, float low, float high) {
  if (std::isfinite(value) && value >= low && value <= high) return {};
  return InvalidArgument(fmt::format("{} is {}, must be between {} and {}", name, value, low, high))
      .WithParam(name);
}

}  // namespace

std::string_view NameOf(Device device) {
  switch (device) {
    case Device::kAuto:
      return "auto";
    case Device::kCpu:
      return "cpu";
    case Device::kCuda:
      return "cuda";
  }
  return "";
}

std::string_view NameOf(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kFailed:
      return "error";
    case FinishReason::kToolCalls:
      return "tool_calls";
  }
  return "";
}

Status SamplingOptions::Validate(int vocab_size) const {
  OSCAR_RETURN_IF_ERROR(CheckField("temperature", temperature, 0.0f, 100.0f));
  if (top_k < 0 || top_k > kMaxTopK) {
    return InvalidArgument(fmt::format("top_k is {}, must be between 0 and {}", top_k, kMaxTopK))
        .WithParam("top_k");
  }
  OSCAR_RETURN_IF_ERROR(CheckField("top_p", top_p, 0.0f, 1.0f));
  if (top_p == 0.0f) {
    return InvalidArgument("top_p is 0, must be greater than 0").WithParam("top_p");
  }
  OSCAR_RETURN_IF_ERROR(CheckField("min_p", min_p, 0.0f, 1.0f));
  OSCAR_RETURN_IF_ERROR(CheckField("repetition_penalty", repetition_penalty, 0.01f, 100.0f));
  OSCAR_RETURN_IF_ERROR(CheckField("presence_penalty", presence_penalty, -2.0f, 2.0f));
  OSCAR_RETURN_IF_ERROR(CheckField("frequency_penalty", frequency_penalty, -2.0f, 2.0f));
  for (const auto& [token, bias] : logit_bias) {
    if (token < 0 || token >= vocab_size) {
      return InvalidArgument(
                 fmt::format("logit_bias names token {}, the vocabulary has {}", token, vocab_size))
          .WithParam("logit_bias");
    }
    OSCAR_RETURN_IF_ERROR(CheckField("logit_bias", bias, -100.0f, 100.0f));
  }
  return {};
}

}  // namespace oscar
