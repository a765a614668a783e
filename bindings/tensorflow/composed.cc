#include "bindings/tensorflow/composed.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

namespace herring::tensorflow_binding {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr std::size_t kDims = 12;
/// Dtype, number of dimensions, dimensions: what ranks say of a tensor.
constexpr std::size_t kMeta = 2 + kDims;
/// Below this a copy costs less than a page of shared memory.
constexpr std::size_t kSharedFromBytes = 64 << 10;
/// Between an operation's name and a step of it; not in anybody's names.
constexpr char kMark = '\x1f';

template <class T>
std::span<const std::byte> bytes_in(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

/// The product of all but the first dimension, in bytes.
std::size_t row_bytes(const Shape& shape, DataType dtype) {
  const std::int64_t elements = std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>());
  return static_cast<std::size_t>(elements) * element_bytes(dtype);
}

std::string text_of(const std::int64_t* meta) {
  std::string text(name(static_cast<DataType>(meta[0])));
  for (std::int64_t i = 0; i < meta[1]; ++i) text += (i == 0 ? "[" : ", ") + std::to_string(meta[2 + i]);
  return text + "]";
}

/// The tensor's dimensions, of which the first counts rows.
Shape rows_of(const Pending& pending, const char* what) {
  Shape shape = shape_of(pending.input.get());
  if (shape.empty()) {
    throw Error(Code::kInvalidArgument, std::string(what) + " needs at least one dimension; this tensor is a scalar");
  }
  if (shape.size() > kDims) {
    throw Error(Code::kInvalidArgument, std::string(what) + " takes at most " + std::to_string(kDims) +
                                            " dimensions; this tensor has " + std::to_string(shape.size()));
  }
  return shape;
}

runtime::Request request_for(const Call& call, Collective collective, DataType dtype, const Shape& shape,
                             const std::string& step, std::uint32_t root = 0) {
  runtime::Request request;
  request.group = call.members.group;
  request.name = call.wire_name + step;
  request.descriptor = describe(collective, dtype, ReduceOp::kSum, root, shape);
  return request;
}

/// Every rank's row of numbers, in pending.said: this rank's is `mine`.
void tell_all(const Call& call, Pending& pending, const std::vector<std::int64_t>& mine) {
  // The row itself, and after it all of them.
  pending.said.resize(mine.size() * (1 + call.members.size));
  std::copy(mine.begin(), mine.end(), pending.said.begin());
  runtime::Request request =
      request_for(call, Collective::kAllGather, DataType::kInt64, {static_cast<std::int64_t>(mine.size())}, "");
  const std::span<std::int64_t> all(pending.said);
  request.input = std::as_bytes(all.first(mine.size()));
  request.output = std::as_writable_bytes(all.subspan(mine.size()));
  pending.works = {call.job->submit(request)};
}

std::vector<std::int64_t> meta_of(const Call& call, const Shape& shape) {
  std::vector<std::int64_t> meta(kMeta);
  meta[0] = static_cast<std::int64_t>(call.dtype);
  meta[1] = static_cast<std::int64_t>(shape.size());
  std::copy(shape.begin(), shape.end(), meta.begin() + 2);
  return meta;
}

/// What rank `member` said; rows are `length` long.
const std::int64_t* said_by(const Pending& pending, std::size_t length, std::size_t member) {
  return pending.said.data() + length * (1 + member);
}

/// All ranks see the same, so all fail or none does.
void check_same_but_first(const Call& call, const Pending& pending, std::size_t length) {
  const std::int64_t* const first = said_by(pending, length, 0);
  for (std::size_t member = 1; member < call.members.size; ++member) {
    const std::int64_t* const other = said_by(pending, length, member);
    const bool is_same =
        first[0] == other[0] && first[1] == other[1] && std::equal(first + 3, first + kMeta, other + 3);
    if (is_same) continue;
    throw Error(Code::kMismatch, "ranks disagree, and only the first dimension may differ: rank 0: " + text_of(first) +
                                     ", rank " + std::to_string(member) + ": " + text_of(other));
  }
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

void gather_blocks(const Call& call, Pending& pending) {
  check_same_but_first(call, pending, kMeta);
  const Shape shape = shape_of(pending.input.get());
  std::vector<std::int64_t> counts(call.members.size);
  for (std::size_t member = 0; member < counts.size(); ++member) counts[member] = said_by(pending, kMeta, member)[2];
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  pending.outputs.push_back(allocate_result(*call.job, TF_TensorType(pending.input.get()), with_rows(shape, total)));
  const std::span<std::byte> output = bytes_of(pending.outputs.back());
  const std::span<const std::byte> input = bytes_of(pending.input);
  const std::size_t row = row_bytes(shape, call.dtype);
  if (output.empty()) return;
  if (std::all_of(counts.begin(), counts.end(), [&](std::int64_t count) { return count == counts[0]; })) {
    runtime::Request request = request_for(call, Collective::kAllGather, call.dtype, shape, kMark + std::string("all"));
    request.input = input;
    request.output = output;
    pending.works.push_back(call.job->submit(request));
    return;
  }
  std::size_t start = 0;
  for (std::uint32_t member = 0; member < counts.size(); ++member) {
    const std::size_t bytes = static_cast<std::size_t>(counts[member]) * row;
    if (bytes == 0) continue;
    runtime::Request request = request_for(call, Collective::kBroadcast, call.dtype, with_rows(shape, counts[member]),
                                           kMark + ("from" + std::to_string(member)), member);
    request.output = output.subspan(start, bytes);
    request.input = member == call.members.index ? input : request.output;
    pending.works.push_back(call.job->submit(request));
    start += bytes;
  }
}

std::vector<std::int64_t> splits_of(const Call& call, const Pending& pending, std::int64_t rows) {
  const std::int64_t size = call.members.size;
  const TF_Tensor* const given = pending.splits.get();
  const std::size_t count =
      given == nullptr ? 0 : TF_TensorByteSize(given) / (TF_TensorType(given) == TF_INT32 ? 4 : 8);
  if (count == 0) {
    if (rows % size == 0) return std::vector<std::int64_t>(static_cast<std::size_t>(size), rows / size);
    throw Error(Code::kInvalidArgument, "alltoall without splits: " + std::to_string(rows) +
                                            " rows cannot be divided equally among " + std::to_string(size) + " ranks");
  }
  std::vector<std::int64_t> splits(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (TF_TensorType(given) == TF_INT32) {
      splits[i] = static_cast<const std::int32_t*>(TF_TensorData(given))[i];
    } else {
      splits[i] = static_cast<const std::int64_t*>(TF_TensorData(given))[i];
    }
  }
  const std::int64_t sum = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
  const bool is_negative = std::any_of(splits.begin(), splits.end(), [](std::int64_t each) { return each < 0; });
  if (count != static_cast<std::size_t>(size) || is_negative || sum > rows) {
    throw Error(Code::kInvalidArgument, "alltoall: " + std::to_string(count) + " splits with a sum of " +
                                            std::to_string(sum) + "; there must be " + std::to_string(size) +
                                            ", none negative, with a sum of at most " + std::to_string(rows) + " rows");
  }
  return splits;
}

/// Another one for each use of the name, so that no message meets what an earlier use left behind.
std::uint64_t tag_of(const Call& call) {
  return 1ull << 63 | runtime::name_key(call.wire_name + "#" + std::to_string(call.use)) >> 2;
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

void exchange_rows(const Call& call, Pending& pending) {
  const std::size_t size = call.members.size;
  const std::size_t length = kMeta + size;
  check_same_but_first(call, pending, length);
  const std::int64_t* const sent = said_by(pending, length, call.members.index) + kMeta;
  std::vector<std::int64_t> counts(size);
  for (std::size_t i = 0; i < size; ++i) counts[i] = said_by(pending, length, i)[kMeta + call.members.index];
  const Shape shape = shape_of(pending.input.get());
  const std::int64_t total = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  pending.outputs.push_back(allocate_result(*call.job, TF_TensorType(pending.input.get()), with_rows(shape, total)));
  pending.outputs.push_back(received_splits(pending, counts));
  const std::span<std::byte> output = bytes_of(pending.outputs[0]);
  const std::span<const std::byte> input = bytes_of(pending.input);
  const std::size_t row = row_bytes(shape, call.dtype);
  std::size_t from = 0;
  std::size_t to = 0;
  for (std::uint32_t member = 0; member < size; ++member) {
    const auto out = input.subspan(from, static_cast<std::size_t>(sent[member]) * row);
    const auto in = output.subspan(to, static_cast<std::size_t>(counts[member]) * row);
    from += out.size();
    to += in.size();
    if (member == call.members.index) {
      std::copy(out.begin(), out.end(), in.begin());
      continue;
    }
    if (!in.empty()) {
      runtime::Receive message{call.members.group, member, tag_of(call), in};
      message.dtype = call.dtype;
      pending.works.push_back(call.job->receive(message));
    }
    if (!out.empty()) {
      runtime::Send message{call.members.group, member, tag_of(call), out};
      message.dtype = call.dtype;
      pending.works.push_back(call.job->send(message));
    }
  }
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
  std::uint64_t elements = 1;
  for (const std::int64_t size : shape) elements *= static_cast<std::uint64_t>(size);
  descriptor.op_bytes = elements * element_bytes(dtype);
  for (const std::int64_t size : shape) {  // More dimensions than are said are folded into the last.
    if (descriptor.dims < kMaxDims) {
      descriptor.shape[descriptor.dims++] = static_cast<std::uint64_t>(size);
    } else {
      descriptor.shape[kMaxDims - 1] *= static_cast<std::uint64_t>(size);
    }
  }
  return descriptor;
}

void start_all_gather(const Call& call, Pending& pending) {
  tell_all(call, pending, meta_of(call, rows_of(pending, "allgather")));
  pending.next = [call](Pending& now) { gather_blocks(call, now); };
}

void start_all_to_all(const Call& call, Pending& pending) {
  const Shape shape = rows_of(pending, "alltoall");
  std::vector<std::int64_t> said = meta_of(call, shape);
  const std::vector<std::int64_t> splits = splits_of(call, pending, shape[0]);
  said.insert(said.end(), splits.begin(), splits.end());
  tell_all(call, pending, said);
  pending.next = [call](Pending& now) { exchange_rows(call, now); };
}

void start_reduce_scatter(const Call& call, ReduceOp reduce, Pending& pending) {
  const Shape shape = rows_of(pending, "reducescatter");
  auto whole = std::make_shared<Tensor>(allocate_result(*call.job, TF_TensorType(pending.input.get()), shape));
  runtime::Request request = request_for(call, Collective::kReduceScatter, call.dtype, shape, "");
  request.descriptor.reduce = reduce;
  request.input = bytes_of(pending.input);
  request.output = bytes_of(*whole);
  pending.works = {call.job->submit(request)};
  pending.next = [call, shape, whole](Pending& now) {
    const std::int64_t each = shape[0] / call.members.size;
    const std::int64_t more = shape[0] % call.members.size;
    const std::int64_t index = call.members.index;
    const std::int64_t rows = each + (index < more ? 1 : 0);
    now.outputs.push_back(allocate(TF_TensorType(now.input.get()), with_rows(shape, rows)));
    const std::span<std::byte> output = bytes_of(now.outputs.back());
    const auto start = static_cast<std::size_t>(index * each + std::min(index, more)) * row_bytes(shape, call.dtype);
    const auto mine = bytes_of(*whole).subspan(start, output.size());
    std::copy(mine.begin(), mine.end(), output.begin());
  };
}

}  // namespace herring::tensorflow_binding
