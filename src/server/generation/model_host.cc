#include "generation/model_host.h"

#include <fmt/core.h>
#include <xxhash.h>

#include <ctime>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/file.h"
#include "base/log.h"
#include "oscar/version.h"
#include "simd/dispatch.h"

namespace oscar::server {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxTemplateBytes = uint64_t{1} << 20;

Result<ChatTemplate> LoadTemplate(const fs::path& directory, const fs::path& given) {
  if (given.empty()) return ChatTemplate::Load(directory);
  OSCAR_ASSIGN_OR_RETURN(TokenizerConfig config, LoadTokenizerConfig(directory));
  OSCAR_ASSIGN_OR_RETURN(std::string source, ReadFile(given, kMaxTemplateBytes));
  config.chat_templates = {{"default", std::move(source)}};
  return ChatTemplate::Create(config);
}

// What a request that names no sampling options gets. An explicit "do_sample": false asks for the
// most likely token.
SamplingOptions DefaultSampling(const ModelConfig& config) {
  SamplingOptions sampling;
  if (!config.do_sample.value_or(true)) {
    sampling.temperature = 0.0f;
    return sampling;
  }
  sampling.temperature = static_cast<float>(config.temperature.value_or(1.0));
  sampling.top_p = static_cast<float>(config.top_p.value_or(1.0));
  sampling.top_k = config.top_k.value_or(0);
  sampling.min_p = static_cast<float>(config.min_p.value_or(0.0));
  sampling.repetition_penalty = static_cast<float>(config.repetition_penalty.value_or(1.0));
  return sampling;
}

// A GPU reads weights at the speed of some hundred tokens; more in a pass costs little more.
constexpr int kCudaStepTokens = 2048;

std::string Fingerprint(LoadedModel& loaded) {
  const std::string text = fmt::format("{}|{:016x}|{}|{}", kVersion, loaded.model().fingerprint(),
                                       loaded.kv().Describe(), loaded.kv().cache().cell);
  return fmt::format("fp_{:016x}", XXH3_64bits(text.data(), text.size()));
}

std::string Properties(const LoadedModel& loaded, const EngineServiceOptions& engine) {
  const MemoryPlan& memory = loaded.memory();
  const nlohmann::ordered_json json = {{"architecture", loaded.spec().architecture},
                                       {"cache",
                                        {{"method", loaded.kv().method().name},
                                         {"description", loaded.kv().Describe()},
                                         {"budget_bytes", memory.kv_bytes},
                                         {"open_page_bytes", memory.open_page_bytes},
                                         {"sealed_page_bytes", memory.sealed_page_bytes},
                                         {"prefix_cache", engine.prefix_cache},
                                         {"deterministic", engine.deterministic}}},
                                       {"limits",
                                        {{"running", engine.max_running},
                                         {"waiting", engine.max_waiting},
                                         {"step_tokens", engine.step_tokens}}}};
  return json.dump();
}

std::string NameOfDirectory(const fs::path& directory) {
  const fs::path clean = directory.lexically_normal();
  return clean.has_filename() ? clean.filename().string() : clean.parent_path().filename().string();
}

}  // namespace

Result<std::unique_ptr<ModelHost>> ModelHost::Load(const ModelOptions& load,
                                                   const HostOptions& options) {
  std::unique_ptr<ModelHost> host(new ModelHost);
  // The small files first: their errors need no minute of reading weights.
  fs::path directory = load.model;
  if (directory.empty()) {
    OSCAR_ASSIGN_OR_RETURN(directory, FindDemoModel());
  }
  OSCAR_ASSIGN_OR_RETURN(host->tokenizer_, Tokenizer::Load(directory));
  auto served = std::make_shared<ServedModel>();
  auto chat = LoadTemplate(directory, options.chat_template);
  if (chat.has_value()) {
    host->chat_ = std::move(*chat);
    served->chat = &*host->chat_;
  } else if (options.chat_template.empty()) {
    served->no_chat_reason = chat.error().message();
    LogWarning("chat requests will be refused: {}", chat.error().message());
  } else {
    return Unexpected(chat.error());
  }

  ModelOptions sized = load;
  sized.max_sequences = options.engine.max_running;
  OSCAR_ASSIGN_OR_RETURN(host->loaded_, LoadedModel::Load(sized));
  LoadedModel& loaded = *host->loaded_;
  EngineServiceOptions engine = options.engine;
  if (loaded.device() == Device::kCuda) {
    engine.step_tokens = std::max(engine.step_tokens, kCudaStepTokens);
  }
  engine.max_context = loaded.max_context();
  host->engine_ = MakeEngineService(loaded.model(), loaded.pool(), loaded.threads(), engine);

  served->names = options.names;
  served->root = NameOfDirectory(directory);
  if (served->names.empty()) served->names = {served->root};
  served->created = static_cast<int64_t>(std::time(nullptr));
  served->engine = host->engine_.get();
  served->tokenizer = &*host->tokenizer_;
  served->limits = options.limits;
  served->limits.vocab_size = loaded.spec().vocab_size;
  if (options.use_generation_config) served->limits.defaults = DefaultSampling(loaded.config());
  served->stop_tokens = loaded.spec().stop_tokens;
  served->fingerprint = Fingerprint(loaded);
  served->properties = Properties(loaded, engine);
  served->device = loaded.device_name();
  served->simd = simd::TargetName(simd::ActiveTarget());
  host->served_ = std::move(served);
  return host;
}

}  // namespace oscar::server
