// What a caller can ask for: which model on which cache, and how to sample tokens. Plain values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "oscar/status.h"

namespace oscar {

enum class Device : uint8_t {
  kAuto,  // the GPU where one is found that can run the model, the CPU otherwise
  kCpu,
  kCuda,
};
// "auto", "cpu", "cuda".
std::string_view NameOf(Device device);

enum class WeightFormat : uint8_t {
  kCheckpoint,  // as they are stored
  kFp8,         // the layers' matrices as FP8 E4M3 with one scale per output
};

struct ModelOptions {
  // A Hugging Face model directory; empty takes the demo model. With random weights a config.json
  // alone is enough.
  std::filesystem::path model;
  // The cache method, by its `--kv` name.
  std::string kv = "oscar+";
  // A rotation file or directory, with sensitivity.json or of that alone. Empty: the folder
  // rotation/ of the model for methods that take bits, where it has sensitivities; "none": none.
  std::filesystem::path rotation;
  // History bits per K/V number of methods that take bits, 2.25 to 4.25; which heads get more than
  // two is decided by sensitivities. Unset: the default (docs/quantizers.md).
  std::optional<double> bits;
  // Dims that share one scale, and windows in tokens (multiples of 64); unset takes the method's.
  std::optional<int> group_dims, sink, recent;
  // Clip ratios of methods that clip; unset takes the rotation's or the method's.
  std::optional<float> k_clip, v_clip;
  // Prompt tokens seen exactly together; a multiple of 64.
  int prefill_cell = 4096;
  // Windows end at the token instead of at the page of 64, as methods are defined on paper: for
  // evaluation, on the CPU.
  bool token_windows = false;
  // Bytes of cache pages; 0 takes most of what is free.
  uint64_t kv_memory = 0;
  // Tokens of context; 0 takes the model's own limit.
  int64_t max_context = 0;
  // "yarn:4", "linear:2", ...; empty takes the config's.
  std::string rope_scaling;
  // Weights of the right shapes and no meaning, for speed work.
  bool random_weights = false;
  uint64_t weights_seed = 0;
  WeightFormat weights = WeightFormat::kCheckpoint;
  Device device = Device::kAuto;
  // 0: one per core.
  int num_threads = 0;
  // Prompt tokens in one pass: speed, never answers. 0: 512 on the CPU, 4096 on a GPU.
  int chunk = 0;
  // On a GPU: sequences that generate in one step, at most, without extra launches.
  int max_sequences = 128;
  // On a GPU: products whose sums do not depend on the batch, at the cost of slower prompts.
  bool batch_invariant = false;
  // Every sum in one order: the same bits on any CPU and on a GPU, at a fraction of the speed. For
  // comparing machines, and tables that anyone can repeat to the digit.
  bool portable = false;
};

// The order of application: logit bias and penalties, temperature, top-k, top-p, min-p, sample.
struct SamplingOptions {
  // 0 takes the most likely token (the lowest id among equals) and ignores the rest.
  float temperature = 1.0f;
  // Keep the k most likely tokens; 0 keeps all.
  int top_k = 0;
  // Keep the smallest set of most likely tokens whose probability reaches top_p.
  float top_p = 1.0f;
  // Keep tokens at least min_p times as likely as the most likely one.
  float min_p = 0.0f;
  // > 1 makes tokens seen in the prompt or the output less likely (logits divided or multiplied).
  float repetition_penalty = 1.0f;
  // Subtracted once from the logit of every token of the output so far.
  float presence_penalty = 0.0f;
  // Subtracted as often as the token occurs in the output so far.
  float frequency_penalty = 0.0f;
  // Added to the logit of a token id.
  std::vector<std::pair<int32_t, float>> logit_bias;
  // The same seed, prompt and options give the same answer. Unset takes one from the system.
  std::optional<uint64_t> seed;

  static constexpr int kMaxTopK = 1'000'000'000;
  // Names the first field that is out of range, in Status::param.
  Status Validate(int vocab_size) const;
};

// What the model does with the tools of a request.
enum class ToolChoice : uint8_t {
  kAuto,      // it calls them or answers, as it likes
  kNone,      // it answers and does not see them
  kRequired,  // it calls at least one
  kNamed,     // it calls one by its name
};

// What to ask of one answer. What is unset takes the model's default (generation_config.json), the
// same through the library, the commands and the server.
struct CompletionOptions {
  // Unset: as the model's authors suggest; temperature 1 where they say nothing, and the most
  // likely token where they say "do_sample": false.
  std::optional<SamplingOptions> sampling;
  // Tokens to generate at most. Unset: the model's "max_new_tokens"; 0, or nothing there: the rest
  // of the context.
  std::optional<int64_t> max_tokens;
  // Stop tokens are not sampled, and stop strings not looked for, before so many tokens.
  int64_t min_tokens = 0;
  // Texts that end the answer, and tokens that do so besides the model's own.
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;    // the model's own stop tokens do not count
  bool include_stop = false;  // the text keeps what of `stop` or `stop_token_ids` ended it
  // Extra variables for the chat template as a JSON object, such as {"enable_thinking": false}.
  std::string template_arguments;
  // Tools that the model may call in a conversation: a JSON list as in OpenAI's API; empty: none.
  std::string tools;
  ToolChoice tool_choice = ToolChoice::kAuto;
  std::string tool_name;            // of kNamed
  bool parallel_tool_calls = true;  // else the answer ends with its first call
};

enum class FinishReason : uint8_t {
  kStop,       // the model ended its answer
  kLength,     // max_tokens, or the end of the context
  kCancelled,  // Cancel(), or the callback asked for it
  kFailed,     // an error in mid-answer, such as a full cache; what was sampled before it stands
  kToolCalls,  // the model ended its answer, and it waits for the results of the tools it called
};
// "stop", "length", "cancelled", "error", "tool_calls".
std::string_view NameOf(FinishReason reason);

}  // namespace oscar
