// One repository on a hub: its addresses, its listing, and what its refusals mean to a user. Safe
// from any thread.
#pragma once

#include <string>

#include "hub/http_client.h"
#include "hub/listing.h"
#include "hub/retry.h"
#include "hub/url.h"
#include "io/hub_cache.h"
#include "oscar/status.h"

namespace oscar::hub {

enum class HubKind { kHuggingFace, kModelScope };

struct HubOptions {
  HubKind kind = HubKind::kHuggingFace;
  Url endpoint;
  std::string token;            // empty: none
  std::filesystem::path cache;  // holds models--ORG--NAME
  bool offline = false;
  int parallel = 4;  // files at a time
  HttpOptions http;
  RetryPolicy retry;

  // HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HUB_OFFLINE and so on; for ModelScope
  // MODELSCOPE_ENDPOINT and MODELSCOPE_API_TOKEN, with a separate cache. OSCAR_HUB_FIRST_PAUSE:
  // seconds before a second attempt.
  static Result<HubOptions> FromEnvironment(HubKind kind = HubKind::kHuggingFace);
};

class Remote {
 public:
  Remote(const HubOptions& options, const HubName& name) : options_(options), name_(name) {}
  const HubOptions& options() const { return options_; }
  const HubName& name() const { return name_; }
  // "Qwen/Qwen3-8B", with the revision where one was given.
  std::string Title() const;
  // Of the revision's newest commit.
  Result<Listing> List() const;
  // Size and digest where the listing does not say.
  Status Complete(RemoteFile& file, const std::string& commit) const;
  Url FileUrl(const RemoteFile& file, const std::string& commit) const;
  // What a status that is not 200 or 206 means; `path`: of a file, empty for the listing.
  Status Explain(const HttpAnswer& answer, const std::string& path) const;
  const std::string& Revision() const;

 private:
  Result<HttpAnswer> SendPatiently(const HttpRequest& request, const std::string& path) const;
  Url At(const std::string& target) const;

  const HubOptions& options_;
  const HubName& name_;
};

}  // namespace oscar::hub
