// The compiler over a vocabulary of single bytes and some words, and over the demo model's.
#include "grammar/compiler.h"

#include <fmt/core.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "grammar/local_compiler.h"

namespace oscar {
namespace {

using Kind = GrammarSpec::Kind;
using testing::HasSubstr;

constexpr int kStop = 0;

GrammarVocabulary SmallVocabulary() {
  GrammarVocabulary vocabulary;
  vocabulary.tokens = {"", ""};  // the stop token and another control token
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.tokens.push_back(std::string(1, static_cast<char>(byte)));
  }
  for (const char* word : {"yes", "no", "maybe", "{\"", "\":", " true", "123", "\xc3\xa9"}) {
    vocabulary.tokens.push_back(word);
  }
  vocabulary.tokens.resize(300);  // padding, as models have
  vocabulary.stop_tokens = {kStop};
  return vocabulary;
}

class GrammarCompilerTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!GrammarCompiler::IsBuiltIn()) GTEST_SKIP() << "built without xgrammar";
  }

  static int TokenOf(const GrammarVocabulary& vocabulary, const std::string& text) {
    for (size_t i = 0; i < vocabulary.tokens.size(); ++i) {
      if (vocabulary.tokens[i] == text) return static_cast<int>(i);
    }
    return -1;
  }
  std::vector<std::string> Allowed(GrammarMatcher& matcher) {
    std::vector<uint32_t> mask((vocabulary_.tokens.size() + 31) / 32);
    EXPECT_TRUE(matcher.Fill(mask).ok());
    std::vector<std::string> allowed;
    for (size_t i = 0; i < vocabulary_.tokens.size(); ++i) {
      if ((mask[i / 32] >> (i % 32) & 1) == 0) continue;
      allowed.push_back(i == kStop ? "<stop>" : vocabulary_.tokens[i]);
    }
    return allowed;
  }
  // Whether the text, byte by byte, is a whole answer.
  bool Matches(const GrammarSpec& spec, const std::string& text) {
    const auto grammar = compiler_.Compile(spec);
    EXPECT_TRUE(grammar.has_value()) << grammar.error().message();
    const auto matcher = (*grammar)->NewMatcher();
    std::vector<uint32_t> mask((vocabulary_.tokens.size() + 31) / 32);
    for (const char c : text) {
      const int token = 2 + static_cast<unsigned char>(c);
      EXPECT_TRUE(matcher->Fill(mask).ok());
      const bool allowed = (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
      const bool accepted = matcher->Accept(token);
      EXPECT_EQ(allowed, accepted) << text;
      if (!accepted) return false;
    }
    EXPECT_FALSE(matcher->finished());
    return matcher->Accept(kStop) && matcher->finished();
  }

  GrammarVocabulary vocabulary_ = SmallVocabulary();
  GrammarCompiler compiler_{{SmallVocabulary(), {}, ""}};
};

TEST_F(GrammarCompilerTest, ChoicesAreTakenTokenByToken) {
  const auto grammar = compiler_.Compile({Kind::kChoice, "", {"yes", "no", "yesterday"}});
  ASSERT_TRUE(grammar.has_value());
  const auto matcher = (*grammar)->NewMatcher();
  EXPECT_THAT(Allowed(*matcher), testing::UnorderedElementsAre("y", "n", "yes", "no"));
  ASSERT_TRUE(matcher->Accept(TokenOf(vocabulary_, "yes")));
  EXPECT_THAT(Allowed(*matcher), testing::UnorderedElementsAre("<stop>", "t"));
  EXPECT_FALSE(matcher->Accept(TokenOf(vocabulary_, "no")));
  EXPECT_FALSE(matcher->finished());
  EXPECT_TRUE(matcher->Accept(kStop));
  EXPECT_TRUE(matcher->finished());
}

TEST_F(GrammarCompilerTest, EveryKindMatchesWhatItShould) {
  const GrammarSpec object{Kind::kJsonObject, "", {}};
  EXPECT_TRUE(Matches(object, "{}"));
  EXPECT_TRUE(Matches(object, R"({"a": [1, {"b": null}], "c": "\u00e9"})"));
  EXPECT_FALSE(Matches(object, "[1]"));
  EXPECT_FALSE(Matches(object, R"({"a": 1)"));
  const GrammarSpec schema{Kind::kJsonSchema,
                           R"({"type": "object", "properties": {"age": {"type": "integer",
                               "minimum": 18, "maximum": 99}}, "required": ["age"]})",
                           {}};
  EXPECT_TRUE(Matches(schema, R"({"age": 42})"));
  EXPECT_TRUE(Matches(schema, "{\n  \"age\": 18\n}"));
  EXPECT_FALSE(Matches(schema, R"({"age": 17})"));
  EXPECT_FALSE(Matches(schema, R"({"age": 42, "other": 1})"));
  EXPECT_FALSE(Matches(schema, "{}"));
  const GrammarSpec regex{Kind::kRegex, R"(^[a-z]{2,3}-\d+$)", {}};
  EXPECT_TRUE(Matches(regex, "ab-7"));
  EXPECT_FALSE(Matches(regex, "a-7"));
  EXPECT_FALSE(Matches(regex, "ab-"));
  // GBNF: comments, classes, repetition, names with a dash.
  const GrammarSpec grammar{Kind::kGrammar,
                            "# a list of numbers\nroot ::= item-rule (\",\" item-rule)* \".\"\n"
                            "item-rule ::= [0-9]{1,3} | \"x\" [^0-9,.]+\n",
                            {}};
  EXPECT_TRUE(Matches(grammar, "1,22,xyz."));
  EXPECT_FALSE(Matches(grammar, "1,,2."));
  EXPECT_FALSE(Matches(grammar, "1234."));
}

// JSON that a strict reader takes: no control character within a string, whatever bounds it.
TEST_F(GrammarCompilerTest, StringsHoldNoControlCharacters) {
  for (const char* text :
       {R"({"type": "string"})", R"({"type": "string", "maxLength": 9})",
        R"({"type": "string", "minLength": 1, "maxLength": 500})",
        R"({"type": "string", "pattern": "^.+$"})", R"({"type": "string", "pattern": "^[^é]+$"})",
        R"({"type": "string", "pattern": "^\\S\\W\\D$"})",
        R"({"type": "string", "format": "email"})",
        R"({"type": "string", "format": "json-pointer"})", R"({"minLength": 1})", "{}"}) {
    const GrammarSpec schema{Kind::kJsonSchema, text, {}};
    for (const char* inside : {"\t", "\n", "\x01", "\x1f", "a\tb"}) {
      EXPECT_FALSE(Matches(schema, std::string("\"") + inside + "\"")) << text;
    }
  }
  const GrammarSpec pattern{Kind::kJsonSchema, R"({"type": "string", "pattern": "^日.$"})", {}};
  EXPECT_TRUE(Matches(pattern, "\"日é\""));
  EXPECT_FALSE(Matches(pattern, "\"日\"\""));
  EXPECT_FALSE(Matches(pattern, "\"月é\""));
}

// What follows is not the library's own doing: keywords that it passes over.
TEST_F(GrammarCompilerTest, SchemasAreKeptToAsAWhole) {
  const auto matches = [&](const char* schema, const char* text) {
    return Matches({Kind::kJsonSchema, schema, {}}, text);
  };
  EXPECT_FALSE(matches(R"({"type": "object", "required": ["q"]})", "{}"));
  EXPECT_TRUE(matches(R"({"type": "object", "required": ["q"]})", R"({"q": [1]})"));
  EXPECT_FALSE(matches(R"({"required": ["a"]})", "{}"));
  EXPECT_FALSE(
      matches(R"({"required": ["b"], "additionalProperties": {"type": "null"}})", R"({"b": 1})"));
  EXPECT_FALSE(matches(R"({"minLength": 3})", "\"ab\""));
  EXPECT_FALSE(matches(R"({"minimum": 3})", "2"));
  EXPECT_TRUE(matches(R"({"minimum": 3})", "3.5"));
  EXPECT_FALSE(matches(R"({"type": "string", "pattern": "^A(-[0-9]{1,3})?$"})", "\"A7\""));
  EXPECT_TRUE(matches(R"({"type": "string", "pattern": "^A(-[0-9]{1,3})?$"})", "\"A-7\""));
  EXPECT_TRUE(matches(R"({"type": "string", "pattern": "^A(-[0-9]{1,3})?$"})", "\"A\""));
  EXPECT_FALSE(
      matches(R"({"type": "object", "properties": {"\"": {}}, "additionalProperties": {}})",
              R"({"a"": 1})"));
  for (const int length : {0, 1, 120, 121, 300}) {
    const std::string schema =
        fmt::format(R"({{"type": "string", "minLength": {0}, "maxLength": {0}}})", length);
    const auto text = [](int count) {
      return "\"" + std::string(static_cast<size_t>(count), 'x') + "\"";
    };
    EXPECT_TRUE(matches(schema.c_str(), text(length).c_str())) << length;
    EXPECT_FALSE(matches(schema.c_str(), text(length + 1).c_str())) << length;
    if (length == 0) continue;
    EXPECT_FALSE(matches(schema.c_str(), text(length - 1).c_str())) << length;
  }
  for (const char* refused :
       {R"({"type": "string", "pattern": "^\"$"})", R"({"type": "string", "pattern": "^\\\\$"})",
        R"({"type": "string", "pattern": "^\t$"})"}) {
    const auto compiled = compiler_.Compile({Kind::kJsonSchema, refused, {}});
    ASSERT_FALSE(compiled.has_value()) << refused;
    EXPECT_THAT(compiled.error().message(), HasSubstr("pattern"));
  }
}

// Surrogates and overlong forms, which a range of characters in bytes does not rule out.
TEST_F(GrammarCompilerTest, TextIsUtf8) {
  for (const GrammarSpec& spec :
       {GrammarSpec{Kind::kRegex, "[^a]+", {}}, GrammarSpec{Kind::kRegex, ".+", {}},
        GrammarSpec{Kind::kGrammar, "root ::= [^a]+", {}}}) {
    EXPECT_TRUE(Matches(spec, "é日🦉\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf"));
    for (const char* wrong : {"\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x82\xa0\xbf", "\xe0\x80\x80",
                              "\xc0\x80", "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\x80"}) {
      const auto matcher = (*compiler_.Compile(spec))->NewMatcher();
      std::vector<uint32_t> mask((vocabulary_.tokens.size() + 31) / 32);
      bool allowed = true;
      for (const char* c = wrong; *c != 0 && allowed; ++c) {
        const int token = 2 + static_cast<unsigned char>(*c);
        ASSERT_TRUE(matcher->Fill(mask).ok());
        allowed = (mask[static_cast<size_t>(token) / 32] >> (token % 32) & 1) != 0;
        if (allowed) allowed = matcher->Accept(token);
      }
      EXPECT_FALSE(allowed) << testing::PrintToString(std::string(wrong));
    }
  }
}

// A grammar whose masks cost too much ends its own answer.
TEST_F(GrammarCompilerTest, MasksThatTakeTooLongAreAnError) {
  GrammarCompilerOptions options;
  options.vocabulary = SmallVocabulary();
  for (int i = 0; i < 60'000; ++i) options.vocabulary.tokens.push_back(fmt::format("a{}ab", i));
  options.limits.mask_seconds = 1e-5;
  GrammarCompiler compiler(options);
  const auto grammar = compiler.Compile({Kind::kRegex, "(.|a){1,200}b", {}});
  ASSERT_TRUE(grammar.has_value()) << grammar.error().message();
  const auto matcher = (*grammar)->NewMatcher();
  std::vector<uint32_t> mask((options.vocabulary.tokens.size() + 31) / 32);
  Status status;
  for (int i = 0; i < 100'000 && status.ok(); ++i) status = matcher->Fill(mask);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_THAT(status.message(), HasSubstr("masks take"));
}

// Control tokens, padding and bytes that would break a character are never allowed.
TEST_F(GrammarCompilerTest, MasksHoldNoControlTokens) {
  const auto grammar = compiler_.Compile({Kind::kRegex, ".+", {}});
  ASSERT_TRUE(grammar.has_value());
  const auto matcher = (*grammar)->NewMatcher();
  std::vector<uint32_t> mask((vocabulary_.tokens.size() + 31) / 32);
  ASSERT_TRUE(matcher->Fill(mask).ok());
  EXPECT_EQ(mask[0] & 3, 0u);
  for (size_t i = 2 + 256 + 8; i < 300; ++i) EXPECT_EQ(mask[i / 32] >> (i % 32) & 1, 0u) << i;
  EXPECT_EQ(mask[(2 + 0x80) / 32] >> ((2 + 0x80) % 32) & 1, 0u);  // a byte inside a character
  EXPECT_EQ(mask[(2 + 0xc3) / 32] >> ((2 + 0xc3) % 32) & 1, 1u);  // the first of one
}

TEST_F(GrammarCompilerTest, ErrorsSayWhatIsWrong) {
  const auto error = [&](Kind kind, const char* text) {
    const auto compiled = compiler_.Compile({kind, text, {}});
    if (compiled.has_value()) return std::string("compiled");
    EXPECT_EQ(compiled.error().code(), StatusCode::kInvalidArgument);
    return compiled.error().message();
  };
  EXPECT_THAT(error(Kind::kGrammar, "root ::= \"a\" missing"), HasSubstr("missing"));
  EXPECT_THAT(error(Kind::kGrammar, "start ::= \"a\""), HasSubstr("root"));
  EXPECT_THAT(error(Kind::kGrammar, "root ::= (\"a\""), HasSubstr("line 1"));
  EXPECT_NE(error(Kind::kRegex, "a("), "compiled");
  // Warnings of the library are refusals.
  EXPECT_THAT(error(Kind::kRegex, "a(?=b)c"), HasSubstr("ookahead"));
  EXPECT_THAT(error(Kind::kJsonSchema, R"({"type": "number", "multipleOf": 0.1})"),
              HasSubstr("multipleOf"));
  EXPECT_THAT(error(Kind::kJsonSchema, R"({"type": "string", "pattern": "^a+$", "maxLength": 3})"),
              HasSubstr("maxLength"));
  // No answer at all.
  EXPECT_THAT(error(Kind::kGrammar, "root ::= root"), HasSubstr("no answer"));
  EXPECT_THAT(error(Kind::kJsonSchema, R"({"$ref": "#"})"), HasSubstr("no answer"));
  EXPECT_NE(error(Kind::kJsonSchema, R"({"$ref": "#/$defs/none"})"), "compiled");
}

TEST_F(GrammarCompilerTest, KeepsTheMostRecentlyUsedWithinItsBudget) {
  GrammarCompilerOptions options;
  options.vocabulary = SmallVocabulary();
  const auto size = [&](const char* regex) {
    return (*compiler_.Compile({Kind::kRegex, regex, {}}))->bytes() +
           GrammarSpec{Kind::kRegex, regex, {}}.Key().size();
  };
  options.limits.cache_bytes = size("[ab]{3}") + size("[cd]{3}");
  GrammarCompiler compiler(options);
  const auto compile = [&](const char* regex) {
    EXPECT_TRUE(compiler.Compile({Kind::kRegex, regex, {}}).has_value());
  };
  compile("[ab]{3}"), compile("[cd]{3}"), compile("[ab]{3}");
  EXPECT_EQ(compiler.stats().compiled, 2u);
  EXPECT_EQ(compiler.stats().hits, 1u);
  EXPECT_EQ(compiler.stats().entries, 2u);
  compile("[ef]{3}");  // in place of [cd]
  EXPECT_EQ(compiler.stats().entries, 2u);
  EXPECT_LE(compiler.stats().bytes, options.limits.cache_bytes);
  compile("[ab]{3}");
  EXPECT_EQ(compiler.stats().hits, 2u);
  compile("[cd]{3}");
  EXPECT_EQ(compiler.stats().compiled, 4u);
}

TEST_F(GrammarCompilerTest, MayBeAskedFromManyThreads) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      for (int j = 0; j < 8; ++j) {
        const std::string regex = "a{" + std::to_string(1 + (i + j) % 5) + "}";
        const auto grammar = compiler_.Compile({Kind::kRegex, regex, {}});
        ASSERT_TRUE(grammar.has_value());
        const auto matcher = (*grammar)->NewMatcher();
        for (int k = 0; k < 1 + (i + j) % 5; ++k) EXPECT_TRUE(matcher->Accept(2 + 'a'));
        EXPECT_TRUE(matcher->Accept(kStop));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(compiler_.stats().compiled, 5u);
  EXPECT_EQ(compiler_.stats().hits, 59u);
}

TEST_F(GrammarCompilerTest, AProgramThatIsNoWorkerIsAnError) {
  for (const char* program : {"/bin/true", "/nowhere"}) {
    GrammarCompiler compiler({SmallVocabulary(), {}, program});
    const auto grammar = compiler.Compile({Kind::kRegex, "a", {}});
    ASSERT_FALSE(grammar.has_value());
    EXPECT_EQ(grammar.error().code(), StatusCode::kUnavailable) << program;
  }
}

TEST_F(GrammarCompilerTest, WithoutStopTokensTheAnswerEndsWhenItIsComplete) {
  GrammarVocabulary vocabulary = SmallVocabulary();
  vocabulary.stop_tokens.clear();
  GrammarCompiler compiler({vocabulary, {}, ""});
  const auto grammar = compiler.Compile({Kind::kChoice, "", {"yes", "no"}});
  ASSERT_TRUE(grammar.has_value());
  const auto matcher = (*grammar)->NewMatcher();
  EXPECT_TRUE(matcher->Accept(TokenOf(vocabulary, "yes")));
  EXPECT_TRUE(matcher->finished());
}

TEST_F(GrammarCompilerTest, TheVocabularyLeavesControlTokensOut) {
  const auto tokenizer = Tokenizer::Load(OSCAR_DEMO_MODEL);
  ASSERT_TRUE(tokenizer.has_value());
  const int32_t stop = *tokenizer->FindToken("<|im_end|>");
  const int size = tokenizer->vocab_size() + 7;
  const auto vocabulary = GrammarVocabularyOf(*tokenizer, size, std::vector<int32_t>{stop});
  ASSERT_EQ(vocabulary.tokens.size(), static_cast<size_t>(size));
  EXPECT_EQ(vocabulary.tokens[static_cast<size_t>(stop)], "\xff<|im_end|>");
  EXPECT_EQ(vocabulary.tokens.back(), "");
  EXPECT_EQ(vocabulary.tokens[static_cast<size_t>(*tokenizer->FindToken("{"))], "{");
}

TEST(GrammarCompiler, WithoutALibraryItSaysSo) {
  if (GrammarCompiler::IsBuiltIn()) GTEST_SKIP() << "built with xgrammar";
  GrammarCompiler compiler({SmallVocabulary(), {}, ""});
  const auto grammar = compiler.Compile({Kind::kRegex, "a", {}});
  ASSERT_FALSE(grammar.has_value());
  EXPECT_EQ(grammar.error().code(), StatusCode::kUnimplemented);
  EXPECT_THAT(grammar.error().message(), HasSubstr("OSCAR_XGRAMMAR"));
}

}  // namespace
}  // namespace oscar
