// What a hub says: listings of both kinds and the targets of redirects. Whatever is accepted stays
// below its folder, has digests that can be names, and is an address that can be sent.
#include "fuzz_util.h"
#include "hub/digest.h"
#include "hub/listing.h"
#include "hub/url.h"

namespace {

void CheckListing(const oscar::Result<oscar::hub::Listing>& listing) {
  if (!listing.has_value()) {
    oscar::CheckError(listing.error(), "hub: ");
    return;
  }
  OSCAR_CHECK(oscar::IsCommit(listing->commit));
  for (const oscar::hub::RemoteFile& file : listing->files) {
    OSCAR_CHECK(oscar::IsSafeRelativePath(file.path));
    OSCAR_CHECK(file.path.front() != '/' &&
                ("/" + file.path + "/").find("/../") == std::string::npos);
    OSCAR_CHECK(file.digest.empty() || oscar::hub::IsDigest(file.digest));
  }
  using oscar::ModelParts;
  OSCAR_CHECK(SelectModelFiles(*listing, ModelParts::kWeights).size() <= listing->files.size());
  OSCAR_CHECK(SelectRotations(*listing, "a").size() <= SelectRotations(*listing, "").size());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace oscar::hub;
  const std::string_view text = oscar::FuzzText(data, size);
  CheckListing(ParseHubListing(text, "hub"));
  CheckListing(ParseModelScopeListing(text, "hub"));
  const Url base = *ParseUrl("https://hub.example:444/a/b?c=d");
  const auto url = ResolveUrl(base, text);
  if (!url.has_value()) return 0;
  OSCAR_CHECK(url->scheme == "http" || url->scheme == "https");
  OSCAR_CHECK(url->target.front() == '/' && url->port > 0 && url->port < 65536);
  for (const char c : url->target + url->host) OSCAR_CHECK(c > 0x20 && c < 0x7f);
  // It is one address, whoever reads it.
  const auto again = ParseUrl(url->Origin() + url->target);
  OSCAR_CHECK(again.has_value() && again->Origin() == url->Origin() &&
              again->target == url->target);
  [[maybe_unused]] const auto name = oscar::ParseHubName(text);
  if (name.has_value()) OSCAR_CHECK(name->repository.find("..") != 0);
  return 0;
}
