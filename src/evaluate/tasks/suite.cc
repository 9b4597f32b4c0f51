#include "tasks/suite.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "io/gzip.h"

namespace oscar {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr uint64_t kMaxSuiteFileBytes = uint64_t{1} << 32;  // LiveCodeBench's test file is large
constexpr uint64_t kMaxHaystackBytes = uint64_t{1} << 30;
constexpr int64_t kMaxOutputTokens = 1 << 20;
constexpr char kHaystackName[] = "haystack.txt";

Result<std::string> StringField(const json& record, const char* name) {
  const auto found = record.find(name);
  if (found == record.end() || !found->is_string()) {
    return Unexpected(InvalidArgument(fmt::format("\"{}\" must be a string", name)));
  }
  return found->get<std::string>();
}

Result<size_t> OffsetField(const json& value, const char* name, size_t limit) {
  if (!value.is_number_integer() || value.get<int64_t>() < 0 ||
      static_cast<uint64_t>(value.get<int64_t>()) > limit) {
    return Unexpected(InvalidArgument(
        fmt::format("\"{}\" must be a whole number from 0 to {} (code points)", name, limit)));
  }
  return static_cast<size_t>(value.get<int64_t>());
}

Result<std::string> ContextPrompt(const json& record, const CodePointText* haystack) {
  if (haystack == nullptr) {
    return Unexpected(NotFound(fmt::format("a context needs {} beside the task", kHaystackName)));
  }
  const json& context = record["context"];
  if (!context.is_object() || !context.contains("start") || !context.contains("chars")) {
    return Unexpected(InvalidArgument("\"context\" must have intro, start, chars and inserts"));
  }
  OSCAR_ASSIGN_OR_RETURN(const std::string intro, StringField(context, "intro"));
  OSCAR_ASSIGN_OR_RETURN(const std::string question, StringField(record, "question"));
  OSCAR_ASSIGN_OR_RETURN(const size_t start,
                         OffsetField(context["start"], "start", haystack->size()));
  OSCAR_ASSIGN_OR_RETURN(const size_t chars,
                         OffsetField(context["chars"], "chars", haystack->size() - start));
  std::string prompt = intro + "\n";
  size_t at = 0;
  const json inserts = context.value("inserts", json::array());
  if (!inserts.is_array()) return Unexpected(InvalidArgument("\"inserts\" must be a list"));
  for (const json& insert : inserts) {
    if (!insert.is_array() || insert.size() != 2 || !insert[1].is_string()) {
      return Unexpected(InvalidArgument("an insert must be [offset, text]"));
    }
    OSCAR_ASSIGN_OR_RETURN(const size_t offset, OffsetField(insert[0], "inserts", chars));
    if (offset < at) return Unexpected(InvalidArgument("inserts must be in order of offset"));
    prompt += haystack->Slice(start + at, start + offset);
    prompt += insert[1].get_ref<const std::string&>();
    prompt += ' ';
    at = offset;
  }
  prompt += haystack->Slice(start + at, start + chars);
  prompt += "\n" + question;
  return prompt;
}

Status ReadTaskFile(const fs::path& path, const CodePointText* haystack,
                    const SuiteOptions& options, EvalSuite& suite) {
  EvalTask task;
  task.name = path.stem().string();
  std::set<std::string> ids;
  OSCAR_RETURN_IF_ERROR(
      ReadJsonLines(path, options.LimitOf(task.name), suite.warnings,
                    [&](std::string_view line, int64_t) -> Status {
                      OSCAR_ASSIGN_OR_RETURN(EvalItem item, ParseItem(line, task.name, haystack));
                      if (!ids.insert(item.id).second) {
                        return InvalidArgument(fmt::format("id \"{}\" is there twice", item.id));
                      }
                      task.items.push_back(std::move(item));
                      return {};
                    }));
  suite.tasks.push_back(std::move(task));
  return {};
}

// "long" of "tasks/long/", "b.jsonl" of "math500=data/b.jsonl".
std::string ShortSource(const std::string& source) {
  fs::path path = source.substr(source.find('=') + 1);
  if (!path.has_filename()) path = path.parent_path();
  return path.filename().string();
}

// Tasks of one name get their sources' names before it: the short form where that is enough.
Status SetApart(const std::string& name,
                const std::vector<std::pair<const std::string*, EvalTask*>>& owners) {
  std::set<std::string> short_names, sources;
  for (const auto& [source, task] : owners) {
    short_names.insert(ShortSource(*source));
    sources.insert(*source);
    for (const auto& [other_source, other] : owners) {
      const bool is_same =
          task < other && std::equal(task->items.begin(), task->items.end(), other->items.begin(),
                                     other->items.end(), [](const EvalItem& a, const EvalItem& b) {
                                       return a.id == b.id && a.prompt == b.prompt;
                                     });
      if (is_same) {
        return InvalidArgument(
            fmt::format("the task {} is there twice (--suite {}, {}); name it once", name, *source,
                        *other_source));
      }
    }
  }
  if (sources.size() < owners.size()) {
    return InvalidArgument(
        fmt::format("--suite names {} twice; name it once", *owners.front().first));
  }
  const bool is_short = short_names.size() == owners.size();
  for (const auto& [source, task] : owners) {
    task->name = (is_short ? ShortSource(*source) : *source) + "/" + name;
  }
  return {};
}

}  // namespace

Result<EvalItem> ParseItem(std::string_view line, std::string_view task,
                           const CodePointText* haystack) {
  OSCAR_ASSIGN_OR_RETURN(const json record, ParseJson(line, "record"));
  if (!record.is_object()) return Unexpected(InvalidArgument("a record must be an object"));
  if (record.contains("task")) {
    OSCAR_ASSIGN_OR_RETURN(const std::string owner, StringField(record, "task"));
    if (owner != task) {
      return Unexpected(InvalidArgument(fmt::format("the record belongs to task \"{}\"", owner)));
    }
  }
  EvalItem out;
  OSCAR_ASSIGN_OR_RETURN(out.id, StringField(record, "id"));
  if (record.contains("context")) {
    OSCAR_ASSIGN_OR_RETURN(out.prompt, ContextPrompt(record, haystack));
  } else {
    OSCAR_ASSIGN_OR_RETURN(out.prompt, StringField(record, "prompt"));
  }
  OSCAR_ASSIGN_OR_RETURN(out.answer, StringField(record, "answer"));
  if (record.contains("reference")) {
    OSCAR_ASSIGN_OR_RETURN(out.reference, StringField(record, "reference"));
  }
  const json tokens = record.value("max_tokens", json());
  if (!tokens.is_number_integer() || tokens.get<int64_t>() < 1 ||
      tokens.get<int64_t>() > kMaxOutputTokens) {
    return Unexpected(InvalidArgument(
        fmt::format("\"max_tokens\" must be a whole number from 1 to {}", kMaxOutputTokens)));
  }
  out.max_tokens = tokens.get<int64_t>();
  return out;
}

Status ReadJsonLines(const fs::path& path, int64_t limit, std::vector<std::string>& warnings,
                     const std::function<Status(std::string_view, int64_t)>& parse) {
  OSCAR_ASSIGN_OR_RETURN(std::string packed, ReadFile(path, kMaxSuiteFileBytes));
  OSCAR_ASSIGN_OR_RETURN(const std::string text,
                         Gunzip(std::move(packed), path.string(), kMaxSuiteFileBytes));
  size_t line_number = 0;
  int64_t taken = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string_view line(text.data() + at, end - at);
    at = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    if (limit > 0 && taken == limit) break;
    const Status status = parse(line, taken);
    if (status.ok()) {
      ++taken;
    } else {
      warnings.push_back(
          fmt::format("{}:{}: left out: {}", path.string(), line_number, status.message()));
    }
  }
  return {};
}

Result<CodePointText> CodePointText::Create(std::string text, std::string_view what) {
  CodePointText out;
  out.text_ = std::move(text);
  const std::string& bytes = out.text_;
  out.starts_.clear();
  out.starts_.reserve(bytes.size() + 1);
  for (size_t at = 0; at < bytes.size();) {
    const auto lead = static_cast<unsigned char>(bytes[at]);
    const size_t length = lead < 0x80   ? 1
                          : lead < 0xC2 ? 0
                          : lead < 0xE0 ? 2
                          : lead < 0xF0 ? 3
                          : lead < 0xF5 ? 4
                                        : 0;
    bool ok = length > 0 && at + length <= bytes.size();
    for (size_t i = 1; ok && i < length; ++i) {
      ok = (static_cast<unsigned char>(bytes[at + i]) & 0xC0) == 0x80;
    }
    if (!ok) {
      return Unexpected(DataLoss(fmt::format("{}: ill-formed UTF-8 at byte {}", what, at)));
    }
    out.starts_.push_back(static_cast<uint32_t>(at));
    at += length;
  }
  out.starts_.push_back(static_cast<uint32_t>(bytes.size()));
  return out;
}

Result<EvalSuite> ReadSuite(const fs::path& directory, const SuiteOptions& options) {
  std::error_code error;
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".jsonl") files.push_back(entry.path());
  }
  if (error) {
    return Unexpected(
        NotFound(fmt::format("{}: cannot be listed: {}", directory.string(), error.message())));
  }
  if (files.empty()) {
    return Unexpected(NotFound(fmt::format("{}: no task file (*.jsonl)", directory.string())));
  }
  std::sort(files.begin(), files.end());
  std::optional<CodePointText> haystack;
  if (Exists(directory / kHaystackName)) {
    const fs::path file = directory / kHaystackName;
    OSCAR_ASSIGN_OR_RETURN(std::string text, ReadFile(file, kMaxHaystackBytes));
    OSCAR_ASSIGN_OR_RETURN(haystack, CodePointText::Create(std::move(text), file.string()));
  }
  EvalSuite suite;
  for (const fs::path& file : files) {
    suite.names.push_back(file.stem().string());
    if (!options.Takes(suite.names.back())) continue;
    OSCAR_RETURN_IF_ERROR(
        ReadTaskFile(file, haystack.has_value() ? &*haystack : nullptr, options, suite));
  }
  return suite;
}

Result<EvalSuite> JoinSuites(std::vector<NamedSuite> parts, const SuiteOptions& options) {
  std::set<std::string> known;
  for (const NamedSuite& part : parts)
    known.insert(part.suite.names.begin(), part.suite.names.end());
  std::string list;
  for (const std::string& name : known) list += (list.empty() ? "" : ", ") + name;
  for (const std::string& name : options.tasks) {
    if (!known.contains(name)) {
      return Unexpected(InvalidArgument(
          fmt::format("--tasks: there is no task \"{}\"; there are {}", name, list)));
    }
  }
  for (const auto& [name, limit] : options.task_limits) {
    if (!known.contains(name) || !options.Takes(name)) {
      return Unexpected(InvalidArgument(
          fmt::format("--limit: there is no task \"{}\"; there are {}", name, list)));
    }
  }
  EvalSuite out;
  out.names.assign(known.begin(), known.end());
  std::map<std::string, std::vector<std::pair<const std::string*, EvalTask*>>> by_name;
  for (NamedSuite& part : parts) {
    out.warnings.insert(out.warnings.end(), part.suite.warnings.begin(), part.suite.warnings.end());
    for (EvalTask& task : part.suite.tasks) by_name[task.name].emplace_back(&part.source, &task);
  }
  for (const auto& [name, owners] : by_name) {
    if (owners.size() > 1) OSCAR_RETURN_IF_ERROR(SetApart(name, owners));
  }
  for (NamedSuite& part : parts) {
    for (EvalTask& task : part.suite.tasks) {
      if (!task.items.empty()) {
        out.tasks.push_back(std::move(task));
        continue;
      }
      out.warnings.push_back(fmt::format("--suite {}: the task {} holds no item and is left out",
                                         part.source, task.name));
    }
  }
  if (out.tasks.empty()) {
    return Unexpected(InvalidArgument(
        "there is nothing to measure" +
        (out.warnings.empty() ? std::string() : "; the first reason: " + out.warnings.front())));
  }
  return out;
}

std::string_view FinalAnswer(std::string_view output) {
  constexpr std::string_view kClose = "</think>";
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  if (const size_t at = output.rfind(kClose); at != std::string_view::npos) {
    output.remove_prefix(at + kClose.size());
  }
  const size_t first = output.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return {};
  return output.substr(first, output.find_last_not_of(kSpace) - first + 1);
}

}  // namespace oscar
