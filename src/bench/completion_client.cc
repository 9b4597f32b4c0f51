#include "bench/completion_client.h"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error_text.h"
#include "base/json.h"

namespace oscar {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

constexpr size_t kMaxBody = size_t{64} << 20;   // of an answer that is kept whole
constexpr size_t kMaxLine = size_t{16} << 20;   // of one event
constexpr size_t kMaxPieces = size_t{1} << 22;  // of one answer
constexpr int64_t kMaxTokens = int64_t{1} << 40;
constexpr std::chrono::seconds kGetTimeout{10};

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// A member of an object; null where either is none.
const Json* Member(const Json& object, const char* name) {
  if (!object.is_object()) return nullptr;
  const auto found = object.find(name);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

std::string TextOf(const Json& object, const char* name) {
  const Json* value = Member(object, name);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

// -1 where it is no count.
int64_t CountOf(const Json& object, const char* name) {
  const Json* value = Member(object, name);
  if (value == nullptr || !value->is_number_integer()) return -1;
  const auto count =
      value->is_number_unsigned()
          ? static_cast<int64_t>(std::min<uint64_t>(value->get<uint64_t>(), uint64_t{1} << 62))
          : value->get<int64_t>();
  return count >= 0 && count <= kMaxTokens ? count : -1;
}

// {"error": {"message": ...}}, {"error": "..."}, {"message": ...} (older vLLM) or {"detail": ...}.
std::string ErrorText(const Json& json) {
  if (const Json* error = Member(json, "error"); error != nullptr) {
    if (error->is_string()) return Printable(error->get<std::string>(), 300);
    if (const std::string message = TextOf(*error, "message"); !message.empty()) {
      return Printable(message, 300);
    }
  }
  for (const char* name : {"message", "detail"}) {
    if (const std::string text = TextOf(json, name); !text.empty()) return Printable(text, 300);
  }
  return "failed";
}

Status ErrorOf(int status, const std::string& body) {
  std::string message = Printable(body, 300);
  if (const auto json = ParseOrderedJson(body, "response"); json.has_value() && json->is_object()) {
    message = ErrorText(*json);
  }
  return Unavailable(fmt::format("HTTP {}: {}", status, message));
}

void TakeUsage(const Json& event, LoadAnswer* answer) {
  if (const Json* usage = Member(event, "usage"); usage != nullptr) {
    const int64_t prompt = CountOf(*usage, "prompt_tokens");
    const int64_t completion = CountOf(*usage, "completion_tokens");
    if (prompt >= 0) answer->prompt_tokens = prompt;
    if (completion >= 0) answer->completion_tokens = completion, answer->has_usage = true;
    if (const Json* details = Member(*usage, "prompt_tokens_details"); details != nullptr) {
      answer->cached_tokens = CountOf(*details, "cached_tokens");
    }
    return;
  }
  // llama.cpp's last event, also where it was not asked for usage.
  const Json* timings = Member(event, "timings");
  if (timings == nullptr) return;
  const int64_t read = CountOf(*timings, "prompt_n"), cached = CountOf(*timings, "cache_n");
  const int64_t completion = CountOf(*timings, "predicted_n");
  if (read >= 0) answer->prompt_tokens = read + std::max<int64_t>(cached, 0);
  if (cached >= 0) answer->cached_tokens = cached;
  if (completion >= 0) answer->completion_tokens = completion, answer->has_usage = true;
}

// One "data:" of a stream. True: it has text.
Result<bool> TakeEvent(std::string_view data, LoadAnswer* answer) {
  OSCAR_ASSIGN_OR_RETURN(const Json event, ParseOrderedJson(data, "event"));
  if (!event.is_object()) return Unexpected(DataLoss("an event is not an object"));
  if (Member(event, "error") != nullptr) return Unexpected(Unavailable(ErrorText(event)));
  TakeUsage(event, answer);
  const Json* choices = Member(event, "choices");
  if (choices == nullptr || !choices->is_array() || choices->empty()) return false;
  const Json& choice = choices->front();
  // A token may have no text of its own; the event that ends the answer has no token.
  return !TextOf(choice, "text").empty() || Member(choice, "finish_reason") == nullptr;
}

// Lines of a stream of events, of any line ends, into events.
class EventReader {
 public:
  // `on_event` gets the data of an event, or the message of one that says "error".
  template <typename OnEvent>
  Status Feed(std::string_view bytes, const OnEvent& on_event) {
    while (!bytes.empty()) {
      const size_t end = bytes.find('\n');
      if (line_.size() + std::min(end, bytes.size()) > kMaxLine) {
        return DataLoss("an event is too long");
      }
      line_ += bytes.substr(0, end);
      if (end == std::string_view::npos) return {};
      bytes.remove_prefix(end + 1);
      if (line_.ends_with('\r')) line_.pop_back();
      std::string_view line = line_;
      for (const std::string_view field : {"data:", "error:"}) {
        if (!line.starts_with(field)) continue;
        line.remove_prefix(field.size());
        if (line.starts_with(' ')) line.remove_prefix(1);
        OSCAR_RETURN_IF_ERROR(on_event(line, field == "error:"));
        break;
      }
      line_.clear();
    }
    return {};
  }

 private:
  std::string line_;
};

Status Stream(const ServerAddress& address, const std::string& body,
              std::chrono::milliseconds timeout, const std::function<void()>& on_first,
              LoadAnswer* answer) {
  const auto start = Clock::now();
  EventReader events;
  std::string refusal;
  bool done = false;
  int64_t pieces = 0;
  const auto on_event = [&](std::string_view data, bool is_error) -> Status {
    if (done) return {};
    if (data == "[DONE]") {
      done = true;
      return {};
    }
    if (is_error) {
      const auto json = ParseOrderedJson(data, "error");
      return Unavailable(json.has_value() ? ErrorText(*json) : Printable(data, 300));
    }
    OSCAR_ASSIGN_OR_RETURN(const bool has_text, TakeEvent(data, answer));
    if (!has_text) return {};
    const double now = Seconds(Clock::now() - start);
    if (pieces++ == 0) {
      answer->first_token = now;
      if (on_first) on_first();
    } else {
      if (answer->gaps.size() >= kMaxPieces) return DataLoss("the answer does not end");
      answer->gaps.push_back(static_cast<float>(now - answer->last_token));
    }
    answer->last_token = now;
    return {};
  };
  const Exchange exchange{"POST", "/v1/completions", body, timeout};
  const auto on_piece = [&](int status, std::string_view piece) -> Result<bool> {
    if (status == 200) {
      OSCAR_RETURN_IF_ERROR(events.Feed(piece, on_event));
      return done;
    }
    if (refusal.size() + piece.size() > kMaxBody) {
      return Unexpected(DataLoss("the response is too long"));
    }
    refusal += piece;
    return false;
  };
  OSCAR_ASSIGN_OR_RETURN(const int status, RunExchange(address, exchange, on_piece));
  if (status != 200) return ErrorOf(status, refusal);
  answer->total = Seconds(Clock::now() - start);
  if (!answer->has_usage) answer->completion_tokens = pieces;
  if (!done) return DataLoss("the stream ended without [DONE]");
  return pieces > 0 ? Status{} : DataLoss("an answer without text");
}

}  // namespace

LoadAnswer StreamCompletion(const ServerAddress& address, const std::string& body,
                            std::chrono::milliseconds timeout,
                            const std::function<void()>& on_first) {
  LoadAnswer answer;
  answer.status = Stream(address, body, timeout, on_first, &answer);
  return answer;
}

Result<std::string> HttpGet(const ServerAddress& address, const std::string& path) {
  std::string body;
  const auto on_piece = [&](int, std::string_view piece) -> Result<bool> {
    if (body.size() + piece.size() > kMaxBody) {
      return Unexpected(DataLoss("the response is too long"));
    }
    body += piece;
    return false;
  };
  OSCAR_ASSIGN_OR_RETURN(const int status,
                         RunExchange(address, {"GET", path, "", kGetTimeout}, on_piece));
  if (status != 200) return Unexpected(ErrorOf(status, body));
  return body;
}

Result<ServerInfo> AskServer(const ServerAddress& address) {
  OSCAR_ASSIGN_OR_RETURN(const std::string body, HttpGet(address, "/v1/models"));
  OSCAR_ASSIGN_OR_RETURN(const Json json, ParseOrderedJson(body, "/v1/models"));
  const Json* models = Member(json, "data");
  ServerInfo info;
  if (models != nullptr && models->is_array() && !models->empty()) {
    info.model = TextOf(models->front(), "id");
    info.owner = Printable(TextOf(models->front(), "owned_by"), 40);
  }
  return info;
}

}  // namespace oscar
