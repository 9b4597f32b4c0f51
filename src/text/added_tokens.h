// Finds added tokens in text: leftmost, then longest. A trie over the contents; immutable after the
// last Insert and safe from any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace oscar {

class TokenTrie {
 public:
  // `value` must not be negative. Content must not be empty.
  void Insert(std::string_view content, int value);
  bool empty() const { return nodes_.size() == 1; }
  bool MayStart(char c) const { return starts_[static_cast<uint8_t>(c)]; }

  // Calls visit(value, length) for each entry that text[at..] begins with, shortest first.
  template <typename Visit>
  void Match(std::string_view text, size_t at, Visit visit) const {
    uint32_t node = 0;
    for (size_t i = at; i < text.size(); ++i) {
      node = Child(node, text[i]);
      if (node == 0) return;
      if (nodes_[node].value >= 0) visit(nodes_[node].value, i + 1 - at);
    }
  }

 private:
  struct Node {
    int value = -1;
    std::vector<std::pair<char, uint32_t>> children;
  };
  uint32_t Child(uint32_t node, char c) const {  // 0: none
    for (const auto& [symbol, child] : nodes_[node].children) {
      if (symbol == c) return child;
    }
    return 0;
  }
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::array<bool, 256> starts_{};
};

}  // namespace oscar
