// GenerationRun: one request from admission to the log line: the source of its answer.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "generation/generation.h"
#include "generation/served_model.h"
#include "http/http.h"
#include "openai/answer_writer.h"
#include "server/api_server.h"

namespace oscar::server {

class GenerationRun final : public AnswerSource {
 public:
  GenerationRun(ApiServer& server, const ApiServer::Context& context, std::string endpoint,
                std::string request_id, const GenerationParams& params,
                std::unique_ptr<AnswerWriter> writer, std::unique_ptr<Generation> generation);
  ~GenerationRun() override;
  GenerationRun(const GenerationRun&) = delete;
  GenerationRun& operator=(const GenerationRun&) = delete;

  Step Next(Peer peer) override;

 private:
  using Kind = Generation::Update::Kind;

  HttpResponse Whole();
  void Wait(Peer peer, Step* step);
  void Begin(Step* step);
  void Forward(Generation::Update& update, Step* step);
  void Send(std::string_view frame, Step* step);
  std::optional<Usage> Continuous() const;
  std::optional<ApiError> Interrupted() const;
  void Fail(const ApiError& error, Step* step);
  void Gone();
  void Record(std::string_view finish, int status);

  ApiServer& server_;
  std::shared_ptr<const ServedModel> model_;
  std::string endpoint_, request_id_, key_id_;
  bool is_stream_, continuous_usage_, prompt_logprobs_, return_token_ids_;
  int64_t num_best_;  // choices that are told, of each prompt
  Clock::time_point received_;
  std::optional<Clock::time_point> deadline_;
  std::unique_ptr<AnswerWriter> writer_;
  std::unique_ptr<Generation> generation_;
  Clock::time_point last_write_;
  bool streaming_ = false;  // the stream's head is out
  bool recorded_ = false;
};

}  // namespace oscar::server
