// LocalCompiler: the grammar library behind an interface, in this process and without limits. Not
// for sharing between threads.
#pragma once

#include <memory>
#include <string>

#include "grammar/compiler.h"

namespace oscar {

class LocalCompiler {
 public:
  virtual ~LocalCompiler() = default;
  virtual Result<std::shared_ptr<const CompiledGrammar>> Compile(const GrammarSpec& spec) = 0;
};

// kUnimplemented where this build has none. Masks that take longer than `mask_seconds` in the mean
// end their answers with an error.
Result<std::unique_ptr<LocalCompiler>> MakeLocalCompiler(const GrammarVocabulary& vocabulary,
                                                         double mask_seconds);
bool HasLocalCompiler();

}  // namespace oscar
