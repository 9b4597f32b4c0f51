#include "text/jinja/template.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "text/jinja/interpreter.h"
#include "text/jinja/parser.h"

namespace oscar::jinja {

struct Template::Rep {
  SyntaxTree tree;
};

Template::Template(std::unique_ptr<const Rep> rep) : rep_(std::move(rep)) {}
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::~Template() = default;

Result<Template> Template::Parse(std::string_view source) {
  if (source.size() > kMaxSourceBytes) {
    return Unexpected(OutOfRange(
        fmt::format("template of {} bytes; the limit is {}", source.size(), kMaxSourceBytes)));
  }
  OSCAR_ASSIGN_OR_RETURN(SyntaxTree tree, ParseTemplate(source));
  return Template(std::make_unique<const Rep>(Rep{std::move(tree)}));
}

Result<MarkedText> Template::Render(const nlohmann::ordered_json& input,
                                    const nlohmann::ordered_json& trusted,
                                    const RenderOptions& options) const {
  Interpreter interpreter(rep_->tree, options);
  // Only the variables that the template names are converted.
  for (size_t symbol = 0; symbol < rep_->tree.names.size(); ++symbol) {
    const std::string& name = rep_->tree.names[symbol];
    for (const bool is_input : {false, true}) {
      const auto& source = is_input ? input : trusted;
      if (!source.is_object()) continue;
      const auto it = source.find(name);
      if (it == source.end()) continue;
      auto value = FromJson(*it, is_input);
      if (!value.has_value()) return Unexpected(value.error().WithContext(name));
      interpreter.SetGlobal(static_cast<Symbol>(symbol), std::move(value).value());
      break;
    }
  }
  return interpreter.Render();
}

}  // namespace oscar::jinja
