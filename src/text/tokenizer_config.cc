#include "text/tokenizer_config.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/json.h"

namespace oscar {
namespace {

constexpr uint64_t kMaxFileBytes = uint64_t{16} << 20;

// A token is its text, or an object that holds the text as "content".
std::optional<std::string> TokenText(const nlohmann::ordered_json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_object() && value.contains("content") && value["content"].is_string()) {
    return value["content"].get<std::string>();
  }
  return std::nullopt;
}

void SetDefaultTemplate(TokenizerConfig* config, std::string source) {
  for (auto& [name, existing] : config->chat_templates) {
    if (name == "default") {
      existing = std::move(source);
      return;
    }
  }
  config->chat_templates.emplace_back("default", std::move(source));
}

}  // namespace

std::optional<std::string> TokenizerConfig::Token(std::string_view role) const {
  for (const auto& [name, text] : special_tokens) {
    if (name == role) return text;
  }
  return std::nullopt;
}

Result<TokenizerConfig> ParseTokenizerConfig(std::string_view json, std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(const auto file, ParseOrderedJson(json, name));
  if (!file.is_object()) return Unexpected(DataLoss(fmt::format("{}: must be an object", name)));
  TokenizerConfig config;
  for (const char* role : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    const auto it = file.find(role);
    if (it == file.end() || it->is_null()) continue;
    auto text = TokenText(*it);
    if (!text.has_value()) {
      return Unexpected(DataLoss(fmt::format("{}: \"{}\" must be a token", name, role)));
    }
    config.special_tokens.emplace_back(role, std::move(*text));
  }
  if (const auto it = file.find("additional_special_tokens"); it != file.end() && it->is_array()) {
    for (const auto& token : *it) {
      if (auto text = TokenText(token)) {
        config.additional_special_tokens.push_back(std::move(*text));
      }
    }
  }
  const auto source = file.find("chat_template");
  if (source == file.end() || source->is_null()) return config;
  if (source->is_string()) {
    config.chat_templates.emplace_back("default", source->get<std::string>());
    return config;
  }
  if (!source->is_array()) {
    return Unexpected(DataLoss(
        fmt::format("{}: \"chat_template\" must be a string or a list of templates", name)));
  }
  for (const auto& item : *source) {
    if (!item.is_object() || !item.contains("name") || !item["name"].is_string() ||
        !item.contains("template") || !item["template"].is_string()) {
      return Unexpected(DataLoss(fmt::format(
          "{}: each of \"chat_template\" must have a \"name\" and a \"template\"", name)));
    }
    config.chat_templates.emplace_back(item["name"].get<std::string>(),
                                       item["template"].get<std::string>());
  }
  return config;
}

Result<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& folder) {
  TokenizerConfig config;
  const auto json_path = folder / "tokenizer_config.json";
  if (IsThere(json_path)) {
    OSCAR_ASSIGN_OR_RETURN(const std::string json, ReadFile(json_path, kMaxFileBytes));
    OSCAR_ASSIGN_OR_RETURN(config, ParseTokenizerConfig(json, json_path.string()));
  }
  const auto template_path = folder / "chat_template.jinja";
  if (IsThere(template_path)) {
    OSCAR_ASSIGN_OR_RETURN(std::string source, ReadFile(template_path, kMaxFileBytes));
    SetDefaultTemplate(&config, std::move(source));
  }
  return config;
}

}  // namespace oscar
