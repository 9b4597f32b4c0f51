// Whatever a client asks an answer to look like, the checks before compiling end, and say what is
// wrong in a line that fits an error. The first byte chooses the kind.
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "fuzz_util.h"
#include "grammar/schema_rewrite.h"
#include "grammar/spec.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using oscar::GrammarSpec;
  if (size == 0) return 0;
  const std::string_view text = oscar::FuzzText(data + 1, size - 1);
  GrammarSpec spec;
  spec.kind = static_cast<GrammarSpec::Kind>(data[0] % 5);
  spec.text = text;
  for (size_t begin = 0; spec.kind == GrammarSpec::Kind::kChoice && begin <= text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    spec.choices.emplace_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  const oscar::Status status = oscar::CheckGrammarSpec(spec);
  OSCAR_CHECK(status.ok() || status.code() == oscar::StatusCode::kInvalidArgument);
  OSCAR_CHECK(status.message().size() < 2000, "{}", status.message());
  if (status.ok() && !spec.choices.empty()) {
    const std::string grammar = oscar::ChoiceGrammar(spec.choices);
    OSCAR_CHECK(grammar.find('\n') == std::string::npos);
  }
  if (status.ok() && spec.kind == GrammarSpec::Kind::kJsonSchema) {
    // Rewritten, it is a schema that the checks still know, and text.
    auto schema = oscar::ParseOrderedJson(spec.text, "schema");
    OSCAR_CHECK(schema.has_value());
    oscar::RewriteSchema(&*schema, "<");
    OSCAR_CHECK(schema->is_object() && !schema->dump().empty());
  }
  return 0;
}
