#include "generation/model_host.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/log.h"
#include "io/model_path.h"
#include "oscar/version.h"
#include "simd/dispatch.h"

namespace oscar::server {
namespace {

std::string Fingerprint(LoadedModel& loaded) {
  const std::string text = fmt::format("{}|{:016x}|{}|{}", kVersion, loaded.model().fingerprint(),
                                       loaded.kv().Describe(), loaded.kv().cache().cell);
  return fmt::format("fp_{:016x}", XXH3_64bits(text.data(), text.size()));
}

nlohmann::ordered_json StructuredOutput(const GrammarLimits& limits) {
  if (!GrammarCompiler::IsBuiltIn()) {
    return {{"available", false},
            {"reason", "built without xgrammar: scripts/setup.sh, then -DOSCAR_XGRAMMAR=ON"}};
  }
  return {{"available", true},
          {"compile_seconds", limits.seconds},
          {"compile_bytes", limits.worker_bytes},
          {"cache_bytes", limits.cache_bytes}};
}

std::string Properties(const LoadedModel& loaded, const EngineServiceOptions& engine,
                       const GrammarLimits& grammar) {
  const MemoryPlan& memory = loaded.memory();
  const nlohmann::ordered_json json = {
      {"architecture", loaded.spec().architecture},
      {"cache",
       {{"method", loaded.kv().method().name},
        {"description", loaded.kv().Describe()},
        {"budget_bytes", memory.kv_bytes},
        {"open_page_bytes", memory.open_page_bytes},
        {"sealed_page_bytes", memory.sealed_page_bytes},
        {"state_bytes", memory.state_bytes},
        {"bits_per_element_at_128k", loaded.kv().StoredBits(131072)},
        {"prefix_cache", engine.prefix_cache},
        {"deterministic", engine.deterministic}}},
      {"limits",
       {{"running", engine.max_running},
        {"waiting", engine.max_waiting},
        {"step_tokens", engine.step_tokens}}},
      {"structured_output", StructuredOutput(grammar)}};
  return json.dump();
}

}  // namespace

Result<std::unique_ptr<ModelHost>> ModelHost::Prepare(const ModelOptions& load,
                                                      const HostOptions& options) {
  std::unique_ptr<ModelHost> host(new ModelHost(options));
  OSCAR_ASSIGN_OR_RETURN(host->hosted_,
                         HostedModel::Prepare(load, options.dialogue, options.engine));
  const Dialogue& dialogue = host->hosted_->dialogue();
  if (!dialogue.has_chat()) {
    LogWarning("chat requests will be refused: {}", dialogue.no_chat_reason());
  } else {
    LogInfo("tool parser {}, reasoning parser {}", NameOf(dialogue.call_format()),
            NameOf(dialogue.reasoning()));
  }
  return host;
}

Result<std::shared_ptr<const ServedModel>> ModelHost::Load() {
  OSCAR_RETURN_IF_ERROR(hosted_->Load());
  LoadedModel& loaded = hosted_->loaded();
  auto served = std::make_shared<ServedModel>();
  served->names = options_.names;
  served->root = ModelName(loaded.directory());
  if (served->names.empty()) served->names = {served->root};
  served->created = static_cast<int64_t>(std::time(nullptr));
  served->engine = &hosted_->engine();
  served->dialogue = &hosted_->dialogue();
  if (GrammarCompiler::IsBuiltIn()) {
    GrammarCompilerOptions grammar;
    grammar.vocabulary = GrammarVocabularyOf(served->dialogue->tokenizer(),
                                             loaded.spec().vocab_size, served->dialogue->eos_ids());
    grammar.limits = options_.grammar;
    grammar.worker = options_.grammar_worker;
    grammars_ = std::make_unique<GrammarCompiler>(std::move(grammar));
    served->grammars = grammars_.get();
  }
  served->limits = options_.limits;
  served->limits.vocab_size = loaded.spec().vocab_size;
  served->limits.defaults = hosted_->dialogue().defaults().sampling;
  served->fingerprint = Fingerprint(loaded);
  served->properties = Properties(loaded, hosted_->engine_options(), options_.grammar);
  served->device = loaded.device_name();
  served->simd = simd::TargetName(simd::ActiveTarget());
  return served;
}

}  // namespace oscar::server
