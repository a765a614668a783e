#include "core/operation.h"

namespace herring {

std::string to_string(const OpDescriptor& descriptor) {
  std::string text(name(descriptor.collective));
  text += '(';
  if (descriptor.collective != Collective::kBarrier) {
    text += name(descriptor.dtype);
    text += '[';
    for (std::uint8_t i = 0; i < descriptor.dims && i < kMaxDims; ++i) {
      if (i > 0) text += ", ";
      text += std::to_string(descriptor.shape[i]);
    }
    text += ']';
    if (descriptor.collective == Collective::kAllReduce) {
      text += ", ";
      text += name(descriptor.reduce);
    } else if (descriptor.collective == Collective::kBroadcast) {
      text += ", root " + std::to_string(descriptor.root);
    }
  }
  text += ')';
  return text;
}

}  // namespace herring
