#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "bindings/tensorflow/tf_c_api.h"
#include "core/status.h"
#include "runtime/communicator.h"

/// What was submitted and not waited for. A graph knows its operations by numbers.
namespace herring::tensorflow_binding {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

/// One operation, and the tensors that it reads and writes.
struct Pending {
  Tensor input;
  Tensor output;
  std::string name;
  std::shared_ptr<runtime::Work> work;
};

/// Lets go of it; its tensors live until nothing reads or writes them.
inline void drop(std::shared_ptr<Pending> pending) {
  if (!pending->work->is_done()) {
    runtime::Work& work = *pending->work;
    work.on_done([kept = std::move(pending)](const Status&) {});
  }
}

/// The process's job, and what goes on there. Safe from any thread.
class Process final {
 public:
  static Process& instance();

  /// Operations go to this job from now on.
  void attach(const std::shared_ptr<runtime::Communicator>& job);
  /// Null where there is none, and in a forked child, which has no thread of it.
  std::shared_ptr<runtime::Communicator> job() const;

  std::int64_t add(std::shared_ptr<Pending> pending);
  /// Null where nobody submitted it, or somebody waited for it.
  std::shared_ptr<Pending> take(std::int64_t handle);
  std::size_t size() const;

 private:
  mutable std::mutex mutex_;
  std::weak_ptr<runtime::Communicator> job_;
  int pid_ = 0;
  std::int64_t last_ = 0;
  std::unordered_map<std::int64_t, std::shared_ptr<Pending>> pending_;
};

}  // namespace herring::tensorflow_binding
