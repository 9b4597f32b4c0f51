// GrammarCompiler: from a GrammarSpec to masks over a tokenizer's vocabulary. Compiled grammars are
// kept, least recently used out first, under a budget of bytes. A new one is first compiled in a
// separate process with limits of time and memory, and here only when it has kept to them: no
// schema, however hostile, costs more than twice those. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "grammar/spec.h"
#include "oscar/status.h"
#include "text/tokenizer.h"

namespace oscar {

// The bytes of every token that may be part of a constrained answer.
struct GrammarVocabulary {
  // By id. Empty: never (holes, padding). Control tokens begin with a byte that no text has.
  std::vector<std::string> tokens;
  std::vector<int32_t> stop_tokens;  // may end an answer that is complete
};
// `vocab_size` is the model's, which may be larger than the tokenizer's.
GrammarVocabulary GrammarVocabularyOf(const Tokenizer& tokenizer, int vocab_size,
                                      std::span<const int32_t> stop_tokens);

// Where one answer stands. One thread at a time.
class GrammarMatcher {
 public:
  virtual ~GrammarMatcher() = default;
  // Which tokens may come next: bit t % 32 of word t / 32, for the whole vocabulary. An error where
  // none may, which a vocabulary without some byte can bring about.
  virtual Status Fill(std::span<uint32_t> mask) = 0;
  // False where the token may not come next; nothing has changed then.
  virtual bool Accept(int32_t token) = 0;
  // Text that belongs to the answer, where it is only a part of a token.
  virtual bool AcceptText(const std::string& text) = 0;
  // A stop token was accepted, or there is none and the answer can only end here.
  virtual bool finished() const = 0;
};

// Immutable; share it between threads.
class CompiledGrammar {
 public:
  virtual ~CompiledGrammar() = default;
  virtual uint64_t bytes() const = 0;  // of memory, about
  virtual std::unique_ptr<GrammarMatcher> NewMatcher() const = 0;
};

struct GrammarLimits {
  double seconds = 20.0;                         // of compiling one grammar
  double mask_seconds = 0.02;                    // of one mask, in the mean
  uint64_t worker_bytes = uint64_t{1} << 30;     // address space of the process that compiles
  uint64_t compiled_bytes = uint64_t{64} << 20;  // of one compiled grammar
  uint64_t cache_bytes = uint64_t{256} << 20;    // of all that are kept
  int waiting = 16;                              // requests that wait for the compiler, at most
};

struct GrammarCompilerOptions {
  GrammarVocabulary vocabulary;
  GrammarLimits limits;
  // A program that, called with the argument kGrammarWorkerArgument, does RunGrammarWorker().
  // Empty: grammars are compiled in this process, where nothing bounds time and memory: for callers
  // who wrote them.
  std::string worker;
};

struct GrammarCacheStats {
  uint64_t compiled = 0, hits = 0, refused = 0;
  uint64_t entries = 0, bytes = 0;
};

class GrammarCompiler {
 public:
  // Whether this build has a compiler; without, every Compile is kUnimplemented.
  static bool IsBuiltIn();

  explicit GrammarCompiler(GrammarCompilerOptions options);
  ~GrammarCompiler();

  // Waits while others compile. kInvalidArgument: the spec is at fault, its limits included;
  // kUnavailable: too many wait.
  Result<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarSpec& spec);
  GrammarCacheStats stats() const;
  const GrammarLimits& limits() const;

 private:
  struct Rep;
  std::unique_ptr<Rep> rep_;
};

inline constexpr const char* kGrammarWorkerArgument = "grammar-worker";
// The compiler's process: reads a vocabulary and specs from standard input, writes compiled
// grammars to standard output, until the input ends. The exit code.
int RunGrammarWorker();

}  // namespace oscar
