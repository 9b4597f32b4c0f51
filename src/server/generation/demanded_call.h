// The grammar of an answer that must call a tool (tool_choice "required", or a function): calls as
// the model's format writes them, with arguments that keep to the tools' schemas. Pure functions.
#pragma once

#include "grammar/spec.h"
#include "oscar/status.h"
#include "text/tokenizer.h"
#include "toolcall/answer_parser.h"
#include "toolcall/call_frame.h"

namespace oscar::server {

// For an answer that is read as `syntax` says. Control tokens of the tokenizer that stand in frames
// are asked for as tokens, since masks never allow their text. kInvalidArgument where a schema is
// refused: what CheckGrammarSpec refuses and, where arguments are written as tags, what cannot be
// written so that it is read as a value of the schema.
Result<GrammarSpec> DemandGrammar(const DemandedCall& demand, const AnswerSyntax& syntax,
                                  const Tokenizer& tokenizer);

}  // namespace oscar::server
