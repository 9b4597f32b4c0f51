// ChatWriter: answers of /v1/chat/completions and /v1/completions. See AnswerWriter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "openai/answer_writer.h"
#include "openai/response.h"

namespace oscar::server {

class ChatWriter final : public AnswerWriter {
 public:
  ChatWriter(ResponseHead head, size_t num_choices, bool include_usage)
      : head_(std::move(head)),
        include_usage_(include_usage),
        offsets_(num_choices, 0),
        pieces_(num_choices) {}

  std::string Begin(const Usage& usage, const std::optional<Usage>& now) override;
  std::string Piece(size_t choice, ChoicePiece piece, const std::optional<Usage>& now) override;
  std::string ChoiceEnd(size_t choice, const FinishInfo& finish,
                        const std::optional<Usage>& now) override;
  std::string End(const Usage& usage) override;
  std::string Fail(const ApiError& error) override;
  std::string_view ping() const override { return kSsePing; }
  void Keep(size_t choice, ChoicePiece piece) override;
  std::string Whole(std::vector<ChoiceResult> choices, const Usage& usage) override;

 private:
  const ResponseHead head_;
  const bool include_usage_;
  std::vector<int64_t> offsets_;     // of a stream's choices: text so far
  std::vector<ChoicePiece> pieces_;  // of a whole answer
};

}  // namespace oscar::server
