// Text that remembers which of its bytes came from the request and which from the template, through
// every operation of the template engine. A value; const access is safe from any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar::jinja {

class MarkedText {
 public:
  MarkedText() = default;
  MarkedText(std::string text, bool is_input);

  const std::string& text() const { return text_; }
  size_t size() const { return text_.size(); }
  bool empty() const { return text_.empty(); }
  bool HasInput() const { return !input_.empty(); }

  void Append(std::string_view text, bool is_input);
  void Append(const MarkedText& other);
  // Bytes [begin, end), marks and all.
  MarkedText Slice(size_t begin, size_t end) const;
  bool IsInput(size_t at) const;

  // Calls visit(text, is_input) for each maximal stretch, in order.
  template <typename Visit>
  void ForEachSegment(Visit visit) const {
    size_t at = 0;
    const std::string_view text = text_;
    for (const auto& [begin, end] : input_) {
      if (at < begin) visit(text.substr(at, begin - at), false);
      visit(text.substr(begin, end - begin), true);
      at = end;
    }
    if (at < text.size()) visit(text.substr(at), false);
  }

 private:
  std::string text_;
  std::vector<std::pair<size_t, size_t>> input_;  // ordered, disjoint, never adjacent
};

}  // namespace oscar::jinja
