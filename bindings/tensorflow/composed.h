#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bindings/tensorflow/pending.h"
#include "collectives/row_exchange.h"
#include "core/types.h"
#include "runtime/communicator.h"

/// Collectives of several steps: the first is submitted at once, the others where somebody waits. All throw Error for
/// arguments that do not work.
namespace herring::tensorflow_binding {

/// What is to be moved, between whom. `wire_name` and `use` are the same on all of them.
struct Call {
  std::shared_ptr<runtime::Communicator> job;
  GroupId group;
  std::vector<std::uint32_t> ranks;  ///< Of the job, in the group's order.
  std::uint32_t index = 0;           ///< Of this one.
  std::string wire_name;
  std::uint64_t use = 0;
  DataType dtype = DataType::kFloat32;

  collectives::NamedCall named() const { return {group, ranks, index, wire_name, use}; }
};

/// Output: the ranks' rows, in their order. Ranks may have different numbers of them.
void start_all_gather(const Call& call, Pending& pending);
/// Of the input's rows, pending.splits[i] go to rank i (none: equally many). Outputs: the rows that came, and how many
/// from each, in the dtype of the splits.
void start_all_to_all(const Call& call, Pending& pending);
/// Output: this rank's rows of the reduction, one more for the first ranks where they do not come out even.
void start_reduce_scatter(const Call& call, ReduceOp reduce, Pending& pending);

class NoMemory final : public std::exception {
 public:
  explicit NoMemory(std::size_t bytes) : text_("no memory for a result of " + std::to_string(bytes) + " bytes") {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

/// A tensor without a value yet. Throws NoMemory.
Tensor allocate(TF_DataType dtype, const std::vector<std::int64_t>& shape);
/// The same for what an operation writes: large ones in memory that it writes without a copy, and whose pages are
/// there, where the job has some. TensorFlow does not write into such a tensor, and copies it where a variable is to
/// keep it.
Tensor allocate_result(runtime::Communicator& job, TF_DataType dtype, const std::vector<std::int64_t>& shape);
std::vector<std::int64_t> shape_of(const TF_Tensor* tensor);
std::span<std::byte> bytes_of(const Tensor& tensor);

/// A descriptor of what this rank does with such an argument.
OpDescriptor describe(Collective collective, DataType dtype, ReduceOp reduce, std::uint32_t root,
                      const std::vector<std::int64_t>& shape);

}  // namespace herring::tensorflow_binding
