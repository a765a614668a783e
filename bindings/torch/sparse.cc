// all_reduce of sparse tensors: every rank tells how many elements it has, then all tell all of them, and each rank
// adds them in the order of ranks.
#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <utility>

#include "backend.h"

namespace herring::torch_binding {
namespace {

/// What a rank says of its tensor: number of elements, dimensions, shape.
std::vector<std::int64_t> shape_record(const at::Tensor& coalesced) {
  std::vector<std::int64_t> record{
      coalesced._nnz(), coalesced.sparse_dim(), coalesced.dense_dim(), 0, 0, 0, 0, 0, 0, 0, 0};
  constexpr std::size_t kHead = 3;
  for (std::int64_t i = 0; i < coalesced.dim(); ++i) {
    record[kHead + static_cast<std::size_t>(i)] = coalesced.size(i);
  }
  return record;
}

void check_sparse(const Backend::Tensors& tensors, const c10d::ReduceOp& op, const char* title) {
  TORCH_CHECK_VALUE(tensors.size() == 1, title, ": takes one sparse tensor a call, got ", tensors.size());
  TORCH_CHECK_VALUE(op.op_ == c10d::ReduceOp::SUM || op.op_ == c10d::ReduceOp::AVG, title,
                    ": sparse tensors are summed or averaged (ReduceOp.SUM, AVG); for others pass tensor.to_dense()");
  TORCH_CHECK_VALUE(tensors[0].device().is_cpu(), title, ": takes CPU tensors, got one on ", tensors[0].device());
  TORCH_CHECK_VALUE(tensors[0].dim() <= kMaxDims, title, ": a sparse tensor of ", tensors[0].dim(),
                    " dimensions; at most ", int{kMaxDims});
  TORCH_CHECK_VALUE(op.op_ == c10d::ReduceOp::SUM || tensors[0].is_floating_point() || tensors[0].is_complex(), title,
                    ": ReduceOp.AVG of sparse tensors takes floating point, got ", tensors[0].scalar_type());
}

/// The ranks' elements as one tensor, added in the order of ranks; 16-bit floats in float32, rounded once.
at::Tensor add_up(const std::vector<at::Tensor>& indices, const std::vector<at::Tensor>& values, const at::Tensor& like,
                  const c10d::ReduceOp& op) {
  const bool is_narrow = like.scalar_type() == at::kHalf || like.scalar_type() == at::kBFloat16;
  at::Tensor all = at::cat(values);
  if (is_narrow) all = all.to(at::kFloat);
  at::Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), all, like.sizes()).coalesce();
  if (op.op_ == c10d::ReduceOp::AVG) sum = sum.div(static_cast<std::int64_t>(values.size()));
  return is_narrow ? sum.to(like.scalar_type()) : sum;
}

}  // namespace

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  WorkInfo info = open(c10d::OpType::ALLREDUCE, "herring:all_reduce (sparse)", options);
  check_sparse(tensors, options.reduceOp, info.title);
  const at::Tensor user = tensors[0];
  const at::Tensor mine = user.detach().coalesce();
  const at::Tensor record = at::tensor(shape_record(mine), at::kLong);
  at::Tensor records = at::empty({size_, record.numel()}, at::kLong);
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  step.requests.push_back(all_gather_request(info, records, record));
  // Tags are given out in the order of calls, which is the same on all ranks; the order in which steps end is not.
  const collectives::MessageCall of_indices = next_collective(info, Collective::kUnevenAllGather, record);
  const collectives::MessageCall of_values =
      next_collective(info, Collective::kUnevenAllGather,
                      wire_view(mine.values().resolve_conj().resolve_neg().contiguous(), info.title));
  step.then = [=, op = options.reduceOp, title = info.title]() -> Step {
    Tensors indices, values, own_indices, own_values;
    const at::Tensor my_indices = mine.indices().contiguous();
    const at::Tensor my_values = mine.values().resolve_conj().resolve_neg().contiguous();
    for (std::int64_t rank = 0; rank < records.size(0); ++rank) {
      const at::Tensor theirs = records.select(0, rank);
      const std::int64_t count = theirs[0].item<std::int64_t>();
      TORCH_CHECK_VALUE(theirs.slice(0, 1).equal(record.slice(0, 1)), title, ": mismatch: rank ", rank,
                        " has another shape or other sparse dimensions than this rank, whose tensor is ", mine.sizes(),
                        " with ", mine.sparse_dim(), " sparse dimension(s)");
      indices.push_back(at::empty({mine.sparse_dim(), count}, at::kLong));
      std::vector<std::int64_t> shape = my_values.sizes().vec();
      shape[0] = count;
      values.push_back(at::empty(shape, my_values.options()));
    }
    const auto flat = [title](const Tensors& list) {
      Tensors views;
      for (const at::Tensor& each : list) views.push_back(wire_view(each, title).view({-1}));
      return views;
    };
    Step next;
    add_exchange(of_indices, flat(indices), flat(Tensors(indices.size(), my_indices)), next);
    add_exchange(of_values, flat(values), flat(Tensors(values.size(), my_values)), next);
    append(next, [=, my_indices_held = my_indices, my_values_held = my_values] {
      const at::NoGradGuard no_grad;  // detach() would give a tensor whose number of elements is its own.
      user.copy_(add_up(indices, values, mine, op));
    });
    return next;
  };
  return start(std::move(info), std::move(step));
}

}  // namespace herring::torch_binding
