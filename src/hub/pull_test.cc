// A pull in this process, so that sanitizers see its threads. Faults by the dozen are in tests/hub.
#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>

#include <atomic>
#include <fstream>
#include <map>
#include <thread>

#include "base/file.h"
#include "hub/digest.h"
#include "hub/hub.h"

namespace oscar::hub {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

class PullTest : public testing::Test {
 protected:
  PullTest()
      : root_(fs::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    fs::remove_all(root_);
    files_["config.json"] = "{}";
    files_["tokenizer.json"] = std::string(100'000, 't');
    std::string map;
    for (int i = 0; i < 6; ++i) {
      const std::string name = fmt::format("model-{}.safetensors", i);
      files_[name] = std::string(300'000, static_cast<char>('a' + i));
      map += fmt::format("{}\"{}\": \"{}\"", i == 0 ? "" : ", ", i, name);
    }
    files_["model.safetensors.index.json"] = fmt::format("{{\"weight_map\": {{{}}}}}", map);
    server_.Get(R"(/api/models/a/b/revision/main)", [&](const auto&, auto& response) {
      if (busy_ > 0) {
        --busy_;
        response.status = 429;
        response.set_header("Retry-After", "7");
        return;
      }
      response.set_content(Listing(), "application/json");
    });
    server_.Get(R"(/a/b/resolve/[^/]*/(.*))", [](const auto& request, auto& response) {
      response.set_redirect("/cdn/" + request.matches[1].str());
    });
    server_.Get(R"(/cdn/(.*))", [&](const auto& request, auto& response) {
      const std::string& bytes = files_.at(request.matches[1].str());
      // The library cuts ranges out by itself.
      response.set_content_provider(bytes.size(), "application/octet-stream",
                                    [&](size_t offset, size_t length, httplib::DataSink& sink) {
                                      const size_t most =
                                          is_cutting_ ? std::min<size_t>(length, 70'000) : length;
                                      std::string part = bytes.substr(offset, most);
                                      if (is_wrong_) part.back() = 'X';
                                      sink.write(part.data(), part.size());
                                      return most == length;
                                    });
    });
    const int port = server_.bind_to_any_port("127.0.0.1");
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    options_.endpoint = *ParseUrl(fmt::format("http://127.0.0.1:{}", port));
    options_.cache = root_ / "hub";
    options_.retry.sleep = [this](double seconds) { pauses_.push_back(seconds); };
  }
  ~PullTest() override {
    server_.stop();
    thread_.join();
    fs::remove_all(root_);
  }
  std::string Listing() const {
    std::string siblings;
    for (const auto& [name, bytes] : files_) {
      siblings += fmt::format(
          R"({}{{"rfilename": "{}", "size": {}, "lfs": {{"sha256": "{}", "size": {}}}}})",
          siblings.empty() ? "" : ", ", name, bytes.size(), Sha256(bytes), bytes.size());
    }
    return fmt::format(R"({{"sha": "{}", "siblings": [{}]}})", std::string(40, 'a'), siblings);
  }
  Result<fs::path> Pull() { return PullModel({"a/b", ""}, ModelParts::kWeights, options_); }
  void ExpectAll(const Result<fs::path>& pulled) {
    ASSERT_TRUE(pulled.has_value()) << pulled.error().message();
    for (const auto& [name, bytes] : files_) {
      EXPECT_EQ(ReadFile(*pulled / name, 1 << 20).value_or("missing"), bytes) << name;
    }
  }

  const fs::path root_;
  std::map<std::string, std::string> files_;
  std::atomic<int> busy_{0};
  std::atomic<bool> is_cutting_{false}, is_wrong_{false};
  HubOptions options_;
  std::vector<double> pauses_;
  httplib::Server server_;
  std::thread thread_;
};

TEST_F(PullTest, SeveralFilesAtATime) {
  ExpectAll(Pull());
  EXPECT_EQ(*ReadFile(options_.cache / "models--a--b/refs/main", 100), std::string(40, 'a'));
  EXPECT_THAT(pauses_, testing::IsEmpty());
}

TEST_F(PullTest, TwoAtOnce) {
  Result<fs::path> first = Unexpected(Status()), second = first;
  std::thread other([&] { first = Pull(); });
  second = Pull();
  other.join();
  ExpectAll(first);
  ExpectAll(second);
}

TEST_F(PullTest, CutConnectionsAreTakenUpAtOnce) {
  is_cutting_ = true;
  ExpectAll(Pull());
  EXPECT_THAT(pauses_, testing::IsEmpty());
}

TEST_F(PullTest, WaitsAsLongAsItIsAskedTo) {
  busy_ = 2;
  ExpectAll(Pull());
  EXPECT_THAT(pauses_, ElementsAre(7, 7));
}

TEST_F(PullTest, WrongBytesStopEverything) {
  is_wrong_ = true;
  const auto pulled = Pull();
  ASSERT_FALSE(pulled.has_value());
  EXPECT_EQ(pulled.error().code(), StatusCode::kDataLoss);
  EXPECT_THAT(pulled.error().message(), HasSubstr("not those that the hub lists"));
  is_wrong_ = false;
  ExpectAll(Pull());
}

}  // namespace
}  // namespace oscar::hub
