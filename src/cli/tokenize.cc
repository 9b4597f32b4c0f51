// oscar tokenize: the tokens of a text, or the text of tokens, from standard input.
#include <fmt/core.h>

#include <CLI/App.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/file.h"
#include "cli/command.h"
#include "cli/model_options.h"
#include "cli/validators.h"
#include "engine/loaded_model.h"
#include "hub/hub.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

struct TokenizeOptions {
  std::string model;
  bool offline = false;
  bool decode = false;
  bool json = false;
  bool parse_special = false;
  bool add_special = false;
};

Result<std::string> ReadStandardInput() {
  std::string text;
  std::vector<char> buffer(size_t{1} << 16);
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), stdin)) {
    text.append(buffer.data(), count);
    if (text.size() > Tokenizer::kMaxTextBytes) {
      return Unexpected(OutOfRange(
          fmt::format("standard input is longer than {} bytes", Tokenizer::kMaxTextBytes)));
    }
  }
  if (std::ferror(stdin) != 0) return Unexpected(Unavailable("cannot read standard input"));
  return text;
}

// Ids divided by spaces, newlines or commas, perhaps in brackets: what this command prints, and
// what a JSON list looks like.
Result<std::vector<TokenId>> ParseIds(std::string_view text, const Tokenizer& tokenizer) {
  std::vector<TokenId> ids;
  constexpr std::string_view kDividers = " \t\r\n,[]";
  for (size_t at = text.find_first_not_of(kDividers); at != std::string_view::npos;
       at = text.find_first_not_of(kDividers, at)) {
    const size_t end = std::min(text.find_first_of(kDividers, at), text.size());
    const std::string_view word = text.substr(at, end - at);
    TokenId id = kNoToken;
    const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc() || stop != word.data() + word.size()) {
      return Unexpected(InvalidArgument(
          fmt::format("standard input, byte {}: {:?} is not a token id", at, word.substr(0, 40))));
    }
    if (!tokenizer.IsToken(id)) {
      return Unexpected(InvalidArgument(
          fmt::format("standard input, byte {}: the vocabulary has no token {}", at, id)));
    }
    ids.push_back(id);
    at = end;
  }
  return ids;
}

Status RunTokenize(const TokenizeOptions& options) {
  std::filesystem::path model = options.model;
  if (options.model.empty()) {
    OSCAR_ASSIGN_OR_RETURN(model, FindDemoModel());
  } else if (!Exists(model)) {  // a name on the hub, perhaps
    OSCAR_ASSIGN_OR_RETURN(model, hub::ObtainModel(model, ModelParts::kText, options.offline));
  }
  OSCAR_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::Load(model));
  OSCAR_ASSIGN_OR_RETURN(const std::string input, ReadStandardInput());
  if (options.decode) {
    OSCAR_ASSIGN_OR_RETURN(const auto ids, ParseIds(input, tokenizer));
    const std::string text = tokenizer.Decode(ids, !options.parse_special);
    if (options.json) {
      fmt::print("{}\n", ordered_json{{"count", ids.size()}, {"text", text}}.dump());
    } else {
      std::fwrite(text.data(), 1, text.size(), stdout);
    }
    return {};
  }
  OSCAR_ASSIGN_OR_RETURN(const auto ids,
                         tokenizer.Encode(input, {.parse_special = options.parse_special,
                                                  .add_special = options.add_special}));
  if (options.json) {
    ordered_json tokens = ordered_json::array();
    for (const TokenId id : ids) {
      const std::string_view bytes = tokenizer.TokenBytes(id);
      tokens.push_back({{"id", id},
                        {"text", ReplaceInvalidUtf8(bytes)},
                        {"bytes", std::vector<uint8_t>(bytes.begin(), bytes.end())},
                        {"special", tokenizer.IsSpecial(id)}});
    }
    const ordered_json out = {{"count", ids.size()},
                              {"bytes", input.size()},
                              {"vocab_size", tokenizer.vocab_size()},
                              {"tokens", std::move(tokens)}};
    fmt::print("{}\n", out.dump());
    return {};
  }
  std::string line;
  for (const TokenId id : ids) line += fmt::format("{}{}", line.empty() ? "" : " ", id);
  fmt::print("{}\n", line);
  return {};
}

}  // namespace

void AddTokenizeCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<TokenizeOptions>();
  CLI::App* command = app.add_subcommand(
      "tokenize", "Print the token ids of standard input, or with --decode the text of ids");
  command
      ->add_option("--model", options->model,
                   "Folder of a model, a tokenizer.json, or a name on the Hugging Face hub; "
                   "default: the demo model")
      ->check(NotEmpty())
      ->type_name("DIR");
  AddOfflineFlag(*command, options->offline);
  command->add_flag("--decode", options->decode, "Read ids, write text");
  command->add_flag("--parse-special", options->parse_special,
                    "Read special tokens in the text as such; with --decode: write them");
  command->add_flag("--add-special", options->add_special,
                    "Add the tokens that the model wants around a text (a begin token)");
  command->add_flag("--json", options->json, "Print JSON");
  command->callback([options, &run] { run = [options] { return RunTokenize(*options); }; });
}

}  // namespace oscar::cli
