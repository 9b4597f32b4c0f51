// Chat templates: a subset of Jinja, rendered as jinja2 renders it in the sandbox that the
// transformers library sets up (trim_blocks, lstrip_blocks, loop controls, tojson without HTML
// escapes, raise_exception, strftime_now). A parsed template is immutable; render it from any
// thread.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>

#include "oscar/status.h"
#include "text/jinja/marked_text.h"

namespace oscar::jinja {

struct RenderLimits {
  size_t output_bytes = size_t{64} << 20;
  size_t loop_iterations = 1'000'000;
  size_t steps = 20'000'000;
  int depth = 400;  // nested expressions, blocks and calls
  // Bytes of text and lists made on the way, per rendering: base plus a multiple of the input.
  size_t work_bytes = size_t{256} << 20;
};

struct RenderOptions {
  RenderLimits limits{};
  // What strftime_now reads, in seconds since 1970 UTC; the present, in local time, when absent.
  std::optional<int64_t> now;
};

class Template {
 public:
  static constexpr size_t kMaxSourceBytes = size_t{1} << 20;

  // Errors name the line: "template line 3: no filter named "x"".
  static Result<Template> Parse(std::string_view source);
  Template(Template&&) noexcept;
  Template& operator=(Template&&) noexcept;
  ~Template();

  // `input` holds variables of the request: their strings are marked in the result. `trusted`
  // holds variables of the model (bos_token and its kin). Both are objects, or null for none;
  // a name in both means the trusted one.
  Result<MarkedText> Render(const nlohmann::ordered_json& input,
                            const nlohmann::ordered_json& trusted,
                            const RenderOptions& options = {}) const;

 private:
  struct Rep;
  explicit Template(std::unique_ptr<const Rep> rep);
  std::unique_ptr<const Rep> rep_;
};

}  // namespace oscar::jinja
