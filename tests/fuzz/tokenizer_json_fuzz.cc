// tokenizer.json: whatever loads must encode and decode without harm. The text to encode follows
// the first NUL.
#include "fuzz_util.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/unicode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar;
  const std::string_view input = FuzzText(data, size);
  const size_t nul = input.find('\0');
  const auto tokenizer = Tokenizer::FromJson(input.substr(0, nul), "t.json");
  if (!tokenizer) {
    CheckError(tokenizer.error(), "t.json");
    return 0;
  }
  std::string text =
      nul == std::string_view::npos ? "a b\n<s>" : std::string(input.substr(nul + 1));
  text = ReplaceInvalidUtf8(text);
  const size_t half = text.size() / 2;
  // A boundary inside a character is fine: only the joined text must be UTF-8.
  const std::vector<TextSegment> segments = {{text.substr(0, half), true},
                                             {text.substr(half), false}};
  const auto ids = tokenizer->Encode(segments, {.add_special = true});
  if (!ids) {
    OSCAR_CHECK(ids.error().code() == StatusCode::kResourceExhausted, "{}", ids.error().ToString());
    return 0;
  }
  Detokenizer stream(*tokenizer, false);
  std::string pieces;
  for (const TokenId id : *ids) pieces += stream.Push(id);
  pieces += stream.Finish();
  OSCAR_CHECK(pieces == tokenizer->Decode(*ids, false));
  OSCAR_CHECK(IsValidUtf8(pieces));
  return 0;
}
