#include "hub/remote.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <ctime>

#include "base/error_text.h"
#include "base/file.h"
#include "hub/digest.h"

namespace oscar::hub {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxTokenBytes = 4096;
constexpr int kMaxSeconds = 3600;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

bool IsOn(const char* name) {
  std::string value = Variable(name);
  std::ranges::transform(value, value.begin(),
                         [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return value == "1" || value == "ON" || value == "YES" || value == "TRUE";
}

std::string Trim(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(" \t\r\n") + 1 - first);
}

// The order is that of huggingface_hub.
Result<std::string> FindToken() {
  std::string token = Trim(Variable("HF_TOKEN"));
  std::string from = "HF_TOKEN";
  if (token.empty()) token = Trim(Variable("HUGGING_FACE_HUB_TOKEN"));
  if (token.empty() && !IsOn("HF_HUB_DISABLE_IMPLICIT_TOKEN")) {
    const std::string given = Variable("HF_TOKEN_PATH");
    const fs::path path = given.empty() ? HubHome() / "token" : fs::path(given);
    from = path.string();
    if (const auto text = ReadFile(path, kMaxTokenBytes); text.has_value()) token = Trim(*text);
  }
  const bool is_plain =
      std::ranges::all_of(token, [](unsigned char c) { return c > 0x20 && c < 0x7f; });
  if (!is_plain || token.size() > kMaxTokenBytes) {  // it would end up in a header
    return Unexpected(InvalidArgument(
        fmt::format("{}: not a token: it has spaces or bytes that no token has", from)));
  }
  return token;
}

void ReadSeconds(const char* name, int* seconds) {
  const std::string text = Variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value > 0) {
    *seconds = std::min(value, kMaxSeconds);
  }
}

// W/"abc" -> abc.
std::string PlainEtag(std::string text) {
  if (text.starts_with("W/")) text.erase(0, 2);
  if (text.size() >= 2 && text.front() == '"' && text.back() == '"') {
    text = text.substr(1, text.size() - 2);
  }
  return text;
}

std::optional<uint64_t> Number(const std::string& text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Result<HubOptions> HubOptions::FromEnvironment(HubKind kind) {
  HubOptions out;
  out.kind = kind;
  const bool is_face = kind == HubKind::kHuggingFace;
  const char* name = is_face ? "HF_ENDPOINT" : "MODELSCOPE_ENDPOINT";
  std::string endpoint = Trim(Variable(name));
  if (endpoint.empty()) endpoint = is_face ? "https://huggingface.co" : "https://modelscope.cn";
  auto url = ParseUrl(endpoint);
  if (!url.has_value()) return Unexpected(url.error().WithContext(name));
  out.endpoint = std::move(*url);
  if (is_face) {
    OSCAR_ASSIGN_OR_RETURN(out.token, FindToken());
    out.cache = HubCache();
  } else {
    out.token = Trim(Variable("MODELSCOPE_API_TOKEN"));
    // Beside the hub's, in the same layout: names there are not names here.
    out.cache = HubCache().parent_path() / "modelscope";
  }
  out.offline = IsOn("HF_HUB_OFFLINE") || IsOn("TRANSFORMERS_OFFLINE");
  const std::string pause = Trim(Variable("OSCAR_HUB_FIRST_PAUSE"));
  if (!pause.empty()) {
    char* end = nullptr;
    const double seconds = std::strtod(pause.c_str(), &end);
    if (*end != '\0' || !(seconds >= 0 && seconds <= kMaxSeconds)) {
      return Unexpected(InvalidArgument(
          fmt::format("OSCAR_HUB_FIRST_PAUSE: {}: not a number of seconds", Quote(pause))));
    }
    out.retry.first_pause = seconds;
  }
  ReadSeconds("HF_HUB_ETAG_TIMEOUT", &out.http.connect_seconds);
  ReadSeconds("HF_HUB_DOWNLOAD_TIMEOUT", &out.http.read_seconds);
  return out;
}

const std::string& Remote::Revision() const {
  static const std::string kMain = "main", kMaster = "master";
  return name_.RevisionOr(options_.kind == HubKind::kHuggingFace ? kMain : kMaster);
}

std::string Remote::Title() const {
  return name_.revision.empty() ? name_.repository : name_.repository + "@" + name_.revision;
}

Url Remote::At(const std::string& target) const {
  Url url = options_.endpoint;
  std::string base = url.target.substr(0, url.target.find('?'));
  while (base.ends_with('/')) base.pop_back();
  url.target = base + target;
  return url;
}

Url Remote::FileUrl(const RemoteFile& file, const std::string& commit) const {
  if (options_.kind == HubKind::kHuggingFace) {
    return At(fmt::format("/{}/resolve/{}/{}", name_.repository, commit, Escape(file.path, "/")));
  }
  return At(fmt::format("/api/v1/models/{}/repo?Revision={}&FilePath={}", name_.repository,
                        Escape(Revision()), Escape(file.path)));
}

Status Remote::Explain(const HttpAnswer& answer, const std::string& path) const {
  const std::string code = answer.Header("x-error-code");
  const std::string said = Printable(answer.Header("x-error-message"));
  const std::string reason = said.empty() ? "" : fmt::format(" ({})", said);
  const std::string what = path.empty() ? Title() : fmt::format("{}: {}", Title(), Printable(path));
  const std::string host = options_.endpoint.host;
  Url page = options_.endpoint;
  page.target = "/" + name_.repository;
  const bool has_token = !options_.token.empty();
  const bool is_face = options_.kind == HubKind::kHuggingFace;
  const char* token = is_face ? "HF_TOKEN" : "MODELSCOPE_API_TOKEN";
  if (!answer.is_home) {  // it knows nothing of tokens and names
    return Unavailable(fmt::format("{}: the storage that {} sends on to answers with status {}",
                                   what, host, answer.status));
  }
  switch (answer.status) {
    case 401:
    case 403:
      if (code == "GatedRepo" || (answer.status == 403 && code.empty() && has_token)) {
        return Unavailable(
            has_token
                ? fmt::format(
                      "{}: a gated model, and your token has no access to it{}: accept its terms "
                      "at {} with the account of the token, and wait where it says so",
                      what, reason, page.ForMessages())
                : fmt::format("{}: a gated model: accept its terms at {}, then set {} to a token "
                              "that may read it",
                              what, page.ForMessages(), token));
      }
      if (has_token && code != "RepoNotFound") {
        return Unavailable(
            fmt::format("{}: {} refuses the token{}: it may be invalid or have expired; set {} "
                        "to another, or unset it",
                        what, host, reason, token));
      }
      return NotFound(
          fmt::format("{}: {} has no such model, or it is private{}: check the name; for a private "
                      "one set {} to a token that may read it",
                      what, host, has_token ? " and the token may not read it" : "", token));
    case 404:
      if (code == "RevisionNotFound") {
        return NotFound(fmt::format("{}: {} has no revision {} of it", name_.repository, host,
                                    Quote(Revision())));
      }
      if (!path.empty()) return NotFound(fmt::format("{}: is not on {}", what, host));
      return NotFound(fmt::format("{}: {} has no such model; check the name", what, host));
    case 429:
      return Unavailable(
          fmt::format("{}: {} has had too many requests{}{}", what, host, reason,
                      has_token || !is_face ? "" : "; with a token in HF_TOKEN it allows more"));
    default:
      return Unavailable(
          fmt::format("{}: {} answers with status {}{}", what, host, answer.status, reason));
  }
}

Result<HttpAnswer> Remote::SendPatiently(const HttpRequest& request,
                                         const std::string& path) const {
  Patience patience(options_.retry);
  while (true) {
    const auto answer = Send(request, options_.http);
    if (answer.has_value()) {
      if (!IsPassing(answer->status)) return *answer;
      OSCAR_RETURN_IF_ERROR(
          patience.Wait(Explain(*answer, path), RetryAfter(*answer, std::time(nullptr))));
      continue;
    }
    if (answer.error().code() != StatusCode::kUnavailable) return Unexpected(answer.error());
    OSCAR_RETURN_IF_ERROR(patience.Wait(answer.error().WithContext(Title())));
  }
}

Result<Listing> Remote::List() const {
  HttpRequest request;
  request.token = options_.token;
  request.max_body = kMaxListingBytes;
  const bool is_face = options_.kind == HubKind::kHuggingFace;
  request.url = is_face ? At(fmt::format("/api/models/{}/revision/{}?blobs=true", name_.repository,
                                         Escape(Revision())))
                        : At(fmt::format("/api/v1/models/{}/repo/files?Revision={}&Recursive=True",
                                         name_.repository, Escape(Revision())));
  OSCAR_ASSIGN_OR_RETURN(const HttpAnswer answer, SendPatiently(request, ""));
  if (answer.status != 200) return Unexpected(Explain(answer, ""));
  const std::string what = request.url.ForMessages();
  return is_face ? ParseHubListing(answer.body, what) : ParseModelScopeListing(answer.body, what);
}

Status Remote::Complete(RemoteFile& file, const std::string& commit) const {
  if (file.size.has_value() && !file.digest.empty()) return {};
  HttpRequest request;
  request.method = "HEAD";
  request.token = options_.token;
  request.url = FileUrl(file, commit);
  request.stays_home = true;
  OSCAR_ASSIGN_OR_RETURN(const HttpAnswer answer, SendPatiently(request, file.path));
  if (answer.status >= 400) return Explain(answer, file.path);
  const std::string linked = answer.Linked("x-linked-etag");
  file.digest = PlainEtag(linked.empty() ? answer.Linked("etag") : linked);
  file.size = Number(answer.Linked("x-linked-size"));
  if (!file.size.has_value() && answer.status == 200) {
    file.size = Number(answer.Header("content-length"));
  }
  if (!IsDigest(file.digest) || !file.size.has_value()) {
    return DataLoss(
        fmt::format("{}: {}: {} does not say its size and digest, so that it cannot be checked",
                    Title(), Printable(file.path), request.url.host));
  }
  return {};
}

}  // namespace oscar::hub
