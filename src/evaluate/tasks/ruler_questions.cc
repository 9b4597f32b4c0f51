// RULER's qa_1 and qa_2: one question about a document, or a few, among many others.
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "tasks/ruler_generator.h"

namespace oscar {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxDocumentBytes = uint64_t{1} << 30;
constexpr int64_t kDocumentStep = 10;

struct Question {
  std::string text;
  std::vector<std::string> answers;
  std::vector<size_t> documents;  // that it is about
  std::vector<size_t> related;    // of the same article: taken before others
};

// Documents in the order of their bytes, each once, and who asks about which.
struct QuestionSet {
  std::vector<std::string> documents;
  std::vector<Question> questions;
};

class DocumentIndex {
 public:
  void Add(std::string text) { texts_.insert(std::move(text)); }
  std::vector<std::string> Sorted() {
    std::vector<std::string> out(texts_.begin(), texts_.end());
    for (size_t i = 0; i < out.size(); ++i) places_[out[i]] = i;
    return out;
  }
  // REQUIRES: added before Sorted().
  size_t PlaceOf(const std::string& text) const { return places_.at(text); }

 private:
  std::set<std::string> texts_;
  std::map<std::string, size_t> places_;
};

// {"data": [{"paragraphs": [{"context", "qas": [{"question", "is_impossible", "answers":
// [{"text"}]}]}]}]}
QuestionSet ReadSquad(const json& root) {
  QuestionSet out;
  DocumentIndex index;
  for (const json& article : root.at("data")) {
    for (const json& paragraph : article.at("paragraphs")) {
      index.Add(paragraph.at("context").get<std::string>());
    }
  }
  out.documents = index.Sorted();
  for (const json& article : root.at("data")) {
    std::vector<size_t> all;
    for (const json& paragraph : article.at("paragraphs")) {
      all.push_back(index.PlaceOf(paragraph.at("context").get<std::string>()));
    }
    for (const json& paragraph : article.at("paragraphs")) {
      const size_t own = index.PlaceOf(paragraph.at("context").get<std::string>());
      for (const json& asked : paragraph.at("qas")) {
        if (asked.value("is_impossible", false)) continue;
        Question question;
        question.text = asked.at("question").get<std::string>();
        for (const json& answer : asked.at("answers")) {
          question.answers.push_back(answer.at("text").get<std::string>());
        }
        if (question.answers.empty()) continue;
        question.documents = {own};
        for (const size_t other : all) {
          if (other != own) question.related.push_back(other);
        }
        out.questions.push_back(std::move(question));
      }
    }
  }
  return out;
}

// [{"question", "answer", "context": [[title, [sentences]]]}]
QuestionSet ReadHotpot(const json& root) {
  QuestionSet out;
  DocumentIndex index;
  const auto text_of = [](const json& entry) {
    std::string text = entry.at(0).get<std::string>() + "\n";
    for (const json& sentence : entry.at(1)) text += sentence.get<std::string>();
    return text;
  };
  for (const json& record : root) {
    for (const json& entry : record.at("context")) index.Add(text_of(entry));
  }
  out.documents = index.Sorted();
  for (const json& record : root) {
    Question question;
    question.text = record.at("question").get<std::string>();
    question.answers = {record.at("answer").get<std::string>()};
    std::set<size_t> seen;
    for (const json& entry : record.at("context")) {
      const size_t place = index.PlaceOf(text_of(entry));
      if (seen.insert(place).second) question.documents.push_back(place);
    }
    out.questions.push_back(std::move(question));
  }
  return out;
}

class QuestionGenerator : public RulerGenerator {
 public:
  explicit QuestionGenerator(QuestionSet set) : set_(std::move(set)) {}
  int64_t step() const override { return std::min(kDocumentStep, max_size()); }
  int64_t min_size() const override { return 1; }
  int64_t max_size() const override { return std::ssize(set_.documents); }
  int64_t max_items() const override { return std::ssize(set_.questions); }
  int64_t answer_tokens() const override { return 32; }
  Scorer scorer() const override { return Scorer::kContainsAny; }

  RulerSample Make(int64_t size, int64_t index, PythonRandom& random) const override {
    const Question& question = set_.questions[static_cast<size_t>(index % max_items())];
    std::vector<size_t> chosen = question.documents;
    const size_t wanted = std::max(static_cast<size_t>(size), chosen.size());
    // Those of the same article first: all of them, or a sample.
    const auto take = [&](const std::vector<size_t>& from) {
      const size_t room = wanted - chosen.size();
      if (from.size() <= room) {
        chosen.insert(chosen.end(), from.begin(), from.end());
        return;
      }
      for (const uint32_t place :
           random.Sample(static_cast<uint32_t>(from.size()), static_cast<uint32_t>(room))) {
        chosen.push_back(from[place]);
      }
    };
    take(question.related);
    if (chosen.size() < wanted) {
      const std::set<size_t> taken(chosen.begin(), chosen.end());
      std::vector<size_t> others;
      for (size_t i = 0; i < set_.documents.size(); ++i) {
        if (!taken.contains(i)) others.push_back(i);
      }
      take(others);
    }
    random.Shuffle(chosen);
    RulerSample out;
    out.outputs = question.answers;
    out.input =
        "Answer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nThe following are given documents.\n\n";
    for (size_t i = 0; i < chosen.size(); ++i) {
      out.input +=
          fmt::format("{}Document {}:\n{}", i == 0 ? "" : "\n\n", i + 1, set_.documents[chosen[i]]);
    }
    out.input +=
        "\n\nAnswer the question based on the given documents. Only give me the answer and do not "
        "output any other words.\n\nQuestion: " +
        question.text;
    out.prefix = " Answer:";
    return out;
  }

 private:
  QuestionSet set_;
};

}  // namespace

Result<std::unique_ptr<RulerGenerator>> MakeQuestionGenerator(std::string_view task,
                                                              const std::filesystem::path& path) {
  OSCAR_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxDocumentBytes));
  OSCAR_ASSIGN_OR_RETURN(const json root, ParseJson(text, path.string()));
  const bool is_squad = task == "qa_1";
  QuestionSet set;
  try {
    set = is_squad ? ReadSquad(root) : ReadHotpot(root);
  } catch (const json::exception& error) {  // a member is missing or of another type
    return Unexpected(
        DataLoss(fmt::format("{}: not {}: {}", path.string(),
                             is_squad ? "SQuAD's JSON, such as dev-v2.0.json"
                                      : "HotpotQA's JSON, such as hotpot_dev_distractor_v1.json",
                             error.what())));
  }
  if (set.questions.empty()) {
    return Unexpected(DataLoss(fmt::format("{}: holds no question with an answer", path.string())));
  }
  return std::make_unique<QuestionGenerator>(std::move(set));
}

}  // namespace oscar
