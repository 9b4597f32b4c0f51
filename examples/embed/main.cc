// Asks a question of a model directory through the installed library.
//   cmake -B build && cmake --build build && build/embed /usr/share/oscar/models/demo
// or: g++ -std=c++20 main.cc $(pkg-config --cflags --libs oscar) -o embed
#include <oscar/language_model.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    std::cerr << "usage: embed MODEL_DIRECTORY [QUESTION]\n";
    return 2;
  }
  auto model = oscar::LanguageModel::Load({.model = argv[1]});
  if (!model.has_value()) {
    std::cerr << model.error().message() << '\n';
    return 1;
  }
  // The question goes into JSON as it is, so quotes and backslashes are not for this example.
  const std::string question = argc > 2 ? argv[2] : "Add these numbers: 170 710 302 122 813";
  oscar::CompletionOptions options;
  options.sampling = (*model)->default_sampling();
  options.max_tokens = 256;
  const auto answer = (*model)->Chat(R"([{"role": "user", "content": ")" + question + R"("}])",
                                     options, [](std::string_view piece, bool is_reasoning) {
                                       if (!is_reasoning) std::cout << piece << std::flush;
                                       return true;
                                     });
  if (!answer.has_value()) {
    std::cerr << answer.error().message() << '\n';
    return 1;
  }
  if (!answer->status.ok()) std::cerr << '\n' << answer->status.message() << '\n';
  std::cout << "\n[" << answer->cache.tokens << " tokens cached in " << answer->cache.bytes
            << " bytes, " << answer->cache.bits_per_element << " bits a number]\n";
}
