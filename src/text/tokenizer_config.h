// What a model folder says about special tokens and chat templates: tokenizer_config.json and
// chat_template.jinja. A plain value.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

struct TokenizerConfig {
  // "bos_token", "eos_token", "pad_token" and so on, with their text; those that are null or
  // missing are not listed.
  std::vector<std::pair<std::string, std::string>> special_tokens;
  std::vector<std::string> additional_special_tokens;
  // Name and source. One template is called "default"; a file may hold several.
  std::vector<std::pair<std::string, std::string>> chat_templates;

  // Text of a special token by its role ("eos_token"); nothing where it has none.
  std::optional<std::string> Token(std::string_view role) const;
};

Result<TokenizerConfig> ParseTokenizerConfig(std::string_view json, std::string_view name);
// Reads the folder of a model. A missing tokenizer_config.json is an empty configuration; a
// chat_template.jinja beside it takes the place of the default template.
Result<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& folder);

}  // namespace oscar
