#include "openai/response_format.h"

#include <fmt/core.h>

#include <utility>

namespace oscar::server {
namespace {

using Json = nlohmann::ordered_json;
using Kind = GrammarSpec::Kind;

void Set(FieldReader& fields, std::string_view name, GrammarSpec spec, GenerationParams* params) {
  if (params->constraint.has_value()) {
    return fields.FailValue(name,
                            fmt::format("cannot be combined with '{}': an answer has one form",
                                        params->constraint_param));
  }
  if (const Status status = CheckGrammarSpec(spec); !status.ok()) {
    return fields.FailValue(name, fmt::format("is refused: {}", status.message()));
  }
  params->constraint = std::move(spec);
  params->constraint_param = fields.ParamOf(name);
}

// A schema, as an object or as the text of one.
void SetSchema(FieldReader& fields, std::string_view name, const Json& schema,
               GenerationParams* params) {
  GrammarSpec spec;
  spec.kind = Kind::kJsonSchema;
  if (schema.is_object()) {
    spec.text = schema.dump();
  } else if (schema.is_string()) {
    spec.text = schema.get<std::string>();
  } else {
    return fields.FailValue(name, "must be a JSON schema: an object, or the text of one");
  }
  Set(fields, name, std::move(spec), params);
}

void SetText(FieldReader& fields, std::string_view name, Kind kind, const Json& value,
             GenerationParams* params) {
  if (!value.is_string()) return fields.FailValue(name, "must be a string");
  GrammarSpec spec;
  spec.kind = kind;
  spec.text = value.get<std::string>();
  Set(fields, name, std::move(spec), params);
}

void SetChoice(FieldReader& fields, std::string_view name, const Json& value,
               GenerationParams* params) {
  GrammarSpec spec;
  spec.kind = Kind::kChoice;
  if (!value.is_array()) return fields.FailValue(name, "must be a list of strings");
  for (const Json& entry : value) {
    if (!entry.is_string()) return fields.FailValue(name, "must be a list of strings");
    spec.choices.push_back(entry.get<std::string>());
  }
  Set(fields, name, std::move(spec), params);
}

// vLLM's object: one of json, regex, choice, grammar, json_object.
void ReadStructuredOutputs(FieldReader& fields, const Json& value, GenerationParams* params) {
  constexpr const char* kName = "structured_outputs";
  if (!value.is_object()) return fields.FailValue(kName, "must be an object");
  FieldReader inner(value, "structured_outputs.");
  if (const Json* json = inner.Find("json")) SetSchema(inner, "json", *json, params);
  if (const Json* text = inner.Find("regex")) SetText(inner, "regex", Kind::kRegex, *text, params);
  if (const Json* list = inner.Find("choice")) SetChoice(inner, "choice", *list, params);
  if (const Json* text = inner.Find("grammar")) {
    SetText(inner, "grammar", Kind::kGrammar, *text, params);
  }
  bool any_object = false;
  inner.Bool("json_object", &any_object);
  if (any_object) Set(inner, "json_object", {}, params);
  inner.Unsupported("structural_tag");
  inner.Ignore("disable_fallback");  // there is none
  inner.Unsupported("disable_any_whitespace", {false});
  // Properties that a schema does not name are never written unless it says what they are.
  inner.Ignore("disable_additional_properties");
  inner.Unsupported("whitespace_pattern");
  for (const std::string& unknown : inner.Unknown()) {
    inner.FailValue(unknown.substr(0, 64), "is not known");
    break;
  }
  if (!inner.ok()) fields.Fail(inner.error());
}

}  // namespace

void ReadFormatObject(FieldReader& fields, std::string_view name, const Json& value,
                      GenerationParams* params) {
  const auto type = value.is_object() ? value.find("type") : value.end();
  if (!value.is_object() || type == value.end() || !type->is_string()) {
    return fields.FailValue(name, "must be an object with a 'type'");
  }
  if (*type == "text") return;
  if (*type == "json_object") return Set(fields, name, {}, params);
  if (*type != "json_schema") {
    return fields.Fail(UnsupportedParameter(
        fields.ParamOf(name),
        fmt::format("'{}' of this type is not supported: text, json_object and "
                    "json_schema are",
                    fields.ParamOf(name))));
  }
  // Chat completions have an object around the schema, the Responses API has not.
  const auto inner = value.find("json_schema");
  const Json& holder = inner != value.end() ? *inner : value;
  const auto schema = holder.is_object() ? holder.find("schema") : holder.end();
  if (!holder.is_object() || schema == holder.end() || !schema->is_object()) {
    return fields.FailValue(name, "must have a 'json_schema' with a 'schema'");
  }
  if (const auto strict = holder.find("strict");
      strict != holder.end() && !strict->is_boolean() && !strict->is_null()) {
    return fields.FailValue(name, "must have true or false as 'strict'");
  }
  SetSchema(fields, name, *schema, params);
}

void ReadConstraint(FieldReader& fields, GenerationParams* params) {
  if (const Json* format = fields.Find("response_format")) {
    ReadFormatObject(fields, "response_format", *format, params);
  }
  if (const Json* outputs = fields.Find("structured_outputs")) {
    ReadStructuredOutputs(fields, *outputs, params);
  }
  for (const char* name : {"guided_json", "json_schema"}) {
    if (const Json* schema = fields.Find(name)) SetSchema(fields, name, *schema, params);
  }
  for (const char* name : {"guided_regex", "regex"}) {
    if (const Json* text = fields.Find(name)) SetText(fields, name, Kind::kRegex, *text, params);
  }
  if (const Json* list = fields.Find("guided_choice")) {
    SetChoice(fields, "guided_choice", *list, params);
  }
  for (const char* name : {"guided_grammar", "grammar", "ebnf"}) {
    if (const Json* text = fields.Find(name); text != nullptr && *text != "") {
      SetText(fields, name, Kind::kGrammar, *text, params);
    }
  }
  fields.Ignore("guided_decoding_backend");  // there is one
  fields.Unsupported("guided_whitespace_pattern");
}

}  // namespace oscar::server
