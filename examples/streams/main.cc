// Two conversations at once on one engine, each answer printed as it grows.
//   cmake -B build && cmake --build build && build/streams /usr/share/oscar/models/demo
// or: g++ -std=c++20 main.cc $(pkg-config --cflags --libs oscar) -o streams
#include <oscar/engine.h>

#include <array>
#include <chrono>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: streams MODEL_DIRECTORY\n";
    return 2;
  }
  const auto engine = oscar::Engine::Load({.model = {.model = argv[1]}});
  if (!engine.has_value()) {
    std::cerr << engine.error().message() << '\n';
    return 1;
  }
  const std::array<std::string, 2> questions = {"Add these numbers: 170 710 302 122 813",
                                                "Sort these numbers: 599 972 169 139 702 205"};
  std::array<std::unique_ptr<oscar::Answer>, 2> answers;
  std::array<std::string, 2> texts;
  for (size_t i = 0; i < answers.size(); ++i) {
    auto submitted =
        (*engine)->Chat(R"([{"role": "user", "content": ")" + questions[i] + R"("}])", {});
    if (!submitted.has_value()) {
      std::cerr << submitted.error().message() << '\n';
      return 1;
    }
    answers[i] = std::move(*submitted);
  }
  // The engine works on both; this thread takes from each what there is.
  for (size_t running = answers.size(); running > 0;) {
    for (size_t i = 0; i < answers.size(); ++i) {
      if (answers[i] == nullptr) continue;
      const oscar::AnswerEvent event = answers[i]->Next(std::chrono::milliseconds(5));
      texts[i] += event.content;
      if (!event.content.empty() || !event.reasoning.empty()) {
        std::cout << i << (event.content.empty() ? " thinks: " : " says: ")
                  << (event.content.empty() ? event.reasoning : event.content) << '\n';
      }
      if (!event.is_last()) continue;
      if (event.kind == oscar::AnswerEvent::Kind::kFailed) {
        std::cerr << event.status.message() << '\n';
        return 1;
      }
      const oscar::AnswerUsage usage = answers[i]->usage();
      std::cout << "answer " << i << " (" << oscar::NameOf(event.finish_reason) << ", "
                << usage.prompt_tokens << " + " << usage.completion_tokens
                << " tokens): " << texts[i] << '\n';
      answers[i].reset();
      --running;
    }
  }
  const oscar::EngineReport report = (*engine)->report();
  std::cout << report.generated_tokens << " tokens in " << report.steps << " passes\n";
}
