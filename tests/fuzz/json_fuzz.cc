// The parsers of base/json.h agree with each other, what they accept survives a round trip, and the
// members of an object are those that a parser finds.
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "fuzz_util.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  const std::string_view text = FuzzText(data, size);
  const auto plain = ParseJson(text, "body");
  const auto strict = ParseStrictJson(text, "body");
  const auto ordered = ParseOrderedJson(text, "body");
  if (!plain) CheckError(plain.error(), "body: ");
  if (!strict) CheckError(strict.error(), "body: ");
  if (!ordered) CheckError(ordered.error(), "body: ");
  // Ordered objects are bounded in width; nothing else tells the two apart.
  OSCAR_CHECK(plain.has_value() || !ordered.has_value());
  OSCAR_CHECK(!plain.has_value() || ordered.has_value() || size > kMaxOrderedKeys);
  OSCAR_CHECK(!strict.has_value() || plain.has_value());
  if (plain) {
    const auto again = ParseJson(plain->dump(), "dump");
    OSCAR_CHECK(again.has_value(), "{}", again.error().ToString());
    OSCAR_CHECK(again->dump() == plain->dump());
    OSCAR_CHECK(ParseStrictJson(plain->dump(), "dump").has_value());
  }
  if (strict) OSCAR_CHECK(strict->dump() == plain->dump());
  const auto split = SplitJsonObject(text, "body");
  OSCAR_CHECK(split.has_value() == (ordered.has_value() && ordered->is_object()));
  if (!split) {
    CheckError(split.error(), "body: ");
    return 0;
  }
  auto joined = nlohmann::ordered_json::object();
  for (const JsonMember& member : *split) {
    const auto value = ParseOrderedJson(member.value, "member");
    OSCAR_CHECK(value.has_value(), "{}", value.error().ToString());
    joined[member.name] = *value;
    OSCAR_CHECK(JsonCost(member.value) > 0);
  }
  OSCAR_CHECK(joined == *ordered);
  return 0;
}
