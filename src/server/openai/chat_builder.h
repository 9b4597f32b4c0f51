// ChatBuilder: the messages of a chat from the parts that other APIs are made of. What an assistant
// says, thinks and calls between two other messages becomes one message; system text before
// anything else becomes one system message, as most templates take one and take it first. For .cc
// files that parse requests; one thread.
#pragma once

#include <cstddef>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace oscar::server {

class ChatBuilder {
 public:
  using Json = nlohmann::ordered_json;

  // With `join_users` user messages that follow one another become one.
  explicit ChatBuilder(bool join_users) : join_users_(join_users) {}

  // `content` is a string or a list of {"type": "text", "text"}.
  void System(Json content);
  void User(Json content);
  // Joined by newlines where an assistant says several things in a row.
  void AssistantText(std::string_view text);
  void Reasoning(std::string_view text);
  // `arguments`: an object, or the text of one.
  void Call(const std::string& id, const std::string& name, Json arguments);
  // False where no call before it has that id.
  bool Result(const std::string& id, Json content);

  size_t size() const { return messages_.size(); }
  // The last message is an assistant's, and it calls nothing: to be continued.
  bool ends_with_text() const;
  Json Take() { return std::move(messages_); }

 private:
  Json& Assistant();
  void Join(Json content, Json* into);

  const bool join_users_;
  Json messages_ = Json::array();
  std::map<std::string, std::string, std::less<>> calls_;  // id -> name
};

}  // namespace oscar::server
