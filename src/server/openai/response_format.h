// The fields that say what an answer has to look like: OpenAI's response_format, vLLM's
// structured_outputs and guided_*, SGLang's json_schema, regex and ebnf, llama.cpp's grammar. All
// of them become one GrammarSpec. For .cc files that parse requests.
#pragma once

#include "openai/field_reader.h"
#include "openai/request.h"

namespace oscar::server {

// At most one constraint per request; two are an error that names both fields.
void ReadConstraint(FieldReader& fields, GenerationParams* params);

// The object of response_format, or of text.format in the Responses API: {"type": ...}. `name` is
// the field's, for errors. Leaves params->constraint alone for {"type": "text"}.
void ReadFormatObject(FieldReader& fields, std::string_view name,
                      const nlohmann::ordered_json& value, GenerationParams* params);

}  // namespace oscar::server
