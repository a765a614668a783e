#include "core/operation.h"

namespace herring {

std::string to_string(const OpKey& key) {
  std::string text = (key.op >> 63) != 0 ? "a named operation" : "operation " + std::to_string(key.op);
  const std::uint32_t group = key.group.value;
  if (group >= kFirstFrameworkGroup) {
    text += " of process group " + std::to_string(group - kFirstFrameworkGroup);
  } else if (group >= kFirstFusedGroup) {
    text += " for small tensors of group " + std::to_string(group - kFirstFusedGroup);
  } else if (group > 0) {
    text += " of group " + std::to_string(group);
  }
  if (key.part > 0) text += " (part " + std::to_string(key.part) + ")";
  return text;
}

void set_shape(OpDescriptor& descriptor, std::span<const std::int64_t> shape) {
  descriptor.op_bytes = element_bytes(descriptor.dtype);
  descriptor.dims = 0;
  for (const std::int64_t size : shape) {
    descriptor.op_bytes *= static_cast<std::uint64_t>(size);
    if (descriptor.dims < kMaxDims) {
      descriptor.shape[descriptor.dims++] = static_cast<std::uint64_t>(size);
    } else {
      descriptor.shape[kMaxDims - 1] *= static_cast<std::uint64_t>(size);
    }
  }
}

std::string to_string(const OpDescriptor& descriptor) {
  std::string text(name(descriptor.collective));
  if (is_made_of_messages(descriptor.collective)) {
    const bool has_root = descriptor.collective == Collective::kGather || descriptor.collective == Collective::kScatter;
    text += '(' + std::string(name(descriptor.dtype));
    return text + (has_root ? ", root " + std::to_string(descriptor.root) : "") + ')';
  }
  text += '(';
  if (descriptor.collective != Collective::kBarrier) {
    text += name(descriptor.dtype);
    text += '[';
    bool is_of_list = false;
    for (std::uint8_t i = 0; i < descriptor.dims && i < kMaxDims; ++i) {
      is_of_list = (descriptor.shape[i] & kListDigest) != 0;
      if (is_of_list) break;
      if (i > 0) text += ", ";
      text += std::to_string(descriptor.shape[i]);
    }
    text += is_of_list ? "] of a list" : "]";
    if (reduces(descriptor.collective)) {
      text += ", ";
      text += name(descriptor.reduce);
    }
    if (descriptor.collective == Collective::kBroadcast || descriptor.collective == Collective::kReduce) {
      text += ", root " + std::to_string(descriptor.root);
    }
  }
  text += ')';
  return text;
}

}  // namespace herring
