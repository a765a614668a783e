#pragma once

#include <memory>

#include "bindings/tensorflow/tf_c_api.h"

namespace herring::tensorflow_binding {

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using Tensor = std::unique_ptr<TF_Tensor, DeleteTensor>;

}  // namespace herring::tensorflow_binding
