#include "server/serve.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "server/server_fixture.h"

namespace oscar::server {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

TEST(Serve, AddressesCanBeUsedAsPrinted) {
  HttpOptions options;
  EXPECT_EQ(ServerUrl(options, 8000), "http://127.0.0.1:8000");
  options.host = "::1";
  EXPECT_EQ(ServerUrl(options, 8000), "http://[::1]:8000");
  options.tls_certificate = "cert.pem";
  EXPECT_EQ(ServerUrl(options, 8000), "https://[::1]:8000");
}

TEST(Serve, AFailedEngineEndsTheServerWithAnError) {
  FakeEngine engine(Says("x"));
  auto model = std::make_shared<ServedModel>();
  model->names = {"demo"};
  model->engine = &engine;
  ServeOptions options;
  options.http.port = 0;
  options.failure_grace = milliseconds(50);
  std::thread fails([&] {
    std::this_thread::sleep_for(milliseconds(150));
    engine.SetHealth(Unavailable("the engine has failed: a step: illegal memory access"));
  });
  const Status status = RunServer(options, [&]() -> Result<Loaded> { return Loaded{model, {}}; });
  fails.join();
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_THAT(status.message(), HasSubstr("illegal memory access"));
}

}  // namespace
}  // namespace oscar::server
