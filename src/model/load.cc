#include "model/load.h"

namespace oscar {

Result<std::unique_ptr<Decoder>> LoadModel(Device device, const ModelSpec& spec,
                                           const WeightSource& source, const KvPlan& plan,
                                           ThreadPool& threads, const BackendOptions& options) {
  OSCAR_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend,
                         MakeBackend(device, spec, source, plan, threads, options));
  return Decoder::Make(std::move(backend));
}

}  // namespace oscar
