// String operations that keep the marks of their input.
#include <algorithm>
#include <cstring>
#include <vector>

#include "text/jinja/builtins.h"
#include "text/unicode.h"

namespace oscar::jinja {

std::vector<size_t> CodePointOffsets(std::string_view text) {
  std::vector<size_t> offsets;
  offsets.reserve(text.size() + 1);
  for (size_t at = 0; at < text.size(); ++at) {
    if ((static_cast<uint8_t>(text[at]) & 0xC0) != 0x80) offsets.push_back(at);
  }
  offsets.push_back(text.size());
  return offsets;
}

size_t FindText(std::string_view text, std::string_view sought, size_t begin) {
  if (begin > text.size()) return std::string_view::npos;
  // memmem is linear where std::string's search is quadratic.
  const void* found =
      memmem(text.data() + begin, text.size() - begin, sought.data(), sought.size());
  return found == nullptr ? std::string_view::npos
                          : static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

MarkedText Strip(const MarkedText& text, std::optional<std::string_view> characters, bool left,
                 bool right) {
  std::vector<char32_t> set;
  if (characters.has_value()) {
    for (size_t at = 0; at < characters->size();) {
      const Utf8Step step = DecodeUtf8(*characters, at);
      set.push_back(step.code_point);
      at += step.length;
    }
    std::sort(set.begin(), set.end());
  }
  const auto goes = [&](char32_t c) {
    return characters.has_value() ? std::binary_search(set.begin(), set.end(), c)
                                  : IsPythonSpace(c);
  };
  const std::string_view source = text.text();
  size_t begin = 0;
  size_t end = source.size();
  while (left && begin < end) {
    const Utf8Step step = DecodeUtf8(source, begin);
    if (!goes(step.code_point)) break;
    begin += step.length;
  }
  while (right && end > begin) {
    size_t at = end - 1;
    while (at > begin && (static_cast<uint8_t>(source[at]) & 0xC0) == 0x80) --at;
    if (!goes(DecodeUtf8(source, at).code_point)) break;
    end = at;
  }
  return text.Slice(begin, end);
}

MarkedText ChangeCase(const MarkedText& text,
                      const std::function<char32_t(char32_t, size_t)>& map) {
  MarkedText out;
  size_t index = 0;  // of the character
  text.ForEachSegment([&](std::string_view segment, bool is_input) {
    std::string changed;
    changed.reserve(segment.size());
    for (size_t at = 0; at < segment.size();) {
      const Utf8Step step = DecodeUtf8(segment, at);
      AppendUtf8(map(step.code_point, index++), &changed);
      at += step.length;
    }
    out.Append(changed, is_input);
  });
  return out;
}

MarkedText Upper(const MarkedText& text) {
  // The one common letter whose upper case is two.
  const MarkedText widened = text.text().find("\u00DF") == std::string::npos
                                 ? text
                                 : Replace(text, "\u00DF", MarkedText("SS", text.HasInput()), -1);
  return ChangeCase(widened, [](char32_t c, size_t) { return ToUpper(c); });
}

MarkedText Lower(const MarkedText& text) {
  return ChangeCase(text, [](char32_t c, size_t) { return ToLower(c); });
}

MarkedText Capitalize(const MarkedText& text) {
  return ChangeCase(text,
                    [](char32_t c, size_t index) { return index == 0 ? ToUpper(c) : ToLower(c); });
}

MarkedText Replace(const MarkedText& text, std::string_view old, const MarkedText& replacement,
                   int64_t count) {
  const std::string_view source = text.text();
  MarkedText out;
  size_t at = 0;
  if (old.empty()) {
    // Before every character and at the end.
    const std::vector<size_t> offsets = CodePointOffsets(source);
    for (size_t i = 0; i < offsets.size(); ++i) {
      if (count >= 0 && static_cast<int64_t>(i) >= count) break;
      out.Append(text.Slice(at, offsets[i]));
      out.Append(replacement);
      at = offsets[i];
    }
  } else {
    for (int64_t done = 0; count < 0 || done < count; ++done) {
      const size_t found = FindText(source, old, at);
      if (found == std::string_view::npos) break;
      out.Append(text.Slice(at, found));
      out.Append(replacement);
      at = found + old.size();
    }
  }
  out.Append(text.Slice(at, source.size()));
  return out;
}

}  // namespace oscar::jinja
