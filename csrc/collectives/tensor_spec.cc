#include "collectives/tensor_spec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace herring::collectives {
namespace {

template <class Value>
void put(std::vector<std::byte>& out, Value value) {
  const std::size_t at = out.size();
  out.resize(at + sizeof(Value));
  std::memcpy(out.data() + at, &value, sizeof(Value));
}

/// Reads numbers one after the other; what is beyond the end reads as 0 and is remembered.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Value>
  Value get() {
    Value value{};
    const std::span<const std::byte> raw = take(sizeof(Value));
    if (!raw.empty()) std::memcpy(&value, raw.data(), sizeof(Value));
    return value;
  }
  std::span<const std::byte> take(std::size_t count) {
    if (count > bytes_.size()) {
      is_good_ = false;
      bytes_ = {};
      return {};
    }
    const std::span<const std::byte> taken = bytes_.first(count);
    bytes_ = bytes_.subspan(count);
    return taken;
  }
  bool is_good() const { return is_good_; }
  bool is_at_end() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
  bool is_good_ = true;
};

bool is_known(DataType dtype) { return element_bytes(dtype) > 0; }
bool is_known(ReduceOp op) { return op >= ReduceOp::kSum && op <= ReduceOp::kBxor; }

/// As many bytes as its shape says.
bool has_right_size(const OpDescriptor& descriptor) {
  std::uint64_t elements = 1;
  for (std::uint8_t dim = 0; dim < descriptor.dims; ++dim) {
    if (__builtin_mul_overflow(elements, descriptor.shape[dim], &elements)) return false;
  }
  return !__builtin_mul_overflow(elements, element_bytes(descriptor.dtype), &elements) &&
         elements == descriptor.op_bytes;
}

bool read_tensor(Reader& reader, PlannedTensor& tensor) {
  const auto name_bytes = reader.get<std::uint16_t>();
  if (name_bytes > kMaxPlannedName) return false;
  const std::span<const std::byte> name = reader.take(name_bytes);
  tensor.name = {reinterpret_cast<const char*>(name.data()), name.size()};
  OpDescriptor& descriptor = tensor.spec.descriptor;
  descriptor.dtype = static_cast<DataType>(reader.get<std::uint8_t>());
  descriptor.reduce = static_cast<ReduceOp>(reader.get<std::uint8_t>());
  descriptor.dims = reader.get<std::uint8_t>();
  if (descriptor.dims > kMaxDims || !is_known(descriptor.dtype) || !is_known(descriptor.reduce)) return false;
  for (std::uint8_t dim = 0; dim < descriptor.dims; ++dim) descriptor.shape[dim] = reader.get<std::uint64_t>();
  descriptor.op_bytes = reader.get<std::uint64_t>();
  tensor.spec.prescale = reader.get<double>();
  tensor.spec.postscale = reader.get<double>();
  tensor.place = reader.get<std::uint64_t>();
  return reader.is_good() && has_right_size(descriptor) && std::isfinite(tensor.spec.prescale) &&
         std::isfinite(tensor.spec.postscale);
}

}  // namespace

std::vector<std::byte> begin_plan(std::uint64_t bucket_bytes) {
  std::vector<std::byte> plan;
  put(plan, bucket_bytes);
  return plan;
}

bool append(std::vector<std::byte>& plan, const PlannedTensor& tensor) {
  const auto& [name, spec, place] = tensor;
  const OpDescriptor& descriptor = spec.descriptor;
  const std::size_t needs = 2 + name.size() + 3 + 8 * std::size_t{descriptor.dims} + 8 + 16 + 8;
  if (name.size() > kMaxPlannedName || plan.size() + needs > kMaxPlanBytes) return false;
  put(plan, static_cast<std::uint16_t>(name.size()));
  const auto text = std::as_bytes(std::span(name));
  plan.insert(plan.end(), text.begin(), text.end());
  put(plan, static_cast<std::uint8_t>(descriptor.dtype));
  put(plan, static_cast<std::uint8_t>(descriptor.reduce));
  put(plan, descriptor.dims);
  for (std::uint8_t dim = 0; dim < descriptor.dims; ++dim) put(plan, descriptor.shape[dim]);
  put(plan, descriptor.op_bytes);
  put(plan, spec.prescale);
  put(plan, spec.postscale);
  put(plan, place);
  return true;
}

std::optional<PlanText> read_plan(std::span<const std::byte> plan) {
  Reader reader(plan);
  PlanText text;
  text.bucket_bytes = reader.get<std::uint64_t>();
  if (!reader.is_good() || text.bucket_bytes == 0) return std::nullopt;
  while (!reader.is_at_end()) {
    if (!read_tensor(reader, text.tensors.emplace_back())) return std::nullopt;
  }
  return text;
}

}  // namespace herring::collectives
