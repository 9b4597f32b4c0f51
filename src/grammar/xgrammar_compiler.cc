// The only file that knows xgrammar. It throws; nothing leaves here as an exception. What it would
// only warn of (a keyword, an anchor, a look-ahead that it ignores) is an error here: an answer
// would not keep to it.
#include <fmt/core.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "grammar/local_compiler.h"
#include "grammar/schema_rewrite.h"
#include "grammar/thread_time.h"
#include "grammar/utf8_masks.h"

namespace oscar {
namespace {

thread_local std::string t_warning;  // the first since it was cleared

}  // namespace
}  // namespace oscar

// xgrammar's own logging, which we build it without (XGRAMMAR_LOG_CUSTOMIZE).
namespace xgrammar {

[[noreturn]] void LogFatalImpl(const std::string&, int, const std::string& message) {
  throw std::runtime_error(message);
}

void LogMessageImpl(const std::string&, int, int level, const std::string& message) {
  constexpr int kWarning = 2;
  if (level >= kWarning && oscar::t_warning.empty()) oscar::t_warning = message;
}

}  // namespace xgrammar

namespace oscar {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxMessage = 400;

std::string Shortened(std::string message) {
  // "Check failed: (condition) is false: what a client can use"
  constexpr std::string_view kMark = ") is false: ";
  if (const size_t at = message.find(kMark); at != std::string::npos) {
    message.erase(0, at + kMark.size());
  }
  while (!message.empty() && message.back() == '\n') message.pop_back();
  if (message.size() > kMaxMessage) message = message.substr(0, kMaxMessage) + "...";
  return message;
}

// What all grammars of a vocabulary share.
struct Shared {
  Utf8Masks utf8;
  bool has_stop_tokens = false;
  double mask_seconds = 0.0;
};

class Matcher final : public GrammarMatcher {
 public:
  Matcher(const xgrammar::CompiledGrammar& grammar, std::shared_ptr<const Shared> shared)
      : shared_(std::move(shared)),
        matcher_(grammar, std::nullopt,
                 /*terminate_without_stop_token=*/!shared_->has_stop_tokens) {}

  Status Fill(std::span<uint32_t> mask) override {
    const double begun = ThreadSeconds();
    OSCAR_RETURN_IF_ERROR(FillFromGrammar(mask));
    shared_->utf8.Apply(state_, mask);
    spent_ += ThreadSeconds() - begun;
    ++masks_;
    // A page fault or a cold cache now and then is not the grammar.
    constexpr double kPatience = 1.0;
    if (spent_ > kPatience + masks_ * shared_->mask_seconds) {
      return InvalidArgument(
          fmt::format("the grammar is too complex: its masks take {:.0f} ms each, and the limit is "
                      "{:.0f} ms",
                      spent_ * 1e3 / masks_, shared_->mask_seconds * 1e3));
    }
    if (std::ranges::all_of(mask, [](uint32_t word) { return word == 0; })) {
      return InvalidArgument("no token of this model is allowed here: the grammar has no answer");
    }
    return {};
  }
  bool Accept(int32_t token) override {
    try {
      if (!matcher_.AcceptToken(token)) return false;
    } catch (const std::exception&) {
      return false;
    }
    state_ = shared_->utf8.After(token);
    return true;
  }
  bool AcceptText(const std::string& text) override {
    try {
      if (!matcher_.AcceptString(text)) return false;
    } catch (const std::exception&) {
      return false;
    }
    if (!text.empty()) state_ = Utf8Masks::After(text);
    return true;
  }
  bool finished() const override { return matcher_.IsTerminated(); }

 private:
  Status FillFromGrammar(std::span<uint32_t> mask) {
    int64_t shape = static_cast<int64_t>(mask.size());
    DLTensor tensor{};
    tensor.data = mask.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 1;
    tensor.dtype = xgrammar::GetBitmaskDLType();
    tensor.shape = &shape;
    try {
      if (!matcher_.FillNextTokenBitmask(&tensor)) std::ranges::fill(mask, ~uint32_t{0});
    } catch (const std::exception& error) {
      return Internal(fmt::format("the mask of a grammar: {}", Shortened(error.what())));
    }
    return {};
  }

  std::shared_ptr<const Shared> shared_;
  xgrammar::GrammarMatcher matcher_;
  Utf8Masks::State state_ = Utf8Masks::kAnywhere;
  double spent_ = 0.0;  // seconds of processor time
  int64_t masks_ = 0;
};

class Compiled final : public CompiledGrammar {
 public:
  Compiled(xgrammar::CompiledGrammar grammar, std::shared_ptr<const Shared> shared)
      : grammar_(std::move(grammar)), shared_(std::move(shared)) {}
  uint64_t bytes() const override { return grammar_.MemorySizeBytes(); }
  std::unique_ptr<GrammarMatcher> NewMatcher() const override {
    return std::make_unique<Matcher>(grammar_, shared_);
  }

 private:
  xgrammar::CompiledGrammar grammar_;
  std::shared_ptr<const Shared> shared_;
};

// Half of the machine, as the engine needs the other.
int CompileThreads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8);
}

// JSON has control characters in no place but line breaks between its parts (and tabs there, which
// nobody misses). The library's strings of bounded length would let them through.
std::vector<std::string> WithoutControls(std::vector<std::string> tokens) {
  for (std::string& token : tokens) {
    const bool has_control = std::ranges::any_of(token, [](char c) {
      return static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\r';
    });
    if (has_control) token.clear();
  }
  return tokens;
}

// One vocabulary and the compiler of grammars over it.
struct Vocabulary {
  Vocabulary(const std::vector<std::string>& tokens, const std::vector<int32_t>& stop_tokens)
      : tokenizer(tokens, xgrammar::VocabType::RAW, static_cast<int>(tokens.size()), stop_tokens),
        compiler(tokenizer, CompileThreads(), /*cache_enabled=*/false) {}
  xgrammar::TokenizerInfo tokenizer;
  xgrammar::GrammarCompiler compiler;
};

class XgrammarCompiler final : public LocalCompiler {
 public:
  XgrammarCompiler(const GrammarVocabulary& vocabulary, double mask_seconds)
      : shared_(std::make_shared<const Shared>(
            Shared{Utf8Masks(vocabulary.tokens), !vocabulary.stop_tokens.empty(), mask_seconds})),
        vocab_size_(vocabulary.tokens.size()),
        text_(vocabulary.tokens, vocabulary.stop_tokens),
        json_(WithoutControls(vocabulary.tokens), vocabulary.stop_tokens) {}

  Result<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarSpec& spec) override {
    t_warning.clear();
    try {
      auto compiled = std::make_shared<Compiled>(Run(spec), shared_);
      if (!t_warning.empty()) return Unexpected(InvalidArgument(Shortened(t_warning)));
      // A grammar that only ever refers to itself has no answer.
      std::vector<uint32_t> mask((vocab_size_ + 31) / 32);
      OSCAR_RETURN_IF_ERROR(compiled->NewMatcher()->Fill(mask));
      return std::shared_ptr<const CompiledGrammar>(std::move(compiled));
    } catch (const std::bad_alloc&) {
      return Unexpected(ResourceExhausted("compiling needs more memory than it may have"));
    } catch (const std::exception& error) {
      return Unexpected(InvalidArgument(Shortened(error.what())));
    }
  }

 private:
  xgrammar::CompiledGrammar Run(const GrammarSpec& spec) {
    const auto schema = [&](const std::string& text, bool strict) {
      return json_.compiler.CompileJSONSchema(text, /*any_whitespace=*/true, std::nullopt,
                                              std::nullopt, strict, kMaxJsonWhitespace);
    };
    switch (spec.kind) {
      case GrammarSpec::Kind::kJsonObject:
        return schema(R"({"type": "object"})", /*strict=*/false);
      case GrammarSpec::Kind::kJsonSchema: {
        Json rewritten = Json::parse(spec.text);
        Rewrite(&rewritten, "");
        return schema(rewritten.dump(), /*strict=*/true);
      }
      case GrammarSpec::Kind::kRegex:
        return text_.compiler.CompileRegex(spec.text);
      case GrammarSpec::Kind::kChoice:
        return text_.compiler.CompileGrammar(ChoiceGrammar(spec.choices));
      case GrammarSpec::Kind::kGrammar:
        return text_.compiler.CompileGrammar(spec.text);
      case GrammarSpec::Kind::kJsonCalls:
      case GrammarSpec::Kind::kTextCalls: {
        Json tag = Json::parse(spec.text);
        const bool is_json = spec.kind == GrammarSpec::Kind::kJsonCalls;
        RewriteInTag(&tag, is_json ? "" : "<");  // with which the ends of values begin
        Vocabulary& vocabulary = is_json ? json_ : text_;
        return vocabulary.compiler.CompileStructuralTag(tag.dump());
      }
    }
    throw std::runtime_error("unknown kind of grammar");
  }

  static void Rewrite(Json* schema, std::string_view never) {
    RewriteSchema(schema, never);
    CheckPatterns(*schema);
  }
  static void RewriteInTag(Json* node, std::string_view never) {
    if (node->is_object() && node->value("type", Json()) == "json_schema") {
      return Rewrite(&node->at("json_schema"), never);
    }
    for (auto& child : *node) {
      if (child.is_structured()) RewriteInTag(&child, never);
    }
  }
  // What the library's automata cannot take it takes as a grammar, and then a pattern may put a
  // quote into a JSON string.
  static void CheckPattern(const std::string& pattern) {
    const Json alone = {{"type", "string"}, {"pattern", pattern}};
    const std::string grammar = xgrammar::Grammar::FromJSONSchema(alone.dump()).ToString();
    if (grammar.find("Regex(") != std::string::npos) return;
    throw std::runtime_error(
        fmt::format("the pattern {} is not supported in JSON: it has no automaton, or wants "
                    "characters that JSON escapes",
                    Json(pattern).dump()));
  }
  static void CheckPatterns(const Json& schema) {
    if (schema.is_object()) {
      const auto pattern = schema.find("pattern");
      if (pattern != schema.end() && pattern->is_string()) CheckPattern(*pattern);
      const auto names = schema.find("patternProperties");
      if (names != schema.end() && names->is_object()) {
        for (const auto& [name, value] : names->items()) CheckPattern(name);
      }
    }
    for (const auto& [name, child] : schema.items()) {
      if (!child.is_structured() || name == "const" || name == "enum" || name == "default" ||
          name == "examples") {
        continue;
      }
      CheckPatterns(child);
    }
  }

  std::shared_ptr<const Shared> shared_;
  size_t vocab_size_;
  Vocabulary text_, json_;
};

}  // namespace

bool HasLocalCompiler() { return true; }

Result<std::unique_ptr<LocalCompiler>> MakeLocalCompiler(const GrammarVocabulary& vocabulary,
                                                         double mask_seconds) {
  try {
    return std::make_unique<XgrammarCompiler>(vocabulary, mask_seconds);
  } catch (const std::exception& error) {
    return Unexpected(Internal(fmt::format("the vocabulary of a grammar: {}", error.what())));
  }
}

}  // namespace oscar
