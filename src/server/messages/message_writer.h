// MessageWriter: the answer of a request as a message of Anthropic's API: content blocks, and the
// events that build them up. See AnswerWriter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "openai/answer_writer.h"

namespace oscar::server {

struct MessageHeader {
  std::string id;  // "msg_..."
  std::string model;
  std::string request_id;
  // The context ends before max_tokens: an answer that uses all of it was cut by the context.
  bool context_is_limit = false;
};

class MessageWriter final : public AnswerWriter {
 public:
  explicit MessageWriter(MessageHeader header) : header_(std::move(header)) {}

  std::string Begin(const Usage& usage, const std::optional<Usage>& now) override;
  std::string Piece(size_t choice, ChoicePiece piece, const std::optional<Usage>& now) override;
  std::string ChoiceEnd(size_t choice, const FinishInfo& finish,
                        const std::optional<Usage>& now) override;
  std::string End(const Usage& usage) override;
  std::string Fail(const ApiError& error) override;
  std::string_view ping() const override;
  void Keep(size_t choice, ChoicePiece piece) override;
  std::string Whole(std::vector<ChoiceResult> choices, const Usage& usage) override;

 private:
  enum class Kind : uint8_t { kThinking, kText, kToolUse };
  // Of a stream only the last block is kept, and nothing of its text.
  struct Block {
    Kind kind = Kind::kText;
    std::string text;  // or the input's JSON
    std::string id, name;
  };

  void Open(Block block, std::string* out);
  void Close(std::string* out);
  void Add(std::string_view text, std::string* out);
  // Events go to `out`; where it is null, blocks are kept whole.
  void Take(ChoicePiece piece, std::string* out);

  const MessageHeader header_;
  std::vector<Block> blocks_;
  size_t count_ = 0;            // of blocks, those that are not kept included
  std::optional<size_t> call_;  // index of the call that the last block is
  bool open_ = false;
  FinishInfo finish_;
};

}  // namespace oscar::server
