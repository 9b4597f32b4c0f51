#include "text/tokenizer_json.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>
#include <utility>

#include "base/error_text.h"
#include "base/json.h"
#include "text/json_keys.h"
#include "text/unicode.h"

namespace oscar {
namespace {

using nlohmann::json;

constexpr size_t kMaxAddedTokens = 65536;
constexpr size_t kMaxAddedTokenBytes = 1024;
constexpr int kMaxDepth = 8;

// A missing key and null read as `fallback`.
Result<bool> Bool(const json& object, const char* key, bool fallback, std::string_view where) {
  const auto it = object.find(key);
  if (it == object.end() || it->is_null()) return fallback;
  if (!it->is_boolean()) {
    return Unexpected(DataLoss(
        fmt::format("{}: \"{}\" must be true or false, not {}", where, key, it->type_name())));
  }
  return it->get<bool>();
}

Result<std::string> TypeOf(const json& node, std::string_view where) {
  const auto it = node.is_object() ? node.find("type") : node.end();
  if (!node.is_object() || it == node.end() || !it->is_string()) {
    return Unexpected(DataLoss(fmt::format("{}: \"type\" must be a string", where)));
  }
  return it->get<std::string>();
}

// Vocabulary text -> bytes. Nothing where a character is outside the byte alphabet.
std::optional<std::string> AlphabetToBytes(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = DecodeUtf8(text, at);
    const int byte = step.valid ? ByteOfAlphabet(step.code_point) : -1;
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    at += step.length;
  }
  return bytes;
}

// SentencePiece's: text with U+2581 for spaces, and "<0x0A>" for bytes.
Result<Vocabulary> ReadCharacters(const json& model, std::array<TokenId, 256>* byte_ids) {
  const auto vocab = model.find("vocab");
  if (vocab == model.end() || !vocab->is_object() || vocab->empty()) {
    return Unexpected(DataLoss("model.vocab must be an object of token: id"));
  }
  byte_ids->fill(kNoToken);
  Vocabulary vocabulary;
  for (const auto& [text, id] : vocab->items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(kMaxTokenId)) {
      return Unexpected(DataLoss(fmt::format(
          "model.vocab: the id of {:?} must be an integer in 0..{}", text, kMaxTokenId)));
    }
    const int byte = ByteOfToken(text);
    std::string bytes = byte < 0 ? MarksToSpaces(text) : std::string(1, static_cast<char>(byte));
    if (byte >= 0) (*byte_ids)[static_cast<size_t>(byte)] = id.get<TokenId>();
    // No text has a space by the time that tokens are looked for.
    const bool findable = byte < 0 && text.find(' ') == std::string::npos;
    const Status added = vocabulary.Add(id.get<TokenId>(), bytes, findable);
    if (!added.ok()) return Unexpected(added.WithContext("model.vocab"));
  }
  for (size_t byte = 0; byte < 256; ++byte) {
    if ((*byte_ids)[byte] != kNoToken) continue;
    return Unexpected(Unimplemented(fmt::format(
        "model.vocab: byte_fallback needs a token for every byte, and <0x{:02X}> is missing",
        byte)));
  }
  return vocabulary;
}

Result<Vocabulary> ReadVocabulary(const json& model) {
  const auto vocab = model.find("vocab");
  if (vocab == model.end() || !vocab->is_object() || vocab->empty()) {
    return Unexpected(DataLoss("model.vocab must be an object of token: id"));
  }
  Vocabulary vocabulary;
  for (const auto& [text, id] : vocab->items()) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(kMaxTokenId)) {
      return Unexpected(DataLoss(fmt::format(
          "model.vocab: the id of {:?} must be an integer in 0..{}", text, kMaxTokenId)));
    }
    const auto bytes = AlphabetToBytes(text);
    const Status added =
        vocabulary.Add(id.get<TokenId>(), bytes ? std::string_view(*bytes) : std::string_view(text),
                       bytes.has_value());
    if (!added.ok()) return Unexpected(added.WithContext("model.vocab"));
  }
  return vocabulary;
}

Result<std::vector<std::pair<TokenId, TokenId>>> ReadMerges(const json& model,
                                                            const Vocabulary& vocabulary,
                                                            bool characters) {
  const auto list = model.find("merges");
  if (list == model.end() || !list->is_array()) {
    return Unexpected(DataLoss("model.merges must be a list"));
  }
  std::vector<std::pair<TokenId, TokenId>> merges;
  merges.reserve(list->size());
  for (const auto& merge : *list) {
    const size_t rank = merges.size();
    std::string_view left, right;
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return Unexpected(
            DataLoss(fmt::format("model.merges[{}] must be two tokens and a space", rank)));
      }
      left = std::string_view(text).substr(0, space);
      right = std::string_view(text).substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    } else {
      return Unexpected(DataLoss(fmt::format("model.merges[{}] must be a pair of strings", rank)));
    }
    std::pair<TokenId, TokenId> ids;
    for (auto [text, id] : {std::pair(left, &ids.first), std::pair(right, &ids.second)}) {
      const auto bytes = characters ? MarksToSpaces(text) : AlphabetToBytes(text);
      *id = bytes ? vocabulary.Find(*bytes) : kNoToken;
      if (*id == kNoToken) {
        return Unexpected(
            DataLoss(fmt::format("model.merges[{}]: {:?} is not in the vocabulary", rank, text)));
      }
    }
    merges.push_back(ids);
  }
  return merges;
}

Result<BpeModel> ReadModel(const json& model) {
  OSCAR_RETURN_IF_ERROR(
      CheckKeys(model, "model",
                {"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                 "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"}));
  // Files written before the key existed hold BPE when they hold merges.
  if (model.contains("type") || !model.contains("merges")) {
    OSCAR_ASSIGN_OR_RETURN(const std::string type, TypeOf(model, "model"));
    if (type != "BPE") {
      return Unexpected(
          Unimplemented(fmt::format("model: type \"{}\" is not supported; only BPE is", type)));
    }
  }
  if (const auto it = model.find("dropout");
      it != model.end() && !it->is_null() && !(it->is_number() && it->get<double>() == 0.0)) {
    return Unexpected(Unimplemented("model: \"dropout\" makes ids random and is not supported"));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto it = model.find(key);
    if (it != model.end() && !it->is_null() &&
        !(it->is_string() && it->get_ref<const std::string&>().empty())) {
      return Unexpected(Unimplemented(
          fmt::format("model: \"{}\" is not used by byte-level BPE and is not supported", key)));
    }
  }
  OSCAR_ASSIGN_OR_RETURN(const bool byte_fallback, Bool(model, "byte_fallback", false, "model"));
  OSCAR_ASSIGN_OR_RETURN(const bool ignore_merges, Bool(model, "ignore_merges", false, "model"));
  if (byte_fallback) {
    std::array<TokenId, 256> byte_ids{};
    OSCAR_ASSIGN_OR_RETURN(Vocabulary characters, ReadCharacters(model, &byte_ids));
    characters.BuildIndex();
    OSCAR_ASSIGN_OR_RETURN(const auto merges, ReadMerges(model, characters, /*characters=*/true));
    auto built =
        BpeModel::BuildFromCharacters(std::move(characters), merges, ignore_merges, byte_ids);
    if (!built.has_value()) return Unexpected(built.error().WithContext("model"));
    return std::move(built).value();
  }
  OSCAR_ASSIGN_OR_RETURN(Vocabulary vocabulary, ReadVocabulary(model));
  vocabulary.BuildIndex();
  OSCAR_ASSIGN_OR_RETURN(const auto merges, ReadMerges(model, vocabulary, /*characters=*/false));
  auto built = BpeModel::Build(std::move(vocabulary), merges, ignore_merges);
  if (!built.has_value()) return Unexpected(built.error().WithContext("model"));
  return std::move(built).value();
}

Status ReadNormalizer(const json& node, int depth, bool* nfc) {
  if (node.is_null()) return {};
  if (depth > kMaxDepth) return DataLoss("normalizer: nested too deeply");
  OSCAR_ASSIGN_OR_RETURN(const std::string type, TypeOf(node, "normalizer"));
  if (type == "NFC") {
    *nfc = true;
    return CheckKeys(node, "normalizer NFC", {"type"});
  }
  if (type == "Sequence") {
    OSCAR_RETURN_IF_ERROR(CheckKeys(node, "normalizer Sequence", {"type", "normalizers"}));
    const auto list = node.find("normalizers");
    if (list == node.end() || !list->is_array()) {
      return DataLoss("normalizer Sequence: \"normalizers\" must be a list");
    }
    for (const auto& child : *list) OSCAR_RETURN_IF_ERROR(ReadNormalizer(child, depth + 1, nfc));
    return {};
  }
  return Unimplemented(
      fmt::format("normalizer: type \"{}\" is not supported; known are NFC and Sequence", type));
}

Result<std::vector<AddedToken>> ReadAddedTokens(const json& list, const Vocabulary& vocabulary) {
  std::vector<AddedToken> tokens;
  if (list.is_null()) return tokens;
  if (!list.is_array() || list.size() > kMaxAddedTokens) {
    return Unexpected(
        DataLoss(fmt::format("added_tokens must be a list of at most {}", kMaxAddedTokens)));
  }
  std::unordered_set<TokenId> seen_ids;
  std::unordered_set<std::string> seen_contents;
  for (const auto& item : list) {
    const std::string where = fmt::format("added_tokens[{}]", tokens.size());
    OSCAR_RETURN_IF_ERROR(
        CheckKeys(item, where,
                  {"id", "content", "special", "normalized", "single_word", "lstrip", "rstrip"}));
    AddedToken token;
    const auto content = item.find("content");
    if (content == item.end() || !content->is_string()) {
      return Unexpected(DataLoss(fmt::format("{}: \"content\" must be a string", where)));
    }
    token.content = content->get<std::string>();
    if (token.content.empty() || token.content.size() > kMaxAddedTokenBytes) {
      return Unexpected(DataLoss(
          fmt::format("{}: \"content\" must have 1 to {} bytes", where, kMaxAddedTokenBytes)));
    }
    const auto id = item.find("id");
    if (id == item.end() || !id->is_number_unsigned() ||
        id->get<uint64_t>() > static_cast<uint64_t>(kMaxTokenId)) {
      return Unexpected(
          DataLoss(fmt::format("{}: \"id\" must be an integer in 0..{}", where, kMaxTokenId)));
    }
    token.id = id->get<TokenId>();
    OSCAR_ASSIGN_OR_RETURN(token.special, Bool(item, "special", false, where));
    OSCAR_ASSIGN_OR_RETURN(token.normalized, Bool(item, "normalized", !token.special, where));
    OSCAR_ASSIGN_OR_RETURN(token.single_word, Bool(item, "single_word", false, where));
    OSCAR_ASSIGN_OR_RETURN(token.lstrip, Bool(item, "lstrip", false, where));
    OSCAR_ASSIGN_OR_RETURN(token.rstrip, Bool(item, "rstrip", false, where));
    // The same token may stand in the vocabulary too, then under the same id.
    if (vocabulary.Contains(token.id)) {
      const auto bytes = AlphabetToBytes(token.content);
      const std::string_view there = vocabulary.Bytes(token.id);
      if (there != token.content && !(bytes && there == *bytes) &&
          there != MarksToSpaces(token.content)) {
        return Unexpected(DataLoss(
            fmt::format("{}: id {} belongs to another token of the vocabulary", where, token.id)));
      }
    }
    if (!seen_ids.insert(token.id).second || !seen_contents.insert(token.content).second) {
      return Unexpected(DataLoss(
          fmt::format("{}: id {} or {:?} is given twice", where, token.id, token.content)));
    }
    tokens.push_back(std::move(token));
  }
  return tokens;
}

Status ReadTemplate(const json& node, TokenizerParts* parts) {
  OSCAR_RETURN_IF_ERROR(CheckKeys(node, "post_processor TemplateProcessing",
                                  {"type", "single", "pair", "special_tokens"}));
  const auto single = node.find("single");
  const auto specials = node.find("special_tokens");
  if (single == node.end() || !single->is_array() || specials == node.end() ||
      !specials->is_object()) {
    return DataLoss(
        "post_processor TemplateProcessing: \"single\" must be a list and \"special_tokens\" an "
        "object");
  }
  bool seen_sequence = false;
  for (const auto& piece : *single) {
    if (piece.is_object() && piece.size() == 1 && piece.contains("Sequence")) {
      if (std::exchange(seen_sequence, true)) {
        return DataLoss("post_processor TemplateProcessing: \"single\" has two sequences");
      }
      continue;
    }
    const bool well_formed = piece.is_object() && piece.size() == 1 &&
                             piece.contains("SpecialToken") && piece["SpecialToken"].is_object() &&
                             piece["SpecialToken"].contains("id") &&
                             piece["SpecialToken"]["id"].is_string();
    if (!well_formed) {
      return DataLoss("post_processor TemplateProcessing: \"single\" has an unknown piece");
    }
    const std::string& name = piece["SpecialToken"]["id"].get_ref<const std::string&>();
    const auto special = specials->find(name);
    if (special == specials->end() || !special->is_object() || !special->contains("ids") ||
        !(*special)["ids"].is_array()) {
      return DataLoss(fmt::format("post_processor TemplateProcessing: {:?} has no \"ids\"", name));
    }
    for (const auto& id : (*special)["ids"]) {
      if (!id.is_number_unsigned() || id.get<uint64_t>() > static_cast<uint64_t>(kMaxTokenId)) {
        return DataLoss(fmt::format("post_processor TemplateProcessing: bad id of {:?}", name));
      }
      (seen_sequence ? parts->suffix_ids : parts->prefix_ids).push_back(id.get<TokenId>());
    }
  }
  if (!seen_sequence) {
    return DataLoss("post_processor TemplateProcessing: \"single\" has no sequence");
  }
  return {};
}

Status ReadPostProcessor(const json& node, int depth, TokenizerParts* parts) {
  if (node.is_null()) return {};
  if (depth > kMaxDepth) return DataLoss("post_processor: nested too deeply");
  OSCAR_ASSIGN_OR_RETURN(const std::string type, TypeOf(node, "post_processor"));
  if (type == "ByteLevel") return {};  // moves offsets, not ids
  if (type == "TemplateProcessing") {
    if (!parts->prefix_ids.empty() || !parts->suffix_ids.empty()) {
      return Unimplemented("post_processor: two TemplateProcessing steps are not supported");
    }
    return ReadTemplate(node, parts);
  }
  if (type == "Sequence") {
    const auto list = node.find("processors");
    if (list == node.end() || !list->is_array()) {
      return DataLoss("post_processor Sequence: \"processors\" must be a list");
    }
    for (const auto& child : *list) {
      OSCAR_RETURN_IF_ERROR(ReadPostProcessor(child, depth + 1, parts));
    }
    return {};
  }
  return Unimplemented(fmt::format(
      "post_processor: type \"{}\" is not supported; known are ByteLevel, TemplateProcessing and "
      "Sequence",
      type));
}

Status CheckDecoder(const json& node) {
  OSCAR_ASSIGN_OR_RETURN(const std::string type, TypeOf(node, "decoder"));
  if (type == "ByteLevel") return {};
  if (type == "Sequence" && node.contains("decoders") && node["decoders"].is_array() &&
      node["decoders"].size() == 1 && node["decoders"][0].is_object() &&
      node["decoders"][0].value("type", json()) == "ByteLevel") {
    return {};
  }
  return Unimplemented(
      fmt::format("decoder: type \"{}\" is not supported; only ByteLevel is", type));
}

Result<TokenizerParts> ReadParts(const json& file) {
  // Truncation and padding are per-call settings of the library that wrote the file, which its own
  // callers override on every call; they say nothing about the ids of a text.
  OSCAR_RETURN_IF_ERROR(CheckKeys(file, "tokenizer",
                                  {"version", "truncation", "padding", "added_tokens", "normalizer",
                                   "pre_tokenizer", "post_processor", "decoder", "model"}));
  for (const char* key : {"pre_tokenizer", "decoder", "model"}) {
    if (!file.contains(key)) return Unexpected(DataLoss(fmt::format("\"{}\" is missing", key)));
  }
  if (const auto version = file.find("version"); version != file.end() && *version != "1.0") {
    return Unexpected(Unimplemented(
        fmt::format("version {} is not supported; only \"1.0\" is", version->dump())));
  }
  std::optional<PreTokenizer> pre_tokenizer;
  std::optional<SpaceRules> spaces;
  bool nfc = false;
  const json normalizer = file.value("normalizer", json());
  if (file["model"].is_object() && file["model"].value("byte_fallback", json()) == true) {
    OSCAR_ASSIGN_OR_RETURN(spaces,
                           ReadSpaceRules(normalizer, file["pre_tokenizer"], file["decoder"]));
  } else {
    OSCAR_ASSIGN_OR_RETURN(pre_tokenizer, PreTokenizer::FromJson(file["pre_tokenizer"]));
    OSCAR_RETURN_IF_ERROR(CheckDecoder(file["decoder"]));
    OSCAR_RETURN_IF_ERROR(ReadNormalizer(normalizer, 0, &nfc));
  }
  OSCAR_ASSIGN_OR_RETURN(BpeModel model, ReadModel(file["model"]));
  OSCAR_ASSIGN_OR_RETURN(auto added,
                         ReadAddedTokens(file.value("added_tokens", json()), model.vocabulary()));
  TokenizerParts parts{
      std::move(model), std::move(pre_tokenizer), spaces, nfc, std::move(added), {}, {}};
  OSCAR_RETURN_IF_ERROR(ReadPostProcessor(file.value("post_processor", json()), 0, &parts));
  return parts;
}

}  // namespace

Result<TokenizerParts> ParseTokenizerJson(std::string_view text, std::string_view name) {
  OSCAR_ASSIGN_OR_RETURN(const json file, ParseJson(text, name));
  auto parts = ReadParts(file);
  if (!parts.has_value()) {
    // Names in these messages come from the file.
    const Status printable(parts.error().code(), Printable(parts.error().message(), 500));
    return Unexpected(printable.WithContext(name));
  }
  return parts;
}

}  // namespace oscar
