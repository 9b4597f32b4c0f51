#include "text/jinja/marked_text.h"

#include <algorithm>

namespace oscar::jinja {

MarkedText::MarkedText(std::string text, bool is_input) : text_(std::move(text)) {
  if (is_input && !text_.empty()) input_.emplace_back(0, text_.size());
}

void MarkedText::Append(std::string_view text, bool is_input) {
  if (text.empty()) return;
  const size_t begin = text_.size();
  text_.append(text);
  if (!is_input) return;
  if (!input_.empty() && input_.back().second == begin) {
    input_.back().second = text_.size();
  } else {
    input_.emplace_back(begin, text_.size());
  }
}

void MarkedText::Append(const MarkedText& other) {
  other.ForEachSegment([this](std::string_view text, bool is_input) { Append(text, is_input); });
}

MarkedText MarkedText::Slice(size_t begin, size_t end) const {
  MarkedText out;
  out.text_ = text_.substr(begin, end - begin);
  auto it = std::lower_bound(input_.begin(), input_.end(), begin,
                             [](const auto& range, size_t at) { return range.second <= at; });
  for (; it != input_.end() && it->first < end; ++it) {
    out.input_.emplace_back(std::max(it->first, begin) - begin, std::min(it->second, end) - begin);
  }
  return out;
}

bool MarkedText::IsInput(size_t at) const {
  const auto it =
      std::lower_bound(input_.begin(), input_.end(), at,
                       [](const auto& range, size_t where) { return range.second <= where; });
  return it != input_.end() && it->first <= at;
}

}  // namespace oscar::jinja
