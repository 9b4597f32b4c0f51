#include "grammar/compiler.h"

#include <fmt/core.h>

#include <condition_variable>
#include <list>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "grammar/local_compiler.h"
#include "grammar/worker.h"

namespace oscar {

GrammarVocabulary GrammarVocabularyOf(const Tokenizer& tokenizer, int vocab_size,
                                      std::span<const int32_t> stop_tokens) {
  GrammarVocabulary vocabulary;
  vocabulary.tokens.resize(static_cast<size_t>(vocab_size));
  for (TokenId id = 0; id < vocab_size; ++id) {
    std::string& bytes = vocabulary.tokens[static_cast<size_t>(id)];
    bytes = tokenizer.TokenBytes(id);
    // A byte that no text has: only a grammar that names the token itself allows it.
    if (!bytes.empty() && tokenizer.IsSpecial(id)) bytes.insert(0, 1, '\xff');
  }
  for (const int32_t id : stop_tokens) {
    if (id >= 0 && id < vocab_size) vocabulary.stop_tokens.push_back(id);
  }
  return vocabulary;
}

struct GrammarCompiler::Rep {
  using Compiled = std::shared_ptr<const CompiledGrammar>;
  struct Entry {
    std::string key;
    Compiled grammar;
    uint64_t bytes = 0;
  };

  explicit Rep(GrammarCompilerOptions given)
      : options(std::move(given)), worker(options.worker, options.vocabulary, options.limits) {}

  // Whoever holds `compiling`.
  Result<Compiled> CompileNow(const GrammarSpec& spec) {
    if (local == nullptr) {
      OSCAR_ASSIGN_OR_RETURN(local,
                             MakeLocalCompiler(options.vocabulary, options.limits.mask_seconds));
    }
    // What has been compiled there within its limits is compiled again here: that takes less time
    // than sending it over.
    if (!options.worker.empty()) OSCAR_RETURN_IF_ERROR(worker.Try(spec));
    return local->Compile(spec);
  }

  Compiled Find(const std::string& key) {
    const auto found = index.find(key);
    if (found == index.end()) return nullptr;
    entries.splice(entries.begin(), entries, found->second);
    return entries.front().grammar;
  }

  void Keep(const std::string& key, const Compiled& grammar) {
    const uint64_t size = grammar->bytes() + key.size();
    if (size > options.limits.cache_bytes) return;
    entries.push_front({key, grammar, size});
    index[key] = entries.begin();
    stats.bytes += size;
    while (stats.bytes > options.limits.cache_bytes) {
      stats.bytes -= entries.back().bytes;
      index.erase(entries.back().key);
      entries.pop_back();
    }
    stats.entries = entries.size();
  }

  const GrammarCompilerOptions options;
  mutable std::mutex mutex;  // of what follows
  std::condition_variable changed;
  int waiting = 0;
  bool compiling = false;
  std::list<Entry> entries;  // most recently used first
  std::unordered_map<std::string, std::list<Entry>::iterator> index;
  GrammarCacheStats stats;
  // Of whoever set `compiling`.
  std::unique_ptr<LocalCompiler> local;
  GrammarWorker worker;
};

bool GrammarCompiler::IsBuiltIn() { return HasLocalCompiler(); }

GrammarCompiler::GrammarCompiler(GrammarCompilerOptions options)
    : rep_(std::make_unique<Rep>(std::move(options))) {}
GrammarCompiler::~GrammarCompiler() = default;

Result<std::shared_ptr<const CompiledGrammar>> GrammarCompiler::Compile(const GrammarSpec& spec) {
  OSCAR_RETURN_IF_ERROR(CheckGrammarSpec(spec));
  const std::string key = spec.Key();
  std::unique_lock lock(rep_->mutex);
  if (auto grammar = rep_->Find(key)) {
    ++rep_->stats.hits;
    return grammar;
  }
  if (rep_->waiting >= rep_->options.limits.waiting) {
    return Unexpected(Unavailable(
        fmt::format("{} requests wait for their grammars already; try again", rep_->waiting)));
  }
  ++rep_->waiting;
  rep_->changed.wait(lock, [&] { return !rep_->compiling; });
  --rep_->waiting;
  // Another may have asked for the same.
  if (auto grammar = rep_->Find(key)) {
    ++rep_->stats.hits;
    return grammar;
  }
  rep_->compiling = true;
  lock.unlock();
  auto compiled = rep_->CompileNow(spec);
  lock.lock();
  rep_->compiling = false;
  rep_->changed.notify_all();
  if (!compiled.has_value()) {
    ++rep_->stats.refused;
    return compiled;
  }
  ++rep_->stats.compiled;
  rep_->Keep(key, *compiled);
  return compiled;
}

GrammarCacheStats GrammarCompiler::stats() const {
  const std::lock_guard lock(rep_->mutex);
  return rep_->stats;
}

const GrammarLimits& GrammarCompiler::limits() const { return rep_->options.limits; }

}  // namespace oscar
