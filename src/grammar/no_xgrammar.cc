// Stands for xgrammar_compiler.cc where the build has no xgrammar.
#include "grammar/local_compiler.h"

namespace oscar {

bool HasLocalCompiler() { return false; }

Result<std::unique_ptr<LocalCompiler>> MakeLocalCompiler(const GrammarVocabulary&, double) {
  return Unexpected(
      Unimplemented("this build has no structured output: run scripts/setup.sh and configure with "
                    "-DOSCAR_XGRAMMAR=ON"));
}

}  // namespace oscar
