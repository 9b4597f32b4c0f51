#include "openai/chat_writer.h"

#include <utility>

namespace oscar::server {

std::string ChatWriter::Begin(const Usage&, const std::optional<Usage>& now) {
  std::string out;
  for (size_t i = 0; head_.chat && i < offsets_.size(); ++i) {
    out += SseFrame(RoleChunk(head_, static_cast<int64_t>(i), now));
  }
  return out;
}

std::string ChatWriter::Piece(size_t choice, ChoicePiece piece, const std::optional<Usage>& now) {
  const bool tells = !piece.empty() || (head_.logprobs && !piece.logprobs.empty()) ||
                     (head_.return_token_ids && !piece.token_ids.empty());
  std::string out;
  if (!tells) return out;
  for (const std::string& chunk :
       PieceChunks(head_, static_cast<int64_t>(choice), piece, &offsets_[choice], now)) {
    out += SseFrame(chunk);
  }
  return out;
}

std::string ChatWriter::ChoiceEnd(size_t choice, const FinishInfo& finish,
                                  const std::optional<Usage>& now) {
  return SseFrame(FinishChunk(head_, static_cast<int64_t>(choice), finish, now));
}

std::string ChatWriter::End(const Usage& usage) {
  std::string out;
  if (include_usage_) out += SseFrame(UsageChunk(head_, usage));
  return out += kSseDone;
}

std::string ChatWriter::Fail(const ApiError& error) {
  return SseFrame(ErrorBody(error)) + std::string(kSseDone);
}

void ChatWriter::Keep(size_t choice, ChoicePiece piece) {
  pieces_[choice].Append(std::move(piece));
}

std::string ChatWriter::Whole(std::vector<ChoiceResult> choices, const Usage& usage) {
  for (size_t i = 0; i < choices.size(); ++i) {
    choices[i].piece = std::move(pieces_[static_cast<size_t>(choices[i].index)]);
    choices[i].index = static_cast<int64_t>(i);
  }
  return ResponseBody(head_, choices, usage);
}

}  // namespace oscar::server
