// The only file that knows xgrammar. It throws; nothing leaves here as an exception. What it would
// only warn of (a keyword, an anchor, a look-ahead that it ignores) is an error here: an answer
// would not keep to it.
#include <fmt/core.h>
#include <xgrammar/xgrammar.h>

#include <algorithm>
#include <exception>
#include <new>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/check.h"
#include "grammar/local_compiler.h"

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

// At most this much whitespace between the parts of JSON: enough for a line break and the
// indentation of seven levels. Without a bound a model can write spaces for ever.
constexpr int kMaxWhitespace = 16;
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

class Matcher final : public GrammarMatcher {
 public:
  Matcher(const xgrammar::CompiledGrammar& grammar, bool has_stop_tokens)
      : matcher_(grammar, std::nullopt, /*terminate_without_stop_token=*/!has_stop_tokens) {}

  Status Fill(std::span<uint32_t> mask) override {
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
    if (std::ranges::all_of(mask, [](uint32_t word) { return word == 0; })) {
      return InvalidArgument("no token of this model is allowed here: the grammar has no answer");
    }
    return {};
  }
  bool Accept(int32_t token) override {
    try {
      return matcher_.AcceptToken(token);
    } catch (const std::exception&) {
      return false;
    }
  }
  bool AcceptText(const std::string& text) override {
    try {
      return matcher_.AcceptString(text);
    } catch (const std::exception&) {
      return false;
    }
  }
  bool finished() const override { return matcher_.IsTerminated(); }

 private:
  xgrammar::GrammarMatcher matcher_;
};

class Compiled final : public CompiledGrammar {
 public:
  Compiled(xgrammar::CompiledGrammar grammar, bool has_stop_tokens)
      : grammar_(std::move(grammar)), has_stop_tokens_(has_stop_tokens) {}
  uint64_t bytes() const override { return grammar_.MemorySizeBytes(); }
  std::unique_ptr<GrammarMatcher> NewMatcher() const override {
    return std::make_unique<Matcher>(grammar_, has_stop_tokens_);
  }

 private:
  xgrammar::CompiledGrammar grammar_;
  bool has_stop_tokens_;
};

// Half of the machine, as the engine needs the other.
int CompileThreads() {
  return std::clamp(static_cast<int>(std::thread::hardware_concurrency()) / 2, 1, 8);
}

class XgrammarCompiler final : public LocalCompiler {
 public:
  explicit XgrammarCompiler(const GrammarVocabulary& vocabulary)
      : has_stop_tokens_(!vocabulary.stop_tokens.empty()),
        tokenizer_(vocabulary.tokens, xgrammar::VocabType::RAW,
                   static_cast<int>(vocabulary.tokens.size()), vocabulary.stop_tokens),
        compiler_(tokenizer_, CompileThreads(), /*cache_enabled=*/false) {}

  Result<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarSpec& spec) override {
    t_warning.clear();
    try {
      auto compiled = std::make_shared<Compiled>(Run(spec), has_stop_tokens_);
      if (!t_warning.empty()) return Unexpected(InvalidArgument(Shortened(t_warning)));
      // A grammar that only ever refers to itself has no answer.
      std::vector<uint32_t> mask((static_cast<size_t>(tokenizer_.GetVocabSize()) + 31) / 32);
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
      return compiler_.CompileJSONSchema(text, /*any_whitespace=*/true, std::nullopt, std::nullopt,
                                         strict, kMaxWhitespace);
    };
    switch (spec.kind) {
      case GrammarSpec::Kind::kJsonObject:
        return schema(R"({"type": "object"})", /*strict=*/false);
      case GrammarSpec::Kind::kJsonSchema:
        return schema(spec.text, /*strict=*/true);
      case GrammarSpec::Kind::kRegex:
        return compiler_.CompileRegex(spec.text);
      case GrammarSpec::Kind::kChoice:
        return compiler_.CompileGrammar(ChoiceGrammar(spec.choices));
      case GrammarSpec::Kind::kGrammar:
        return compiler_.CompileGrammar(spec.text);
      case GrammarSpec::Kind::kTags:
        return compiler_.CompileStructuralTag(spec.text);
    }
    throw std::runtime_error("unknown kind of grammar");
  }

  bool has_stop_tokens_;
  xgrammar::TokenizerInfo tokenizer_;
  xgrammar::GrammarCompiler compiler_;
};

}  // namespace

bool HasLocalCompiler() { return true; }

Result<std::unique_ptr<LocalCompiler>> MakeLocalCompiler(const GrammarVocabulary& vocabulary) {
  try {
    return std::make_unique<XgrammarCompiler>(vocabulary);
  } catch (const std::exception& error) {
    return Unexpected(Internal(fmt::format("the vocabulary of a grammar: {}", error.what())));
  }
}

}  // namespace oscar
