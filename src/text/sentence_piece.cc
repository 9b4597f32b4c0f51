#include "text/sentence_piece.h"

#include <fmt/core.h>

#include <initializer_list>
#include <nlohmann/json.hpp>

#include "text/json_keys.h"

namespace oscar {
namespace {

using nlohmann::json;

constexpr std::string_view kMark = "\xE2\x96\x81";  // U+2581

std::string TypeOf(const json& node) {
  const auto it = node.is_object() ? node.find("type") : node.end();
  return node.is_object() && it != node.end() && it->is_string() ? it->get<std::string>() : "";
}

// The steps of a Sequence, a single step, or none.
Result<std::vector<json>> StepsOf(const json& node, std::string_view where, const char* key) {
  std::vector<json> steps;
  if (node.is_null()) return steps;
  if (TypeOf(node) != "Sequence") {
    steps.push_back(node);
    return steps;
  }
  const auto list = node.find(key);
  if (list == node.end() || !list->is_array()) {
    return Unexpected(DataLoss(fmt::format("{} Sequence: \"{}\" must be a list", where, key)));
  }
  for (const json& step : *list) steps.push_back(step);
  return steps;
}

bool IsReplace(const json& node, std::string_view from, std::string_view to) {
  const auto pattern = node.find("pattern"), content = node.find("content");
  return TypeOf(node) == "Replace" && pattern != node.end() && content != node.end() &&
         pattern->is_object() && pattern->size() == 1 && pattern->contains("String") &&
         (*pattern)["String"] == from && *content == to;
}

Status Refuse(std::string_view where, const json& node, std::string_view known) {
  const std::string type = TypeOf(node);
  return Unimplemented(fmt::format(
      "{}: type \"{}\" with these settings is not supported with byte_fallback; known are {}",
      where, type, known));
}

Status ReadMetaspace(const json& node, SpaceRules* rules) {
  OSCAR_RETURN_IF_ERROR(
      CheckKeys(node, "pre_tokenizer Metaspace",
                {"type", "replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"}));
  if (node.value("replacement", json(kMark)) != kMark) {
    return Unimplemented("pre_tokenizer Metaspace: only U+2581 is supported as \"replacement\"");
  }
  const json prefix = node.value("add_prefix_space", json(true));
  const json split = node.value("split", json(true));
  const json scheme = node.value("prepend_scheme", json(prefix == true ? "always" : "never"));
  if (!prefix.is_boolean() || !split.is_boolean() ||
      (scheme != "always" && scheme != "first" && scheme != "never")) {
    return DataLoss(
        "pre_tokenizer Metaspace: \"split\" must be true or false, and \"prepend_scheme\" always, "
        "first or never");
  }
  using enum SpaceRules::Prefix;
  rules->prefix = scheme == "always" ? kAlways : scheme == "first" ? kFirst : kNone;
  rules->splits = split == true;
  return {};
}

}  // namespace

std::string MarksToSpaces(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    if (text.substr(at).starts_with(kMark)) {
      out.push_back(' ');
      at += kMark.size();
    } else {
      out.push_back(text[at++]);
    }
  }
  return out;
}

int ByteOfToken(std::string_view text) {
  const auto digit = [](char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
  };
  if (text.size() != 6 || !text.starts_with("<0x") || text[5] != '>') return -1;
  const int high = digit(text[3]), low = digit(text[4]);
  return high < 0 || low < 0 ? -1 : high * 16 + low;
}

void SpaceRules::Normalize(std::string* text, std::vector<bool>* marks) const {
  if (!by_normalizer || text->empty()) return;
  std::string out(prefix == Prefix::kAlways ? " " : "");
  std::vector<bool> out_marks;
  if (marks != nullptr && !out.empty()) out_marks.push_back(marks->front());
  out.reserve(text->size() + 1);
  for (size_t at = 0; at < text->size();) {
    const bool is_mark = std::string_view(*text).substr(at).starts_with(kMark);
    out.push_back(is_mark ? ' ' : (*text)[at]);
    if (marks != nullptr) out_marks.push_back((*marks)[at]);
    at += is_mark ? kMark.size() : 1;
  }
  *text = std::move(out);
  if (marks != nullptr) *marks = std::move(out_marks);
}

void SpaceRules::AddPrefix(std::string* text, bool at_start) const {
  if (by_normalizer || text->empty()) return;
  *text = MarksToSpaces(*text);
  const bool wanted = prefix == Prefix::kAlways || (prefix == Prefix::kFirst && at_start);
  if (wanted && text->front() != ' ') text->insert(text->begin(), ' ');
}

Result<SpaceRules> ReadSpaceRules(const json& normalizer, const json& pre_tokenizer,
                                  const json& decoder) {
  SpaceRules rules;
  OSCAR_ASSIGN_OR_RETURN(const auto normalizers, StepsOf(normalizer, "normalizer", "normalizers"));
  bool replaces = false;
  for (const json& step : normalizers) {
    if (TypeOf(step) == "Prepend" && step.value("prepend", json()) == kMark && !replaces) {
      rules.prefix = SpaceRules::Prefix::kAlways;
    } else if (IsReplace(step, " ", kMark)) {
      replaces = true;
    } else {
      return Unexpected(Refuse("normalizer", step,
                               "Prepend of U+2581, and Replace of spaces by U+2581 after it"));
    }
  }
  rules.by_normalizer = !normalizers.empty();
  OSCAR_ASSIGN_OR_RETURN(const auto pre, StepsOf(pre_tokenizer, "pre_tokenizer", "pretokenizers"));
  if (pre.size() + (rules.by_normalizer ? 1 : 0) > 1 || (rules.by_normalizer && !replaces)) {
    return Unexpected(Unimplemented(
        "with byte_fallback, spaces are for the normalizer (Replace) or one Metaspace to mark"));
  }
  for (const json& step : pre) {
    if (TypeOf(step) != "Metaspace") {
      return Unexpected(Refuse("pre_tokenizer", step, "Metaspace"));
    }
    OSCAR_RETURN_IF_ERROR(ReadMetaspace(step, &rules));
  }
  if (pre.empty() && !rules.by_normalizer) {
    return Unexpected(Unimplemented(
        "with byte_fallback, spaces are for the normalizer (Replace) or one Metaspace to mark"));
  }
  OSCAR_ASSIGN_OR_RETURN(const auto decoders, StepsOf(decoder, "decoder", "decoders"));
  bool has_bytes = false, has_spaces = false;
  for (const json& step : decoders) {
    const std::string type = TypeOf(step);
    if (type == "ByteFallback") {
      has_bytes = true;
    } else if (IsReplace(step, kMark, " ")) {
      has_spaces = true;
    } else if (type == "Strip" && step.value("content", json()) == " " &&
               step.value("start", json()).is_number_unsigned() &&
               step["start"].get<uint64_t>() <= 16 && step.value("stop", json()) == 0) {
      rules.stripped = step["start"].get<int>();
    } else if (type == "Metaspace") {
      SpaceRules at_decoding;
      OSCAR_RETURN_IF_ERROR(ReadMetaspace(step, &at_decoding));
      has_spaces = true;
      rules.stripped = at_decoding.prefix == SpaceRules::Prefix::kNone ? 0 : 1;
    } else if (type != "Fuse") {
      return Unexpected(Refuse("decoder", step,
                               "Replace of U+2581 by a space, ByteFallback, Fuse, Strip of leading "
                               "spaces and Metaspace"));
    }
  }
  if (!has_bytes || !has_spaces) {
    return Unexpected(Unimplemented(
        "decoder: with byte_fallback it needs ByteFallback, and Replace or Metaspace for spaces"));
  }
  return rules;
}

}  // namespace oscar
