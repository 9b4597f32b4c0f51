#include "hub/hub.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "hub/digest.h"
#include "hub/listing.h"
#include "hub/retry.h"
#include "hub/url.h"

namespace oscar::hub {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string Shown(std::string_view text) {
  const auto url = ParseUrl(text);
  return url.has_value() ? url->Origin() + url->target : "refused";
}

TEST(UrlTest, Parses) {
  EXPECT_EQ(Shown("https://HuggingFace.co"), "https://huggingface.co:443/");
  EXPECT_EQ(Shown("http://localhost:8080/hf?x=1#y"), "http://localhost:8080/hf?x=1");
  EXPECT_EQ(Shown("http://[::1]:80?x"), "http://[::1]:80/?x");
  for (const char* text :
       {"", "huggingface.co", "ftp://a", "https://", "https://a:0", "https://a:70000",
        "https://a:b", "https://user:password@a", "https://a b", "https://a/\r\nX: y",
        "https://a\x01", "http://a%20b", "http://[::1", "http://[g]"}) {
    EXPECT_EQ(Shown(text), "refused") << text;
  }
  EXPECT_EQ(Shown("https://a/" + std::string(9000, 'x')), "refused");
}

TEST(UrlTest, WhereRedirectsLead) {
  const Url base = *ParseUrl("https://hub:1/a/b?q=1");
  const auto to = [&](std::string_view location) {
    const auto url = ResolveUrl(base, location);
    return url.has_value() ? url->Origin() + url->target : "refused";
  };
  EXPECT_EQ(to("https://cdn/x?sig=a%2Fb"), "https://cdn:443/x?sig=a%2Fb");
  EXPECT_EQ(to("/c?d"), "https://hub:1/c?d");
  EXPECT_EQ(to("//cdn/c"), "https://cdn:443/c");
  EXPECT_EQ(to("c"), "https://hub:1/a/c");
  EXPECT_EQ(to("/c?to=http://elsewhere"), "https://hub:1/c?to=http://elsewhere");
  EXPECT_EQ(to("file:///etc/passwd"), "refused");
  EXPECT_EQ(to("https://token@evil/"), "refused");
  EXPECT_EQ(to("/a\nb"), "refused");
  EXPECT_EQ(base.ForMessages(), "https://hub:1/a/b") << "without the query";
}

TEST(UrlTest, Escapes) {
  EXPECT_EQ(Escape("a b/ü?#%+", "/"), "a%20b/%C3%BC%3F%23%25%2B");
  EXPECT_EQ(Escape("refs/pr/1"), "refs%2Fpr%2F1");
}

TEST(UrlTest, ProxiesOfTheEnvironment) {
  for (const char* name : {"http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY",
                           "no_proxy", "NO_PROXY", "HTTP_PROXY"}) {
    ::unsetenv(name);
  }
  const Url secure = *ParseUrl("https://huggingface.co"), plain = *ParseUrl("http://hub.local:80");
  EXPECT_EQ(ProxyFor(secure), "");
  ::setenv("HTTP_PROXY", "http://never:1", 1);  // a web server's client may set it
  ::setenv("HTTPS_PROXY", "http://p:1", 1);
  EXPECT_EQ(ProxyFor(secure), "http://p:1");
  EXPECT_EQ(ProxyFor(plain), "");
  ::setenv("all_proxy", "http://all:1", 1);
  EXPECT_EQ(ProxyFor(plain), "http://all:1");
  ::setenv("NO_PROXY", "example.com, .co:443", 1);
  EXPECT_EQ(ProxyFor(secure), "");
  EXPECT_EQ(ProxyFor(plain), "http://all:1");
  ::setenv("no_proxy", "*", 1);
  EXPECT_EQ(ProxyFor(plain), "");
  for (const char* name : {"HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "NO_PROXY", "no_proxy"}) {
    ::unsetenv(name);
  }
}

TEST(DigestTest, Sha256AndGitsIds) {
  // printf 'hello\n' | sha256sum; printf 'hello\n' | git hash-object --stdin
  const std::string text = "hello\n";
  for (const std::string expected :
       {"5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03",
        "ce013625030ba8dba906f756967f9e9ca394464a"}) {
    Digest whole(expected, text.size());
    whole.Add(text);
    EXPECT_TRUE(whole.Matches()) << expected;
    Digest wrong(expected, text.size());
    wrong.Add(std::string("hellO\n"));
    EXPECT_FALSE(wrong.Matches());
  }
  EXPECT_FALSE(IsDigest("ABCDEF"));
  EXPECT_FALSE(IsDigest(std::string(40, 'G')));
  EXPECT_FALSE(IsDigest("../../../../../../../../../../../etc/pas"));
}

std::string ListingOf(const std::string& siblings) {
  return fmt::format(R"({{"sha": "{}", "siblings": [{}]}})", std::string(40, 'a'), siblings);
}

TEST(ListingTest, SizesAndDigests) {
  const auto listing = ParseHubListing(
      ListingOf(
          R"({"rfilename": "config.json", "size": 3, "blobId": ")" + std::string(40, 'b') +
          R"("}, {"rfilename": "model.safetensors", "size": 9, "blobId": "x", "lfs": {"sha256": ")" +
          std::string(64, 'c') +
          R"(", "size": 9}}, {"rfilename": "a/b.json", "blobId": "../../x"})"),
      "hub");
  ASSERT_TRUE(listing.has_value()) << listing.error().message();
  EXPECT_EQ(listing->commit, std::string(40, 'a'));
  EXPECT_EQ(listing->Find("config.json")->digest, std::string(40, 'b'));
  EXPECT_EQ(listing->Find("model.safetensors")->digest, std::string(64, 'c'));
  EXPECT_EQ(listing->Find("a/b.json")->digest, "") << "no digest is not a name";
  EXPECT_EQ(listing->Find("a/b.json")->size, std::nullopt);
}

TEST(ListingTest, RefusesWhatIsNoListing) {
  const auto error = [](const std::string& text) {
    const auto listing = ParseHubListing(text, "hub");
    return listing.has_value() ? "" : listing.error().message();
  };
  EXPECT_THAT(error("<html>"), HasSubstr("hub"));
  EXPECT_THAT(error("[]"), HasSubstr("not the answer of a hub"));
  EXPECT_THAT(error(R"({"sha": "main", "siblings": []})"), HasSubstr("not the answer of a hub"));
  for (const char* name :
       {"../config.json", "/etc/passwd", "a/../../b", "a\\\\..\\\\b", "", "a//b", "a\\nb"}) {
    EXPECT_THAT(error(ListingOf(fmt::format(R"({{"rfilename": "{}"}})", name))),
                HasSubstr("no name of a file"))
        << name;
  }
  EXPECT_THAT(error(ListingOf("3")), HasSubstr("no name of a file"));
  EXPECT_THAT(error(ListingOf(R"({"rfilename": "a"}, {"rfilename": "a"})")), HasSubstr("twice"));
  EXPECT_THAT(error(std::string(100, '[')), HasSubstr("hub"));
  EXPECT_FALSE(
      ParseModelScopeListing(R"({"Data": {"Files": [{"Path": "../x"}]}})", "ms").has_value());
  EXPECT_FALSE(ParseModelScopeListing(R"({"Code": 10010205001, "Data": null})", "ms").has_value());
}

std::vector<std::string> Paths(const std::vector<RemoteFile>& files) {
  std::vector<std::string> out;
  for (const RemoteFile& file : files) out.push_back(file.path);
  return out;
}

TEST(ListingTest, OnlyWhatTheProgramReads) {
  Listing listing;
  for (const char* path :
       {"README.md", "config.json", "model-00001.safetensors", "model.safetensors.index.json",
        "original/consolidated.safetensors", "pytorch_model.bin", "tokenizer.json", "model.py",
        "rotation/rotation.safetensors", "rotation/notes.txt", "rotation/deep/sensitivity.json",
        "Qwen3-8B/seq1/k_rotation_x.pt", "Qwen3-8B/seq1/v_rotation_x.pt", "Qwen3-8B-x/k_a.pt"}) {
    listing.files.push_back({path, 1, ""});
  }
  EXPECT_THAT(Paths(SelectModelFiles(listing, ModelParts::kConfig)),
              ElementsAre("config.json", "rotation/rotation.safetensors"));
  EXPECT_THAT(Paths(SelectModelFiles(listing, ModelParts::kWeights)),
              ElementsAre("config.json", "model.safetensors.index.json", "tokenizer.json",
                          "rotation/rotation.safetensors"));
  listing.files.push_back({"model.safetensors", 1, ""});
  EXPECT_THAT(Paths(SelectModelFiles(listing, ModelParts::kWeights)),
              ElementsAre("config.json", "tokenizer.json", "rotation/rotation.safetensors",
                          "model.safetensors"));
  EXPECT_THAT(Paths(SelectRotations(listing, "Qwen3-8B")),
              ElementsAre("Qwen3-8B/seq1/k_rotation_x.pt", "Qwen3-8B/seq1/v_rotation_x.pt"));
  EXPECT_THAT(SelectRotations(listing, ""), testing::SizeIs(5));
}

TEST(ListingTest, ModelScopesCommitFollowsItsDigests) {
  const auto commit = [](const std::string& digest) {
    return ParseModelScopeListing(
               fmt::format(R"({{"Data": {{"Files": [{{"Type": "tree", "Path": "a"}},
                   {{"Type": "blob", "Path": "a/k_x.pt", "Size": 5, "Sha256": "{}"}}]}}}})",
                           digest),
               "ms")
        ->commit;
  };
  EXPECT_TRUE(IsCommit(commit(std::string(64, '1'))));
  EXPECT_EQ(commit(std::string(64, '1')), commit(std::string(64, '1')));
  EXPECT_NE(commit(std::string(64, '1')), commit(std::string(64, '2')));
}

TEST(RetryTest, WhatServersAskFor) {
  HttpAnswer answer;
  const auto seconds = [&](const char* name, const char* value) {
    answer.headers = {{name, value}};
    return RetryAfter(answer, 1445412480).value_or(-1);
  };
  EXPECT_EQ(seconds("retry-after", "7"), 7);
  EXPECT_EQ(seconds("retry-after", "Wed, 21 Oct 2015 07:28:30 GMT"), 30);
  EXPECT_EQ(seconds("retry-after", "Wed, 21 Oct 2015 07:00:00 GMT"), 0);
  EXPECT_EQ(seconds("retry-after", "soon"), -1);
  EXPECT_EQ(seconds("retry-after", "-5"), -1);
  EXPECT_EQ(seconds("ratelimit", R"("api";r=0;t=55)"), 55);
}

TEST(RetryTest, PausesGrowAndEnd) {
  std::vector<double> pauses;
  RetryPolicy policy;
  policy.attempts = 4;
  policy.sleep = [&](double seconds) { pauses.push_back(seconds); };
  const Status why = Unavailable("down");
  Patience patience(policy);
  EXPECT_TRUE(patience.Wait(why).ok());
  EXPECT_TRUE(patience.Wait(why).ok());
  patience.Restart();
  EXPECT_TRUE(patience.Wait(why).ok());
  EXPECT_TRUE(patience.Wait(why, 3).ok());
  EXPECT_TRUE(patience.Wait(why).ok());
  EXPECT_THAT(patience.Wait(why).message(), HasSubstr("down; gave up after 4 attempts"));
  EXPECT_THAT(pauses, ElementsAre(0.5, 1, 0.5, 3, 2));
  Patience other(policy);
  EXPECT_THAT(other.Wait(why, 9999).message(), HasSubstr("come back in 9999 s"));
}

TEST(RemoteTest, SaysWhatARefusalMeans) {
  HubOptions options;
  options.endpoint = *ParseUrl("https://huggingface.co");
  const HubName name{"meta-llama/Llama-3.1-8B", "v1"};
  const auto explain = [&](int status, const char* code, const char* path = "") {
    HttpAnswer answer;
    answer.status = status;
    answer.headers["x-error-code"] = code;
    answer.headers["x-error-message"] = "hello\x1b[31m";
    return Remote(options, name).Explain(answer, path).message();
  };
  EXPECT_THAT(explain(401, "GatedRepo", "config.json"),
              AllOf(HasSubstr("gated"), HasSubstr("https://huggingface.co/meta-llama/Llama-3.1-8B"),
                    HasSubstr("HF_TOKEN")));
  EXPECT_THAT(explain(401, "RepoNotFound"),
              AllOf(HasSubstr("no such model"), HasSubstr("private")));
  EXPECT_THAT(explain(404, "RevisionNotFound"), HasSubstr("no revision 'v1'"));
  EXPECT_THAT(explain(404, "EntryNotFound", "a.json"), HasSubstr("a.json: is not on"));
  EXPECT_THAT(explain(429, ""), HasSubstr("HF_TOKEN"));
  EXPECT_THAT(explain(503, ""), HasSubstr("status 503"));
  options.token = "hf_x";
  EXPECT_THAT(explain(403, "GatedRepo"), HasSubstr("your token has no access"));
  EXPECT_THAT(explain(401, ""), HasSubstr("refuses the token"));
  EXPECT_EQ(explain(401, "").find('\x1b'), std::string::npos);
  EXPECT_THAT(explain(401, ""), Not(HasSubstr("hf_x")));
}

TEST(RemoteTest, Addresses) {
  HubOptions options;
  options.endpoint = *ParseUrl("https://mirror/hf/");
  const HubName name{"a/b", ""};
  const RemoteFile file{"x y/ü.json", 1, ""};
  EXPECT_EQ(Remote(options, name).FileUrl(file, "abc").target,
            "/hf/a/b/resolve/abc/x%20y/%C3%BC.json");
  options.kind = HubKind::kModelScope;
  EXPECT_EQ(Remote(options, name).FileUrl(file, "abc").target,
            "/hf/api/v1/models/a/b/repo?Revision=master&FilePath=x%20y%2F%C3%BC.json");
}

}  // namespace
}  // namespace oscar::hub
