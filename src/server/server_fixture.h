// For tests: the whole server on a free port with a fake engine and the demo tokenizer, and a raw
// HTTP client that shows every byte.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "http/http_server.h"
#include "server/api_server.h"
#include "server/fake_engine.h"

// The HTTP library of clients (oscar bench) is not built for ThreadSanitizer, which therefore
// cannot see that the library's own statics are guarded.
extern "C" __attribute__((used, weak)) const char* __tsan_default_suppressions() {
  return "called_from_lib:libcpp-httplib.so\n";
}

namespace oscar::server {

using Json = nlohmann::ordered_json;

inline const Tokenizer& DemoTokenizer() {
  static const Tokenizer tokenizer = [] {
    auto loaded = Tokenizer::Load(OSCAR_DEMO_MODEL);
    EXPECT_TRUE(loaded.has_value());
    return std::move(*loaded);
  }();
  return tokenizer;
}

inline std::vector<int32_t> Ids(std::string_view text) { return *DemoTokenizer().Encode(text); }

inline const Dialogue& ChatMl() {
  static const Dialogue dialogue = [] {
    TokenizerConfig config;
    config.chat_templates = {{"default",
                              "{#- reasons between <think> and </think> #}"
                              "{% for message in messages %}"
                              "{% if message.content == 'refuse me' %}"
                              "{{ raise_exception('the template refuses') }}{% endif %}"
                              "{% if message.content == 'exhaust me' %}"
                              "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}"
                              "{% endfor %}{% endif %}"
                              "{{ '<|im_start|>' + message.role + '\n' }}{{ message.content }}"
                              "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"}};
    auto created = ChatTemplate::Create(config);
    EXPECT_TRUE(created.has_value());
    return Dialogue(std::move(*Tokenizer::Load(OSCAR_DEMO_MODEL)), std::move(*created), "", {},
                    {*DemoTokenizer().FindToken("<|im_end|>")});
  }();
  return dialogue;
}

struct RawReply {
  int status = 0;
  std::string head, body;
  std::string Header(const std::string& name) const {
    const size_t at = head.find("\r\n" + name + ": ");
    if (at == std::string::npos) return "";
    const size_t begin = at + name.size() + 4;
    return head.substr(begin, head.find("\r\n", begin) - begin);
  }
  Json json() const { return Json::parse(body, nullptr, false); }
};

class RawClient {
 public:
  // `receive_buffer` in bytes; 0 leaves the system's.
  explicit RawClient(int port, int receive_buffer = 0) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    if (receive_buffer > 0) {
      ::setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  ~RawClient() { Close(); }
  void Close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  bool Send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }
  // Reads until `needle` is in the buffer, the connection ends or five seconds pass.
  bool ReadUntil(std::string_view needle, int timeout_ms = 5000) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    while (buffer_.find(needle) == std::string::npos) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
          deadline - std::chrono::steady_clock::now());
      pollfd entry = {fd_, POLLIN, 0};
      if (left.count() <= 0 || ::poll(&entry, 1, static_cast<int>(left.count())) <= 0) return false;
      char chunk[4096];
      const ssize_t got = ::recv(fd_, chunk, sizeof(chunk), 0);
      if (got <= 0) {
        closed_ = true;
        return false;
      }
      buffer_.append(chunk, static_cast<size_t>(got));
    }
    return true;
  }
  bool WaitClosed(int timeout_ms = 5000) {
    ReadUntil("\x01never\x01", timeout_ms);
    return closed_;
  }
  RawReply ReadReply(bool has_body = true) {
    RawReply reply;
    if (!ReadUntil("\r\n\r\n")) return reply;
    const size_t end = buffer_.find("\r\n\r\n");
    reply.head = buffer_.substr(0, end + 2);
    buffer_.erase(0, end + 4);
    reply.status = std::atoi(reply.head.c_str() + 9);
    if (!has_body) return reply;
    if (!reply.Header("Content-Length").empty()) {
      const size_t length = std::stoul(reply.Header("Content-Length"));
      while (buffer_.size() < length && ReadMore()) {
      }
      reply.body = buffer_.substr(0, length);
      buffer_.erase(0, length);
    } else if (reply.Header("Transfer-Encoding") == "chunked") {
      while (true) {
        if (!ReadUntil("\r\n")) return reply;
        const size_t line = buffer_.find("\r\n");
        const size_t size = std::stoul(buffer_.substr(0, line), nullptr, 16);
        while (buffer_.size() < line + 4 + size && ReadMore()) {
        }
        reply.body += buffer_.substr(line + 2, size);
        buffer_.erase(0, line + 4 + size);
        if (size == 0) break;
      }
    }
    return reply;
  }
  std::string& buffer() { return buffer_; }

 private:
  bool ReadMore() {
    pollfd entry = {fd_, POLLIN, 0};
    if (::poll(&entry, 1, 5000) <= 0) return false;
    char chunk[65536];
    const ssize_t got = ::recv(fd_, chunk, sizeof(chunk), 0);
    if (got > 0) buffer_.append(chunk, static_cast<size_t>(got));
    return got > 0;
  }
  int fd_;
  bool closed_ = false;
  std::string buffer_;
};

struct TestServer {
  explicit TestServer(FakeEngine::Author author, ApiOptions api = {}, HttpOptions http_options = {},
                      bool ready = true)
      : engine(std::move(author)) {
    SetLogLevel(LogLevel::kOff);
    http_options.port = 0;
    auto bound = HttpServer::Bind(http_options);
    EXPECT_TRUE(bound.has_value());
    handler = std::make_unique<ApiServer>(std::move(api));
    http = std::move(*bound);
    http->Start(*handler);
    if (ready) SetReady();
  }
  ~TestServer() {
    handler->Abort();
    EXPECT_TRUE(http->Stop(std::chrono::seconds(5)));
    http.reset();
  }
  void SetReady() {
    auto model = std::make_shared<ServedModel>();
    model->names = {"demo", "alias"};
    model->root = "demo";
    model->engine = &engine;
    model->dialogue = dialogue;
    model->limits = limits;
    model->limits.vocab_size = DemoTokenizer().vocab_size();
    model->fingerprint = "fp_test";
    model->properties = R"({"cache": {"method": "oscar+"}})";
    handler->SetModel(std::move(model));
  }

  static std::string Head(const std::string& method, const std::string& path,
                          const std::string& body, const std::string& headers = "") {
    std::string out = method + " " + path + " HTTP/1.1\r\nHost: x\r\n" + headers;
    if (method == "POST") {
      out += "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
             "\r\n";
    }
    return out + "\r\n" + body;
  }
  RawReply Call(const std::string& method, const std::string& path, const std::string& body = "",
                const std::string& headers = "") {
    RawClient client(http->port());
    client.Send(Head(method, path, body, headers));
    return client.ReadReply(method != "HEAD");
  }
  RawReply Post(const std::string& path, const Json& body) {
    return Call("POST", path, body.dump());
  }
  static Json Chat(const Json& extra = Json::object()) {
    Json body = {{"messages", Json::array({{{"role", "user"}, {"content", "hi"}}})}};
    body.update(extra);
    return body;
  }

  FakeEngine engine;
  RequestLimits limits;  // these two as SetReady finds them
  const Dialogue* dialogue = &ChatMl();
  std::unique_ptr<ApiServer> handler;
  std::unique_ptr<HttpServer> http;
};

inline FakeEngine::Author Says(const std::string& text, int token_delay_ms = 0) {
  return [text, token_delay_ms](const EngineRequest&) {
    FakeEngine::Script script;
    script.tokens = Ids(text);
    script.token_delay = std::chrono::milliseconds(token_delay_ms);
    script.cached_tokens = 3;
    return script;
  };
}

}  // namespace oscar::server
