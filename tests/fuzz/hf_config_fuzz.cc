// config.json and generation_config.json, divided by the first NUL, and --rope-scaling.
#include "fuzz_util.h"
#include "io/hf_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  const std::string_view text = FuzzText(data, size);
  const size_t nul = text.find('\0');
  const std::string_view generation =
      nul == std::string_view::npos ? std::string_view() : text.substr(nul + 1);
  const auto config = ParseModelConfig(text.substr(0, nul), generation, "d/config.json");
  if (config) {
    OSCAR_CHECK(config->vocab_size > 0 && config->hidden_size > 0 && config->num_layers > 0);
    OSCAR_CHECK(config->num_attention_heads % config->num_kv_heads == 0);
    OSCAR_CHECK(config->rotary_dim % 2 == 0 && config->rotary_dim <= config->head_dim);
    OSCAR_CHECK(config->rotary_dim > 0 && config->rms_norm_eps > 0 && config->rope_theta >= 1);
    OSCAR_CHECK(config->rope_scaling.factor >= 1);
    for (const int32_t id : config->eos_token_ids) OSCAR_CHECK(id >= 0 && id < config->vocab_size);
  } else {
    CheckError(config.error(), "d/");
  }
  const auto scaling = ParseRopeScaling(text.substr(0, 64), 4096);
  if (!scaling) CheckError(scaling.error(), "--rope-scaling: ");
  return 0;
}
