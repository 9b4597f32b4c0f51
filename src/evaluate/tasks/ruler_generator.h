// What makes the items of one RULER task; ruler.cc fits them to a length. Immutable.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "oscar/status.h"
#include "tasks/python_random.h"
#include "tasks/suite.h"

namespace oscar {

// One item of a given size.
struct RulerSample {
  std::string input, prefix;
  std::vector<std::string> outputs;
};

class RulerGenerator {
 public:
  virtual ~RulerGenerator() = default;
  // `size` in units of the kind: words, lines, needles, list entries, documents. `index` of the
  // item, for kinds that take their questions from a list.
  virtual RulerSample Make(int64_t size, int64_t index, PythonRandom& random) const = 0;
  // RULER's step of the size, which is also the least that a search begins with.
  virtual int64_t step() const = 0;
  // Below it an item has no room for its own answers.
  virtual int64_t min_size() const = 0;
  virtual int64_t max_size() const { return int64_t{1} << 24; }
  virtual int64_t answer_tokens() const = 0;
  // Items there are at most.
  virtual int64_t max_items() const { return int64_t{1} << 24; }
  virtual Scorer scorer() const { return Scorer::kContainsAll; }
};

// qa_1 and qa_2: questions over documents, of SQuAD's or HotpotQA's own JSON. kDataLoss where the
// file is not that.
Result<std::unique_ptr<RulerGenerator>> MakeQuestionGenerator(std::string_view task,
                                                              const std::filesystem::path& path);

}  // namespace oscar
