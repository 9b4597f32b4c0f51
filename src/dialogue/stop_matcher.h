// StopMatcher: finds stop strings in text that arrives in pieces and never lets a part of one out
// too early. The match that ends first wins, the longest of several that end together; so the
// result does not depend on how the text was cut. One object per stream; not shared.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar {

class StopMatcher {
 public:
  // `stops` must not hold empty strings. With `include_match` the output keeps the stop string.
  StopMatcher(std::vector<std::string> stops, bool include_match)
      : stops_(std::move(stops)), include_match_(include_match) {}

  // Appends what is safe to show to `out`; true when a stop string ended within `text`: the stream
  // is over, matched() names it. While not `armed` (min_tokens) nothing matches, but a stop string
  // may begin in unarmed text and end in armed text.
  bool Push(std::string_view text, bool armed, std::string* out);
  // The stream ends by itself: what was held comes out.
  void Finish(std::string* out);

  const std::string& matched() const { return stops_[matched_]; }
  // Bytes of the stream that are out.
  size_t emitted() const { return emitted_; }

 private:
  size_t HeldSuffix() const;

  std::vector<std::string> stops_;
  bool include_match_;
  std::string held_;
  size_t matched_ = 0;
  size_t emitted_ = 0;
};

}  // namespace oscar
