#include "bindings/tensorflow/composed.h"

#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "collectives/row_exchange.h"
#include "core/copy.h"

namespace herring::tensorflow_binding {
namespace {

using Shape = std::vector<std::int64_t>;

/// Below this a copy costs less than a page of shared memory.
constexpr std::size_t kSharedFromBytes = 64 << 10;

/// The tensor as ranks tell each other of it.
collectives::RowsSpec spec_of(const Call& call, const Pending& pending, const char* what) {
  collectives::RowsSpec spec{call.dtype, shape_of(pending.input.get())};
  if (!spec.shape.empty()) return spec;
  throw Error(Code::kInvalidArgument, std::string(what) + " needs at least one dimension; this tensor is a scalar");
}

Shape with_rows(Shape shape, std::int64_t rows) {
  shape[0] = rows;
  return shape;
}

std::size_t bytes_for(TF_DataType dtype, const Shape& shape) {
  std::size_t bytes = dtype == TF_INT64 || dtype == TF_DOUBLE                         ? 8
                      : dtype == TF_INT32 || dtype == TF_FLOAT                        ? 4
                      : dtype == TF_INT16 || dtype == TF_HALF || dtype == TF_BFLOAT16 ? 2
                                                                                      : 1;
  for (const std::int64_t size : shape) bytes *= static_cast<std::size_t>(size);
  return bytes;
}

/// None: the rows are shared equally.
std::optional<std::vector<std::int64_t>> splits_of(const Pending& pending) {
  const TF_Tensor* const given = pending.splits.get();
  const bool is_narrow = given != nullptr && TF_TensorType(given) == TF_INT32;
  const std::size_t count = given == nullptr ? 0 : TF_TensorByteSize(given) / (is_narrow ? 4 : 8);
  if (count == 0) return std::nullopt;
  std::vector<std::int64_t> splits(count);
  for (std::size_t i = 0; i < count; ++i) {
    splits[i] = is_narrow ? static_cast<const std::int32_t*>(TF_TensorData(given))[i]
                          : static_cast<const std::int64_t*>(TF_TensorData(given))[i];
  }
  return splits;
}

Tensor received_splits(const Pending& pending, const std::vector<std::int64_t>& counts) {
  const TF_DataType dtype = pending.splits ? TF_TensorType(pending.splits.get()) : TF_INT32;
  Tensor result = allocate(dtype, {static_cast<std::int64_t>(counts.size())});
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (dtype == TF_INT32) {
      static_cast<std::int32_t*>(TF_TensorData(result.get()))[i] = static_cast<std::int32_t>(counts[i]);
    } else {
      static_cast<std::int64_t*>(TF_TensorData(result.get()))[i] = counts[i];
    }
  }
  return result;
}

/// The first step, and the second where somebody waits: rows come into a new output, whose numbers `with_counts` adds.
void start_exchange(const Call& call, Pending& pending, const collectives::RowsSpec& spec,
                    const std::optional<std::vector<std::int64_t>>& splits) {
  const auto rows = std::make_shared<collectives::RowExchange>(call.named(), std::vector{spec}, splits);
  pending.works = {rows->tell(*call.job)};
  pending.next = [job = call.job, spec, rows, with_counts = splits.has_value()](Pending& now) {
    const std::vector<std::int64_t> counts = rows->counts(0);
    const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    now.outputs.push_back(allocate_result(*job, TF_TensorType(now.input.get()), with_rows(spec.shape, total)));
    if (with_counts) now.outputs.push_back(received_splits(now, counts));
    now.works = rows->move(*job, 0, bytes_of(now.input), bytes_of(now.outputs[0]));
  };
}

}  // namespace

Tensor allocate(TF_DataType dtype, const Shape& shape) {
  const std::size_t bytes = bytes_for(dtype, shape);
  Tensor tensor(TF_AllocateTensor(dtype, shape.data(), static_cast<int>(shape.size()), bytes));
  if (!tensor) throw NoMemory(bytes);
  return tensor;
}

Tensor allocate_result(runtime::Communicator& job, TF_DataType dtype, const Shape& shape) {
  const std::size_t bytes = bytes_for(dtype, shape);
  // Alone on its host, a process has no such memory.
  if (bytes < kSharedFromBytes || job.local_size() == 1) return allocate(dtype, shape);
  auto memory = std::make_unique<std::shared_ptr<std::byte>>(job.allocate(bytes));
  if (!*memory) return allocate(dtype, shape);
  const auto free = [](void*, std::size_t, void* owner) { delete static_cast<std::shared_ptr<std::byte>*>(owner); };
  Tensor tensor(
      TF_NewTensor(dtype, shape.data(), static_cast<int>(shape.size()), memory->get(), bytes, free, memory.get()));
  if (!tensor) throw NoMemory(bytes);
  (void)memory.release();  // The tensor's.
  return tensor;
}

Shape shape_of(const TF_Tensor* tensor) {
  Shape shape(static_cast<std::size_t>(TF_NumDims(tensor)));
  for (std::size_t i = 0; i < shape.size(); ++i) shape[i] = TF_Dim(tensor, static_cast<int>(i));
  return shape;
}

std::span<std::byte> bytes_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(TF_TensorData(tensor.get())), TF_TensorByteSize(tensor.get())};
}

OpDescriptor describe(Collective collective, DataType dtype, ReduceOp reduce, std::uint32_t root, const Shape& shape) {
  OpDescriptor descriptor;
  descriptor.collective = collective;
  descriptor.dtype = dtype;
  descriptor.reduce = reduce;
  descriptor.root = root;
  set_shape(descriptor, shape);
  return descriptor;
}

void start_all_gather(const Call& call, Pending& pending) {
  start_exchange(call, pending, spec_of(call, pending, "allgather"), std::nullopt);
}

void start_all_to_all(const Call& call, Pending& pending) {
  const collectives::RowsSpec spec = spec_of(call, pending, "alltoall");
  const auto size = static_cast<std::uint32_t>(call.ranks.size());
  start_exchange(call, pending, spec, collectives::checked_splits(splits_of(pending), spec.shape[0], size));
}

void start_reduce_scatter(const Call& call, ReduceOp reduce, Pending& pending) {
  const collectives::RowsSpec spec = spec_of(call, pending, "reducescatter");
  auto whole = std::make_shared<Tensor>(allocate_result(*call.job, TF_TensorType(pending.input.get()), spec.shape));
  runtime::Request request;
  request.group = call.group;
  request.name = call.wire_name;
  request.descriptor = describe(Collective::kReduceScatter, call.dtype, reduce, 0, spec.shape);
  request.input = bytes_of(pending.input);
  request.output = bytes_of(*whole);
  pending.works = {call.job->submit(request)};
  pending.next = [call, spec, whole](Pending& now) {
    const auto [first, last] =
        collectives::rows_of(spec.shape[0], static_cast<std::uint32_t>(call.ranks.size()), call.index);
    now.outputs.push_back(allocate(TF_TensorType(now.input.get()), with_rows(spec.shape, last - first)));
    const std::span<std::byte> output = bytes_of(now.outputs.back());
    copy_bytes(bytes_of(*whole).subspan(static_cast<std::size_t>(first) * spec.row_bytes(), output.size()), output);
  };
}

}  // namespace herring::tensorflow_binding
