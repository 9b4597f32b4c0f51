// ResponseWriter: the answer of a request as a response of OpenAI's Responses API: items of output,
// and the events that build them up. The finished response is put into the store before its last
// byte is given out. See AnswerWriter.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "openai/answer_writer.h"
#include "responses/request.h"
#include "responses/response_store.h"

namespace oscar::server {

struct ResponseHeader {
  std::string id;  // "resp_..."
  int64_t created_at = 0;
  std::string model;
  bool logprobs = false;
  // Of the request.
  std::string echo, input;
  size_t input_items = 0;
  std::shared_ptr<const StoredResponse> previous;
};

class ResponseWriter final : public AnswerWriter {
 public:
  // `keep` takes the finished response where it is to be stored; empty: it is not.
  ResponseWriter(ResponseHeader header, std::function<void(std::shared_ptr<StoredResponse>)> keep);

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
  enum class Kind : uint8_t { kReasoning, kMessage, kCall };
  struct Item {
    Kind kind = Kind::kMessage;
    std::string id;
    std::string text;           // reasoning, content or arguments
    std::string call_id, name;  // of a call
    std::vector<LogprobEntry> logprobs;
    bool complete = true;
  };

  // Members of an object: JSON text by name.
  using Members = std::vector<std::pair<std::string_view, std::string>>;
  static std::string Object(const Members& members);
  void Event(std::string_view type, Members members, std::string* out);
  void ResponseEvent(std::string_view type, std::string body, std::string* out);
  // Of the last item.
  void ItemEvent(std::string_view type, Members members, std::string* out);
  void Open(Kind kind, Item item, std::string* out);
  void Close(bool complete, std::string* out);
  void Delta(std::string_view text, std::string_view event, Members more, std::string* out);
  // Pieces of the answer; events go to `out` where it is not null.
  void Take(ChoicePiece piece, std::string* out);
  void Finish(const FinishInfo& finish, std::string* out);
  std::string Part(const Item& item, bool empty) const;
  std::string ItemText(const Item& item, std::string_view status, bool empty) const;

  // The response as an object, with where its output lies.
  struct Body {
    std::string text;
    size_t output_begin = 0, output_size = 0;
  };
  Body MakeBody(std::string_view status, const std::string& error,
                const std::optional<Usage>& usage) const;
  // Ends the response: stores it and gives its body.
  std::string Complete(const Usage& usage);

  const ResponseHeader header_;
  const std::function<void(std::shared_ptr<StoredResponse>)> keep_;
  std::vector<Item> items_;
  std::optional<size_t> call_;  // index of the call that the last item is
  bool open_ = false;           // the last item is not ended
  bool cut_ = false;            // max_output_tokens ended the answer
  int64_t sequence_ = 0;
};

}  // namespace oscar::server
