// AnswerWriter: how one API shows the answer of one request: as the frames of a stream, or whole.
// What is streamed and what is whole say the same. One object per request; one thread at a time.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "openai/api_error.h"
#include "openai/response.h"

namespace oscar::server {

class AnswerWriter {
 public:
  virtual ~AnswerWriter() = default;

  // A stream. Each returns frames, perhaps none, in the order of the calls: Begin, the pieces of
  // every choice and its end, End. `now` is there where the client wants usage with every chunk.
  virtual std::string Begin(const Usage& usage, const std::optional<Usage>& now) = 0;
  virtual std::string Piece(size_t choice, ChoicePiece piece, const std::optional<Usage>& now) = 0;
  virtual std::string ChoiceEnd(size_t choice, const FinishInfo& finish,
                                const std::optional<Usage>& now) = 0;
  virtual std::string End(const Usage& usage) = 0;
  // Ends a stream that has begun, instead of what was to come.
  virtual std::string Fail(const ApiError& error) = 0;
  virtual std::string_view ping() const = 0;

  // Not a stream: pieces are kept, and the body is made at the end. `choices` has one entry per
  // choice that is told, best first, with everything but its pieces; its index is Keep's.
  virtual void Keep(size_t choice, ChoicePiece piece) = 0;
  virtual std::string Whole(std::vector<ChoiceResult> choices, const Usage& usage) = 0;
};

}  // namespace oscar::server
