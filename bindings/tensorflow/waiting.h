#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bindings/tensorflow/gpu_stream.h"
#include "bindings/tensorflow/pending.h"
#include "bindings/tensorflow/status.h"
#include "bindings/tensorflow/tf_c_api.h"
#include "core/types.h"

namespace herring::tensorflow_binding {

/// Why a call fails: the first reason ends all of it.
struct Failure {
  TF_Code code = TF_OK;
  std::string text;

  explicit operator bool() const { return code != TF_OK; }
  void set(TF_Code why, const Pending& pending, const std::string& what) {
    if (*this) return;
    code = why;
    text = "herring: " + (pending.name.empty() ? "" : "\"" + pending.name + "\": ") + what;
  }
};

/// A call that waits for its operations: for one after the other, and then for the next steps of those that have some.
/// Where one has failed the others are let go, once they have begun: other ranks may have begun them, and would take
/// the next ones of their names for these.
class Waiting final {
 public:
  /// `gpu`: the call runs there, and gives its results there.
  explicit Waiting(TF_OpKernelContext* context, std::optional<GpuStream> gpu = std::nullopt);
  ~Waiting();
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  /// Whether any of its tensors is on a GPU: then it takes wait(), and not next().
  bool has_gpu_tensors() const { return has_gpu_tensors_; }

  /// What has to end before next() is called again; null: all is over.
  std::shared_ptr<runtime::Work> next();
  /// Until all is over. Nobody says when a copy has ended: a look, and then a nap, longer where nothing has moved.
  void wait();

  /// Gives TensorFlow the results, or why there are none.
  void answer();

 private:
  struct Turn {
    bool is_over = false;                 ///< All is.
    bool has_moved = false;               ///< Anything has begun.
    bool is_about_to_call = false;        ///< Something is to begin when a copy has ended.
    std::shared_ptr<runtime::Work> work;  ///< The first that is not done, if any is.
  };

  void wait_with_gpu();
  /// Begins what can begin now.
  Turn turn();
  /// False where there is none.
  bool start_next_step(Pending& pending);
  /// Whether it is over; else `turn` says why not. `is_line_busy`: a copy out has not ended, nor have those after it.
  bool advance(Pending& pending, Turn& turn, bool& is_line_busy);
  void end_calls();
  void give(int place, const Pending& pending, const TF_Tensor* output);
  /// The same for what lies on the host, where the call runs on a GPU. Throws Error.
  void give_on_gpu(int place, const std::shared_ptr<Pending>& pending, const TF_Tensor* like,
                   std::span<std::byte> host);
  void give_all(int& place, const std::shared_ptr<Pending>& pending);

  TF_OpKernelContext* context_;
  const std::optional<GpuStream> gpu_;
  bool has_gpu_tensors_ = false;
  std::vector<Number> calls_;  ///< Of Process::begin_call(), until all has begun.
  std::vector<std::shared_ptr<Pending>> all_;
  std::vector<std::shared_ptr<Pending>> open_;
  std::size_t place_ = 0;  ///< In open_.
  std::vector<std::shared_ptr<Pending>> further_;
  Failure failure_;
  bool has_lost_copy_ = false;  ///< What has not begun yet does not: its copy would not end either.
};

}  // namespace herring::tensorflow_binding
