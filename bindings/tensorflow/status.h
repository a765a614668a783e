#pragma once

#include <exception>
#include <memory>
#include <string>

#include "bindings/tensorflow/tf_c_api.h"
#include "core/status.h"

/// How TensorFlow hears of errors.
namespace herring::tensorflow_binding {

struct DeleteStatus {
  void operator()(TF_Status* status) const { TF_DeleteStatus(status); }
};
using TfStatus = std::unique_ptr<TF_Status, DeleteStatus>;

inline TfStatus new_status() { return TfStatus(TF_NewStatus()); }
inline bool is_ok(const TfStatus& status) { return TF_GetCode(status.get()) == TF_OK; }

inline TF_Code code_of(Code code) {
  switch (code) {
    case Code::kInvalidArgument:
      return TF_INVALID_ARGUMENT;
    case Code::kMismatch:
    case Code::kShutdown:
    case Code::kNotFinite:
      return TF_FAILED_PRECONDITION;
    case Code::kTimeout:
      return TF_DEADLINE_EXCEEDED;
    case Code::kPeerLost:
    case Code::kTransport:
      return TF_ABORTED;  // TensorFlow makes Unavailable, of operations that it does not know, an internal error.
    case Code::kCancelled:
      return TF_CANCELLED;
    case Code::kCorrupted:
      return TF_DATA_LOSS;
    default:
      return TF_INTERNAL;
  }
}

inline void fail(TF_OpKernelContext* context, TF_Code code, const std::string& text) {
  const TfStatus status = new_status();
  TF_SetStatus(status.get(), code, text.c_str());
  TF_OpKernelContext_Failure(context, status.get());
}

/// The same of an error in the operation of this name.
inline void fail_with(TF_OpKernelContext* context, const std::string& name, const std::exception& error, TF_Code code) {
  fail(context, code, "herring: " + (name.empty() ? "" : "\"" + name + "\": ") + error.what());
}

}  // namespace herring::tensorflow_binding
