#include "run/endpoint.h"

#include <fmt/core.h>
#include <httplib.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/json.h"

namespace oscar {
namespace {

using nlohmann::json;

// The first line of what a server said, for messages.
std::string Excerpt(const std::string& body) {
  return body.substr(0, std::min<size_t>(body.find('\n'), 300));
}

std::string TextOf(const json& object, const char* name) {
  if (!object.is_object()) return {};
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : std::string();
}

int64_t CountOf(const json& reply, const char* name) {
  const json usage = reply.value("usage", json());
  if (!usage.is_object()) return 0;
  const json count = usage.value(name, json());
  return count.is_number_integer() ? std::max<int64_t>(count.get<int64_t>(), 0) : 0;
}

// The double that prints as the float does: 0.95, not 0.949999988079071.
double Shortest(float value) { return std::strtod(fmt::format("{}", value).c_str(), nullptr); }

// A server that answers nothing yet is either about to or not there.
constexpr double kFirstPatienceSeconds = 1;
constexpr int kConnectSeconds = 5;
constexpr size_t kMaxReplyBytes = size_t{64} << 20;

bool IsTlsError(httplib::Error error) {
  return error == httplib::Error::SSLConnection || error == httplib::Error::SSLLoadingCerts ||
         error == httplib::Error::SSLServerVerification;
}

}  // namespace

Result<Endpoint> Endpoint::Connect(const EndpointOptions& options) {
  Endpoint out(options);
  const std::string& url = options.url;
  const size_t scheme = url.find("://");
  if (scheme == std::string::npos ||
      (url.substr(0, scheme) != "http" && url.substr(0, scheme) != "https")) {
    return Unexpected(InvalidArgument(fmt::format(
        "--endpoint {}: give http://HOST:PORT or https://HOST, perhaps with a path", url)));
  }
#ifndef CPPHTTPLIB_OPENSSL_SUPPORT
  if (url.substr(0, scheme) == "https") {
    return Unexpected(Unimplemented("--endpoint: this build has no TLS; use http://"));
  }
#endif
  const size_t slash = std::min(url.find('/', scheme + 3), url.size());
  out.host_ = url.substr(0, slash);
  out.path_ = url.substr(slash);
  while (!out.path_.empty() && out.path_.back() == '/') out.path_.pop_back();
  if (!out.path_.ends_with("/v1")) out.path_ += "/v1";
  OSCAR_ASSIGN_OR_RETURN(const std::string body,
                         out.Send("/models", nullptr, kFirstPatienceSeconds));
  OSCAR_ASSIGN_OR_RETURN(const json models, ParseJson(body, url));
  json list = models.is_object() ? models.value("data", json()) : json();
  if (!list.is_array()) list = json::array();
  if (out.options_.model.empty()) {
    if (!list.empty()) out.options_.model = TextOf(list[0], "id");
    if (out.options_.model.empty()) {
      return Unexpected(
          InvalidArgument(fmt::format("{}: lists no model; name one with --endpoint-model", url)));
    }
  }
  for (const json& model : list) {
    if (TextOf(model, "id") != out.options_.model) continue;
    const json length = model.value("max_model_len", json());
    if (length.is_number_integer()) out.context_ = std::max<int64_t>(length.get<int64_t>(), 0);
  }
  return out;
}

Result<std::string> Endpoint::Send(const std::string& route, const std::string* body,
                                   double patience) const {
  httplib::Headers headers;
  if (!options_.api_key.empty()) headers.emplace("Authorization", "Bearer " + options_.api_key);
  const std::string url = host_ + path_ + route;
  std::string reply;
  httplib::Request request;
  request.method = body == nullptr ? "GET" : "POST";
  request.path = path_ + route;
  request.headers = std::move(headers);
  if (body != nullptr) {
    request.body = *body;
    request.set_header("Content-Type", "application/json");
  }
  request.content_receiver = [&](const char* data, size_t size, uint64_t, uint64_t) {
    if (size > kMaxReplyBytes - reply.size()) return false;
    reply.append(data, size);
    return true;
  };
  std::string trouble;
  double pause = options_.first_pause_seconds;
  const auto start = std::chrono::steady_clock::now();
  int attempt = 0;
  while (true) {
    httplib::Client client(host_);
    client.set_connection_timeout(std::chrono::seconds(kConnectSeconds));
    client.set_read_timeout(std::chrono::seconds(static_cast<int64_t>(options_.timeout_seconds)));
    reply.clear();
    const httplib::Result result = client.send(request);
    if (!result) {
      trouble = httplib::to_string(result.error());
      if (result.error() == httplib::Error::Canceled) {
        return Unexpected(
            DataLoss(fmt::format("{}: an answer of more than {} bytes", url, kMaxReplyBytes)));
      }
      if (IsTlsError(result.error())) {
        return Unexpected(Unavailable(
            fmt::format("{}: no TLS connection ({}); if the server speaks plain HTTP give http://",
                        url, trouble)));
      }
      const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
      if (spent.count() + pause > patience) {
        return Unexpected(Unavailable(fmt::format(
            "{}: cannot be reached ({} error, {} attempts); is a server running there, and is "
            "this its address?",
            url, trouble, attempt + 1)));
      }
    } else {
      if (result->status == 200) return reply;
      if (result->has_header("Location")) {  // the key is for the address that was given
        return Unexpected(InvalidArgument(
            fmt::format("{}: the server sends elsewhere, to {}; give --endpoint that address", url,
                        Excerpt(result->get_header_value("Location")))));
      }
      trouble = fmt::format("status {}: {}", result->status, Excerpt(reply));
      if (result->status != 429 && result->status < 500) {
        return Unexpected(InvalidArgument(fmt::format("{}: {}", url, trouble)));
      }
    }
    if (++attempt >= options_.attempts) break;
    std::this_thread::sleep_for(std::chrono::duration<double>(pause));
    pause *= 2;
  }
  return Unexpected(
      Unavailable(fmt::format("{}: {} attempts failed, the last with {}", url, attempt, trouble)));
}

Result<EndpointReply> Endpoint::Complete(const EvalItem& item,
                                         const std::optional<SamplingOptions>& sampling,
                                         uint64_t seed) const {
  json request = {{"model", options_.model},
                  {"max_tokens", item.max_tokens},
                  {"temperature", sampling.has_value() ? Shortest(sampling->temperature) : 0.0}};
  if (sampling.has_value() && sampling->temperature > 0) {
    request["top_p"] = Shortest(sampling->top_p);
    if (sampling->top_k > 0) request["top_k"] = sampling->top_k;
    if (sampling->min_p > 0) request["min_p"] = Shortest(sampling->min_p);
    request["seed"] = seed & 0x7fffffff;
  }
  if (sampling.has_value()) {
    // Sent where set: OpenAI's own API does not know the first, vLLM, SGLang and oscar do.
    if (sampling->repetition_penalty != 1) {
      request["repetition_penalty"] = Shortest(sampling->repetition_penalty);
    }
    if (sampling->presence_penalty != 0) {
      request["presence_penalty"] = Shortest(sampling->presence_penalty);
    }
    if (sampling->frequency_penalty != 0) {
      request["frequency_penalty"] = Shortest(sampling->frequency_penalty);
    }
  }
  if (item.use_template) {
    json messages = json::array();
    if (!item.system.empty()) messages.push_back({{"role", "system"}, {"content", item.system}});
    messages.push_back({{"role", "user"}, {"content", item.prompt + item.prefix}});
    request["messages"] = std::move(messages);
  } else {
    request["prompt"] = item.prompt + item.prefix;
  }
  const std::string body = request.dump(-1, ' ', false, json::error_handler_t::replace);
  OSCAR_ASSIGN_OR_RETURN(const std::string text,
                         Send(item.use_template ? "/chat/completions" : "/completions", &body,
                              std::numeric_limits<double>::infinity()));
  OSCAR_ASSIGN_OR_RETURN(const json reply, ParseJson(text, host_));
  const json choices = reply.is_object() ? reply.value("choices", json()) : json();
  if (!choices.is_array() || choices.empty() || !choices[0].is_object()) {
    return Unexpected(
        DataLoss(fmt::format("{}: an answer without choices: {}", host_, Excerpt(text))));
  }
  const json message = item.use_template ? choices[0].value("message", json()) : choices[0];
  const json said =
      message.is_object() ? message.value(item.use_template ? "content" : "text", json()) : json();
  // Without content it has only thought, or nothing to say.
  if (!message.is_object() || !(said.is_string() || (said.is_null() && item.use_template))) {
    return Unexpected(
        DataLoss(fmt::format("{}: an answer without text: {}", host_, Excerpt(text))));
  }
  EndpointReply out;
  if (said.is_string()) out.text = said.get<std::string>();
  out.prompt_tokens = CountOf(reply, "prompt_tokens");
  out.output_tokens = CountOf(reply, "completion_tokens");
  return out;
}

}  // namespace oscar
