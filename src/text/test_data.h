// Test data of this module: files under tests/data/text, those that end in .xz unpacked by the xz
// tool. For tests and benchmarks only.
#pragma once

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "base/file.h"
#include "base/json.h"

namespace oscar::test {

inline std::string ReadXz(const std::string& path) {
  const std::string command = "xz -dc '" + path + "'";
  std::FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  char buffer[65536];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, pipe))
    text.append(buffer, count);
  return pclose(pipe) == 0 ? text : std::string();
}

// Empty on failure, which no caller's expectations survive.
inline std::string ReadTextData(const std::string& name) {
  const std::string path = std::string(OSCAR_TEST_DATA) + "/text/" + name;
  if (name.ends_with(".xz")) return ReadXz(path);
  return ReadFile(path, 64 << 20).value_or("");
}

inline nlohmann::ordered_json ReadJsonData(const std::string& name) {
  return ParseOrderedJson(ReadTextData(name), name).value_or(nlohmann::ordered_json());
}

// "demo" is the repository's own model, others are tests/data/text/<name>_tokenizer.json.xz.
inline std::string ReadTokenizerJson(const std::string& name) {
  if (name == "demo") {
    return ReadFile(std::string(OSCAR_TEST_DATA) + "/../../models/demo/tokenizer.json", 64 << 20)
        .value_or("");
  }
  return ReadTextData(name + "_tokenizer.json.xz");
}

}  // namespace oscar::test
