// Tokenizer and template throughput. Times of one encode call over 1 MiB; the vocabulary is
// Qwen3's (151,669 tokens) and the demo model's.
#include <benchmark/benchmark.h>

#include <map>
#include <nlohmann/json.hpp>

#include "text/chat.h"
#include "text/test_data.h"
#include "text/tokenizer.h"

namespace oscar {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

std::string Repeated(std::initializer_list<std::string_view> pieces) {
  // A counter between the pieces keeps whole paragraphs from being cached as one.
  std::string text;
  for (size_t round = 0; text.size() < kBytes; ++round) {
    for (const std::string_view piece : pieces) {
      text += piece;
      text += std::to_string(round * 2654435761u % 100000);
      text += '\n';
    }
  }
  return text;
}

const std::string& TextOf(const std::string& kind) {
  static auto& texts = *new std::map<std::string, std::string>();
  std::string& text = texts[kind];
  if (!text.empty()) return text;
  if (kind == "english") {
    // Running prose of this repository's documents: more varied than any phrase repeated.
    for (const char* name :
         {"docs/architecture.md", "docs/cache-format.md", "docs/quantizers.md"}) {
      text += ReadFile(std::string(OSCAR_TEST_DATA) + "/../../" + name, 1 << 20).value_or("");
    }
    if (text.empty()) text = "The quick brown fox jumps over the lazy dog. ";
    const std::string once = text;
    while (text.size() < kBytes) text += once;
  } else if (kind == "multilingual") {
    text = Repeated({"Съешь же ещё этих мягких французских булок, да выпей чаю. ",
                     "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。今天天气很好。",
                     "L'été dernier, nous avons visité la forêt près de la rivière. ",
                     "いろはにほへと ちりぬるを わかよたれそ つねならむ。",
                     "다람쥐 헌 쳇바퀴에 타고파. 오늘은 날씨가 좋습니다. ",
                     "صباح الخير، كيف حالك اليوم؟ ", "नमस्ते दुनिया, आप कैसे हैं? "});
  } else if (kind == "code") {
    for (const char* name : {"src/text/bpe.cc", "src/text/tokenizer.cc", "src/text/pretokenizer.cc",
                             "src/text/jinja/lexer.cc", "src/text/jinja/value.cc"}) {
      text += ReadFile(std::string(OSCAR_TEST_DATA) + "/../../" + name, 1 << 20).value_or("");
    }
    const std::string once = text + "\n";
    while (text.size() < kBytes) text += once;
  } else if (kind == "one_word") {
    text.assign(kBytes, 'a');
  } else if (kind == "spaces") {
    text.assign(kBytes, ' ');
  } else if (kind == "random_word") {
    uint32_t state = 1;
    while (text.size() < kBytes) {
      state = state * 1664525u + 1013904223u;
      text += static_cast<char>('a' + (state >> 24) % 26);
    }
  } else if (kind == "marks") {
    while (text.size() < kBytes) text += "\xCC\x81\xCC\xA3";
  }
  text.resize(std::min(text.size(), kBytes));
  while (!text.empty() && (static_cast<uint8_t>(text.back()) & 0xC0) == 0x80) text.pop_back();
  if (!text.empty() && static_cast<uint8_t>(text.back()) >= 0x80) text.pop_back();
  return text;
}

const Tokenizer& TokenizerOf(const std::string& name) {
  static auto& cache = *new std::map<std::string, std::unique_ptr<Tokenizer>>();
  auto& entry = cache[name];
  if (entry == nullptr) {
    entry = std::make_unique<Tokenizer>(
        Tokenizer::FromJson(test::ReadTokenizerJson(name), name).value());
  }
  return *entry;
}

void BM_Encode(benchmark::State& state, const std::string& tokenizer_name,
               const std::string& kind) {
  const Tokenizer& tokenizer = TokenizerOf(tokenizer_name);
  const std::string& text = TextOf(kind);
  size_t tokens = 0;
  for (auto _ : state) {
    const auto ids = tokenizer.Encode(text, {.parse_special = true});
    tokens = ids.value().size();
    benchmark::DoNotOptimize(tokens);
  }
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * text.size()));
  state.counters["tokens"] = static_cast<double>(tokens);
  state.counters["bytes_per_token"] =
      static_cast<double>(text.size()) / static_cast<double>(tokens);
}

void BM_Decode(benchmark::State& state) {
  const Tokenizer& tokenizer = TokenizerOf("qwen3");
  const auto ids = tokenizer.Encode(TextOf("english")).value();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer.Decode(ids, true));
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations() * TextOf("english").size()));
}

void BM_Load(benchmark::State& state, const std::string& name) {
  const std::string json = test::ReadTokenizerJson(name);
  for (auto _ : state) benchmark::DoNotOptimize(Tokenizer::FromJson(json, name).has_value());
}

void BM_RenderChat(benchmark::State& state) {
  TokenizerConfig config;
  config.chat_templates = {{"default", test::ReadTextData("templates/Qwen3-2507.jinja")}};
  const auto chat = ChatTemplate::Create(config).value();
  auto messages = nlohmann::ordered_json::array();
  for (int i = 0; i < state.range(0); ++i) {
    messages.push_back({{"role", i % 2 == 0 ? "user" : "assistant"},
                        {"content", "Message " + std::to_string(i) + std::string(200, 'x')}});
  }
  TemplateInput request;
  request.messages = &messages;
  for (auto _ : state) benchmark::DoNotOptimize(chat.Render(request).has_value());
}

#define OSCAR_ENCODE(tokenizer, kind) \
  BENCHMARK_CAPTURE(BM_Encode, tokenizer##_##kind, #tokenizer, #kind)->Unit(benchmark::kMillisecond)
OSCAR_ENCODE(qwen3, english);
OSCAR_ENCODE(qwen3, multilingual);
OSCAR_ENCODE(qwen3, code);
OSCAR_ENCODE(qwen3, one_word);
OSCAR_ENCODE(qwen3, random_word);
OSCAR_ENCODE(qwen3, spaces);
OSCAR_ENCODE(qwen3, marks);
OSCAR_ENCODE(demo, english);
OSCAR_ENCODE(demo, code);
OSCAR_ENCODE(demo, one_word);
BENCHMARK(BM_Decode)->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Load, qwen3, "qwen3")->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(BM_Load, demo, "demo")->Unit(benchmark::kMillisecond);
BENCHMARK(BM_RenderChat)->Arg(2)->Arg(64)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace oscar

BENCHMARK_MAIN();
