// Harmony, the format of gpt-oss: an answer is a sequence of messages, each in a channel.
//
//   <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary
//   to=functions.f <|constrain|>json<|message|>{...}<|call|>
//
// "analysis" is reasoning, "final" is the answer, "commentary" is said before calls. A recipient
// ("to=") makes a message a call in any channel; it stands in the role's part or in the channel's.
// Internal to this module.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "toolcall/answer_parser.h"

namespace oscar {

std::unique_ptr<AnswerParser> MakeHarmonyParser(const AnswerSyntax& syntax);
std::vector<std::string_view> HarmonyMarkers();

}  // namespace oscar
