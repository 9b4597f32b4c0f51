#include "cli/usage.h"

#include <fmt/core.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <array>
#include <memory>
#include <numeric>

namespace oscar::cli {
namespace {

// Options that people bring along from vLLM and llama.cpp. Those that mean the same are names of
// the option itself (model_options.cc and the commands).
struct Foreign {
  std::string_view name, advice;
};
constexpr std::array<Foreign, 33> kForeign = {{
    {"--kv-cache-dtype", "the cache's format is --kv: oscar+, oscar, bf16, ..."},
    {"--cache-type-k", "keys and values share one format: --kv"},
    {"--cache-type-v", "keys and values share one format: --kv"},
    {"-ctk", "keys and values share one format: --kv"},
    {"-ctv", "keys and values share one format: --kv"},
    {"--gpu-memory-utilization", "the cache's budget is --kv-memory, in bytes"},
    {"--swap-space", "pages are not swapped; --prefix-dir keeps prefixes on disk"},
    {"--cpu-offload-gb", "weights are not split between devices; --weights fp8 halves them"},
    {"--tensor-parallel-size", "one process runs on one device; leave it out"},
    {"-tp", "one process runs on one device; leave it out"},
    {"--pipeline-parallel-size", "one process runs on one device; leave it out"},
    {"--split-mode", "one process runs on one device; leave it out"},
    {"-ngl", "a model runs on one device as a whole: --device cuda or cpu"},
    {"--n-gpu-layers", "a model runs on one device as a whole: --device cuda or cpu"},
    {"--gpu-layers", "a model runs on one device as a whole: --device cuda or cpu"},
    {"--dtype", "weights stay as they are stored; --weights fp8 quantises them"},
    {"--quantization", "weights stay as they are stored; --weights fp8 quantises them"},
    {"--max-num-batched-tokens", "prompt tokens in one pass are --chunk"},
    {"--ubatch-size", "prompt tokens in one pass are --chunk"},
    {"--batch-size", "prompt tokens in one pass are --chunk"},
    {"--enable-prefix-caching", "it is on; --no-prefix-cache turns it off"},
    {"--no-enable-prefix-caching", "here it is --no-prefix-cache"},
    {"--trust-remote-code", "no code of a model is ever run; leave it out"},
    {"--flash-attn", "attention has one implementation; leave it out"},
    {"-fa", "attention has one implementation; leave it out"},
    {"--mmap", "weights are read once; leave it out"},
    {"--mlock", "weights are read once; leave it out"},
    {"--revision", "it is part of the name: ORG/NAME@REVISION"},
    {"--download-dir", "the folder of downloads is HF_HUB_CACHE in the environment"},
    {"--hf-token", "the token is HF_TOKEN in the environment"},
    {"--hf-repo", "the model's name itself: oscar serve ORG/NAME"},
    {"-hf", "the model's name itself: oscar serve ORG/NAME"},
    {"-hfr", "the model's name itself: oscar serve ORG/NAME"},
}};

// Characters inserted, removed, changed, or swapped with their neighbour (--hots for --host).
size_t Edits(std::string_view a, std::string_view b) {
  std::array<std::vector<size_t>, 3> rows;  // of i - 2, i - 1 and i characters of a
  for (auto& row : rows) row.resize(b.size() + 1);
  std::iota(rows[2].begin(), rows[2].end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    std::ranges::rotate(rows, rows.begin() + 1);
    const std::vector<size_t>&before = rows[0], &above = rows[1];
    std::vector<size_t>& row = rows[2];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] =
          std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before[j - 2] + 1);
      }
    }
  }
  return rows[2].back();
}

std::vector<std::string> CommandsOf(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (!sub->get_group().empty()) names.push_back(sub->get_name());
  }
  return names;
}

// The commands that were chosen: "bench", "decode".
std::vector<const CLI::App*> Chosen(const CLI::App& app) {
  std::vector<const CLI::App*> chain = {&app};
  while (!chain.back()->get_subcommands().empty()) {
    chain.push_back(chain.back()->get_subcommands().front());
  }
  return chain;
}

std::string Advice(const std::string& flag, const std::vector<const CLI::App*>& chain) {
  const std::string name = flag.substr(0, flag.find('='));
  for (const Foreign& foreign : kForeign) {
    if (foreign.name == name) return std::string(foreign.advice);
  }
  std::vector<std::string> names;
  for (const CLI::App* app : chain) {
    for (const CLI::Option* option : app->get_options()) {
      if (option->get_group().empty()) continue;
      for (const std::string& known : option->get_lnames()) names.push_back("--" + known);
    }
  }
  const std::string nearest = Nearest(name, names);
  return nearest.empty() ? "" : fmt::format("did you mean {}?", nearest);
}

const CLI::App* FindCommand(const CLI::App& app, const std::string& name) {
  for (const CLI::App* sub : app.get_subcommands([](const CLI::App*) { return true; })) {
    if (sub->get_name() == name) return sub;
  }
  return nullptr;
}

std::string UnknownCommand(const CLI::App& app, const std::string& name) {
  const std::string nearest = Nearest(name, CommandsOf(app));
  return fmt::format(
      "unknown command: {}{}", name,
      nearest.empty() ? "; oscar help lists them" : fmt::format("; did you mean {}?", nearest));
}

Status RunHelp(const CLI::App& app, const std::vector<std::string>& names) {
  const CLI::App* command = &app;
  std::string before;
  for (const std::string& name : names) {
    const CLI::App* sub = FindCommand(*command, name);
    if (sub == nullptr) return InvalidArgument(UnknownCommand(*command, name));
    before += before.empty() ? command->get_name() : " " + command->get_name();
    command = sub;
  }
  // Asked for by name; the root has a chosen subcommand (this one) and would show that.
  const std::string text =
      command == &app ? app.get_formatter()->make_help(&app, "oscar", CLI::AppFormatMode::Normal)
                      : command->help(before);
  fmt::print("{}", text);
  return {};
}

}  // namespace

std::string Nearest(std::string_view word, const std::vector<std::string>& candidates) {
  size_t fewest = std::max<size_t>(2, word.size() / 3) + 1;
  std::string best;
  for (const std::string& candidate : candidates) {
    const size_t edits = Edits(word, candidate);
    if (edits >= fewest) continue;
    fewest = edits;
    best = candidate;
  }
  return best;
}

std::string UnknownArguments(const CLI::App& app, const std::vector<std::string>& given) {
  std::vector<std::string> left = app.remaining(/*recurse=*/true);
  // "-ngl" was taken for "-n gl". No option here has such a name, so it is never a value's.
  for (const std::string& argument : given) {
    const bool is_clustered = argument.size() > 2 && argument[0] == '-' && argument[1] != '-';
    const bool is_foreign = std::ranges::any_of(
        kForeign, [&](const Foreign& foreign) { return foreign.name == argument; });
    if (is_clustered && is_foreign && std::ranges::find(left, argument) == left.end()) {
      left.push_back(argument);
    }
  }
  const std::vector<const CLI::App*> chain = Chosen(app);
  std::string where;
  for (const CLI::App* one : chain) where += (where.empty() ? "" : " ") + one->get_name();
  const bool lacks_command =
      !CommandsOf(*chain.back()).empty() && chain.back()->get_require_subcommand_min() > 0;
  std::string out;
  for (const std::string& argument : left) {
    if (argument == "--") continue;
    const bool is_flag = argument.size() > 1 && argument.front() == '-';
    if (!is_flag && lacks_command && out.empty()) {
      return fmt::format("{}: {}", where, UnknownCommand(*chain.back(), argument));
    }
    const std::string advice = is_flag ? Advice(argument, chain) : "";
    out += fmt::format("{}{} {}{}", out.empty() ? "" : "; ",
                       is_flag ? "unknown option" : "unexpected argument", argument,
                       advice.empty() ? "" : fmt::format(" ({})", advice));
  }
  if (out.empty()) return out;
  return fmt::format("{}: {}", where, out);
}

void AddHelpCommand(CLI::App& app, RunFunction& run) {
  auto names = std::make_shared<std::vector<std::string>>();
  CLI::App* command = app.add_subcommand("help", "Explain a command");
  command->add_option("command", *names, "Such as serve, or bench decode");
  command->callback([&app, names, &run] { run = [&app, names] { return RunHelp(app, *names); }; });
}

}  // namespace oscar::cli
