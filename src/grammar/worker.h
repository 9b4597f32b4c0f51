// GrammarWorker: the process that tries grammars, from this side. Started when it is first
// needed, and again after it had to be ended. One thread at a time.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "grammar/compiler.h"

namespace oscar {

class GrammarWorker {
 public:
  // All three must outlive this object. Starts nothing.
  GrammarWorker(const std::string& program, const GrammarVocabulary& vocabulary,
                const GrammarLimits& limits);
  ~GrammarWorker();
  GrammarWorker(const GrammarWorker&) = delete;
  GrammarWorker& operator=(const GrammarWorker&) = delete;

  // Compiles and forgets. kInvalidArgument also where a limit was exceeded, and the message names
  // it.
  Status Try(const GrammarSpec& spec);

 private:
  using Clock = std::chrono::steady_clock;
  Status Start();
  void End();
  Status Send(std::string_view bytes, Clock::time_point deadline);
  Status Receive(std::span<char> bytes, Clock::time_point deadline);
  Status Exchange(const GrammarSpec& spec);

  const std::string& program_;
  const GrammarVocabulary& vocabulary_;
  const GrammarLimits& limits_;
  pid_t pid_ = -1;
  int socket_ = -1;
};

}  // namespace oscar
