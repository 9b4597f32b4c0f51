// oscar chat: a conversation in the terminal. Answers stream; Ctrl-C stops an answer, not the
// program.
#include "text/chat.h"

#include <fmt/core.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <array>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

#include "base/file.h"
#include "base/json.h"
#include "cli/command.h"
#include "cli/interrupt.h"
#include "cli/line_editor.h"
#include "cli/model_options.h"
#include "cli/report.h"
#include "cli/validators.h"
#include "oscar/language_model.h"

namespace oscar::cli {
namespace {

using nlohmann::ordered_json;

constexpr uint64_t kMaxConversationBytes = uint64_t{256} << 20;
constexpr char kHelp[] =
    "/stats          what the cache holds and saved\n"
    "/read FILE      send a file's text as the next message\n"
    "/save FILE      write the conversation as JSON\n"
    "/load FILE      continue a saved conversation\n"
    "/system TEXT    set the system message and start afresh\n"
    "/reset          start afresh\n"
    "/help           this list\n"
    "/exit           leave (or Ctrl-D); Ctrl-C stops an answer\n";

struct ChatOptions {
  ModelArguments model;
  AnswerArguments answer;
  std::string system;
  bool deterministic = false;
};

// Lines of standard input where that is no terminal, read without a stream in between: a stream
// takes a read that Ctrl-C cut short for the end of the input.
class LineReader {
 public:
  using Event = LineEditor::Event;

  Event Next(std::string* line) {
    size_t searched = 0;
    while (true) {
      const size_t end = held_.find('\n', searched);
      if (end != std::string::npos) {
        line->assign(held_, 0, end > 0 && held_[end - 1] == '\r' ? end - 1 : end);
        held_.erase(0, end + 1);
        return Event::kLine;
      }
      searched = held_.size();
      if (ended_) {
        *line = std::exchange(held_, {});
        return line->empty() ? Event::kEnd : Event::kLine;
      }
      if (InterruptScope::Take()) {
        held_.clear();
        return Event::kInterrupted;
      }
      std::array<char, 4096> buffer;
      const ssize_t count = ::read(STDIN_FILENO, buffer.data(), buffer.size());
      if (count > 0) held_.append(buffer.data(), static_cast<size_t>(count));
      ended_ = count == 0 || (count < 0 && errno != EINTR);
    }
  }

 private:
  std::string held_;  // read, not yet asked for
  bool ended_ = false;
};

class ChatSession {
 public:
  ChatSession(LanguageModel& model, const ChatOptions& options)
      : model_(model),
        is_tty_(::isatty(STDOUT_FILENO) == 1),
        is_deterministic_(options.deterministic),
        completion_(options.answer.Apply(model.default_sampling())) {
    Restart(options.system);
  }

  // False when the conversation is over.
  bool HandleLine(const std::string& text) {
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) return true;
    const std::string line = text.substr(0, text.find_last_not_of('\n') + 1);  // of a paste
    if (line[0] != '/' || line.find('\n') != std::string::npos) {  // commands are one line
      Answer(text);
      return true;
    }
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string argument = space == std::string::npos ? "" : line.substr(space + 1);
    if (name == "/exit" || name == "/quit") return false;
    if (name == "/help") {
      fmt::print("{}", kHelp);
    } else if (name == "/stats") {
      fmt::print("{}\n{}\n", model_.cache().method, CacheLine(model_.cache()));
    } else if (name == "/reset") {
      Restart(system_);
      fmt::print("started afresh\n");
    } else if (name == "/system") {
      Restart(argument);
      fmt::print("started afresh with a new system message\n");
    } else if (name == "/save") {
      Show(Save(argument));
    } else if (name == "/load") {
      Show(LoadConversation(argument));
    } else if (name == "/read") {
      Show(ReadAndAnswer(argument));
    } else {
      fmt::print("{}: unknown command; /help lists them\n", name);
    }
    return true;
  }

 private:
  void Restart(const std::string& system) {
    system_ = system;
    messages_ = ordered_json::array();
    answers_ = ordered_json::array();
    if (!system.empty()) messages_.push_back({{"role", "system"}, {"content", system}});
    model_.Reset();
  }

  static void Show(const Status& status) {
    if (!status.ok()) fmt::print("{}\n", status.message());
  }

  Status ReadAndAnswer(const std::string& path) {
    if (path.empty()) return InvalidArgument("/read needs a file name");
    OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConversationBytes));
    Answer(text);
    return {};
  }

  void Answer(const std::string& text) {
    messages_.push_back({{"role", "user"}, {"content", text}});
    InterruptScope::Take();
    InterruptScope::SetAnswering(&model_);
    if (is_deterministic_) model_.Reset();
    bool in_reasoning = false, mid_line = false;
    const auto style = [&](bool reasoning) {  // reasoning is dim where the terminal can
      if (reasoning == in_reasoning) return;
      in_reasoning = reasoning;
      if (is_tty_) fmt::print("{}", reasoning ? "\x1b[2m" : "\x1b[0m");
      if (!reasoning) fmt::print("\n");
    };
    const Result<Completion> answer =
        model_.Chat(messages_.dump(-1, ' ', false, ordered_json::error_handler_t::replace),
                    completion_, [&](std::string_view piece, bool is_reasoning) {
                      style(is_reasoning);
                      std::fwrite(piece.data(), 1, piece.size(), stdout);
                      std::fflush(stdout);
                      mid_line = !piece.ends_with('\n');
                      return !InterruptScope::Pending();
                    });
    InterruptScope::SetAnswering(nullptr);
    InterruptScope::Take();  // spent on this answer; the next read must not see it
    if (is_tty_ && in_reasoning) fmt::print("\x1b[0m");
    const Status status = answer.has_value() ? answer->status : answer.error();
    if (!status.ok()) {
      messages_.erase(messages_.size() - 1);
      fmt::print("{}{}{}\n", mid_line ? "\n" : "", status.message(),
                 answer.has_value() ? "; message and answer are left out" : "");
      return;
    }
    const bool is_stopped = answer->finish_reason == FinishReason::kCancelled;
    if (is_stopped && answer->token_ids.empty()) {  // a turn without an answer is no turn
      messages_.erase(messages_.size() - 1);
      fmt::print("[stopped while reading the message, which is left out]\n");
      return;
    }
    fmt::print("{}\n", is_stopped                                       ? " [stopped]"
                       : answer->finish_reason == FinishReason::kLength ? " [length]"
                                                                        : "");
    ordered_json message = {{"role", "assistant"}, {"content", answer->text}};
    if (!answer->reasoning.empty()) message["reasoning_content"] = answer->reasoning;
    messages_.push_back(std::move(message));
    answers_.push_back(AnswerToJson(*answer));
    if (is_tty_) fmt::print(stderr, "\x1b[2m{}\x1b[0m\n", CacheLine(answer->cache));
  }

  Status Save(const std::string& path) const {
    if (path.empty()) return InvalidArgument("/save needs a file name");
    const ordered_json saved = {
        {"format", "oscar-conversation-1"}, {"messages", messages_}, {"answers", answers_}};
    OSCAR_RETURN_IF_ERROR(WriteFileAtomically(
        path, saved.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n"));
    fmt::print("saved {} messages to {}\n", messages_.size(), path);
    return {};
  }

  Status LoadConversation(const std::string& path) {
    if (path.empty()) return InvalidArgument("/load needs a file name");
    OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConversationBytes));
    OSCAR_ASSIGN_OR_RETURN(const ordered_json saved, ParseOrderedJson(text, path));
    if (!saved.is_object() || !saved.contains("messages") || !saved["messages"].is_array()) {
      return DataLoss(fmt::format("{}: not a saved conversation (no list \"messages\")", path));
    }
    auto messages = NormalizeMessages(saved["messages"]);
    if (!messages.has_value()) {
      return DataLoss(fmt::format("{}: {}", path, messages.error().message()));
    }
    messages_ = std::move(*messages);
    answers_ = ordered_json::array();  // a saved conversation has no ids of its answers
    const bool has_system = !messages_.empty() && messages_[0]["role"] == "system";
    system_ = has_system && messages_[0]["content"].is_string()  // what /reset keeps
                  ? messages_[0]["content"].get<std::string>()
                  : "";
    model_.Reset();
    fmt::print("loaded {} messages from {}\n", messages_.size(), path);
    return {};
  }

  LanguageModel& model_;
  const bool is_tty_, is_deterministic_;
  const CompletionOptions completion_;
  std::string system_;
  ordered_json messages_, answers_;
};

void Greet(const LanguageModel& model) {
  fmt::print("{} tokens of context; /help lists commands\n", model.max_context());
  if (model.sample_prompts().empty()) return;
  fmt::print("try:\n");
  for (const std::string& prompt : model.sample_prompts()) fmt::print("  {}\n", prompt);
}

Status RunChat(ChatOptions& options) {
  OSCAR_RETURN_IF_ERROR(options.model.Check());
  OSCAR_RETURN_IF_ERROR(options.answer.Check());
  OSCAR_RETURN_IF_ERROR(options.model.Obtain(ModelParts::kWeights));
  OSCAR_ASSIGN_OR_RETURN(const std::unique_ptr<LanguageModel> model,
                         LanguageModel::Load(options.model.options));
  ChatSession session(*model, options);
  LineReader lines;
  const InterruptScope interrupts(InterruptScope::Mode::kEvery);
  const bool interactive = ::isatty(STDIN_FILENO) == 1;
  const int editing = LineEditor::EditingFd();
  std::optional<LineEditor> editor;
  if (editing >= 0) editor.emplace(editing);
  if (interactive) Greet(*model);
  while (true) {
    if (interactive && !editor.has_value()) fmt::print("> ");
    std::fflush(stdout);
    std::string line;
    const LineReader::Event event =
        editor.has_value() ? editor->Next("> ", &line) : lines.Next(&line);
    if (event == LineReader::Event::kInterrupted) {  // Ctrl-C at the prompt: a fresh line
      fmt::print("\n(/exit or Ctrl-D leaves)\n");
      continue;
    }
    if (event == LineReader::Event::kEnd || !session.HandleLine(line)) break;
  }
  if (interactive) fmt::print("\n");
  return {};
}

}  // namespace

void AddChatCommand(CLI::App& app, RunFunction& run) {
  auto options = std::make_shared<ChatOptions>();
  CLI::App* command = app.add_subcommand("chat", "Talk to a model in the terminal");
  command->add_option("--system", options->system, "System message");
  command->add_flag("--deterministic", options->deterministic,
                    "Read the conversation anew for every answer, which is then the one that "
                    "generate --messages gives");
  AddModelOptions(*command, options->model);
  AddAnswerOptions(*command, options->answer);
  command->callback([options, &run] { run = [options] { return RunChat(*options); }; });
}

}  // namespace oscar::cli
