// The collectives on tensors of an accelerator: copied to the host, carried out there as for CPU tensors, copied back.
// What only the host operation checks (shapes, counts, types) is therefore said by wait(), not by the call.
#include <c10/util/Exception.h>

#include <utility>

#include "backend.h"
#include "device.h"
#include "parted.h"

namespace herring::torch_binding {

void Backend::check_accelerator(c10::Device device, const char* title) const {
  check_open(title);
  TORCH_CHECK_NOT_IMPLEMENTED(process_->takes_accelerators, title, ": the tensor is on ", device,
                              ", and HERRING_CUDA=off: pass tensor.cpu(), or start the job with HERRING_CUDA=auto");
}

/// The group may be destroyed before its tensors are ready.
StagedWork::HostCall Backend::on_this_group(const char* title, std::function<WorkPtr(Backend&)> call) {
  const c10::weak_intrusive_ptr<Backend> group(c10::intrusive_ptr<Backend>::unsafe_reclaim_from_nonowning(this));
  return [group, call = std::move(call), title] {
    const c10::intrusive_ptr<Backend> self = group.lock();
    TORCH_CHECK(self, title, ": the process group was destroyed before the tensors were ready");
    return call(*self);
  };
}

template <class Prepare>
Backend::WorkPtr Backend::stage(c10::Device device, c10d::OpType type, const char* title, Millis timeout,
                                Tensors outputs, Prepare prepare) {
  check_accelerator(device, title);
  auto mirror = std::make_unique<Mirror>(device, title, process_->host_memory);
  std::function<WorkPtr(Backend&)> call = prepare(*mirror);
  mirror->seal();
  return hand_to_stager(c10::make_intrusive<StagedWork>(process_->runtime, rank_, type, title, std::move(mirror),
                                                        std::move(outputs), time_limit(timeout),
                                                        on_this_group(title, std::move(call)), take_ticket()));
}

Backend::WorkPtr Backend::hand_to_stager(c10::intrusive_ptr<DeviceWork> work) {
  process_->stager->add(work);
  const std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalescing_->push_back(work);
  return work;
}

namespace {

/// Nobody waits for the host operation; its end is a callback.
template <class Options>
Options in_background(Options options) {
  options.asyncOp = true;
  return options;
}

std::vector<at::Tensor> joined(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

}  // namespace

Backend::WorkPtr Backend::staged_allreduce(c10::Device device, const Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  if (WorkPtr on_device = peer_allreduce(device, tensors, options)) return on_device;
  if (WorkPtr direct = direct_allreduce(device, tensors, options)) return direct;
  if (WorkPtr parted = parted_allreduce(device, tensors, options)) return parted;
  return stage(device, c10d::OpType::ALLREDUCE, "herring:all_reduce", options.timeout, tensors, [&](Mirror& mirror) {
    return [host = mirror.update(tensors), own = in_background(options)](Backend& group) mutable {
      return group.allreduce(host, own);
    };
  });
}

Backend::WorkPtr Backend::parted_allreduce(c10::Device device, const Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "herring:all_reduce";
  check_accelerator(device, kTitle);
  if (tensors.size() != 1 || !is_reduced_as_it_is(tensors[0], options.reduceOp)) return nullptr;
  const std::uint64_t part_bytes = process_->runtime->late_part_bytes(options_.id);
  if (part_bytes == 0 || tensors[0].nbytes() <= part_bytes) return nullptr;
  const Millis timeout = time_limit(options.timeout);
  auto mirror = std::make_unique<Mirror>(device, kTitle, process_->host_memory);
  auto copies = std::make_shared<PartedCopies>(process_->runtime, *mirror, tensors[0], part_bytes, timeout);
  auto call = on_this_group(kTitle, [copies, own = in_background(options)](Backend& group) {
    return group.allreduce_on_host({copies->host()}, own, copies->late());
  });
  return hand_to_stager(c10::make_intrusive<StagedWork>(process_->runtime, rank_, c10d::OpType::ALLREDUCE, kTitle,
                                                        std::move(mirror), tensors, timeout, std::move(call),
                                                        take_ticket(), copies));
}

Backend::WorkPtr Backend::staged_allreduce_coalesced(c10::Device device, const Tensors& tensors,
                                                     const c10d::AllreduceCoalescedOptions& options) {
  return stage(device, c10d::OpType::ALLREDUCE_COALESCED, "herring:all_reduce_coalesced", options.timeout, tensors,
               [&](Mirror& mirror) {
                 return [host = mirror.update(tensors), own = in_background(options)](Backend& group) mutable {
                   return group.allreduce_coalesced(host, own);
                 };
               });
}

Backend::WorkPtr Backend::staged_broadcast(c10::Device device, const Tensors& tensors,
                                           const c10d::BroadcastOptions& options) {
  return stage(device, c10d::OpType::BROADCAST, "herring:broadcast", options.timeout, tensors, [&](Mirror& mirror) {
    const bool is_root = options.rootRank == rank_;
    Tensors host = tensors.size() > 1 ? mirror.update(tensors) : is_root ? mirror.read(tensors) : mirror.write(tensors);
    return [host = std::move(host), own = in_background(options)](Backend& group) mutable {
      return group.broadcast(host, own);
    };
  });
}

Backend::WorkPtr Backend::staged_allgather(c10::Device device, const std::vector<Tensors>& outputs,
                                           const Tensors& inputs, const c10d::AllgatherOptions& options,
                                           bool is_coalesced) {
  const auto type = is_coalesced ? c10d::OpType::ALLGATHER_COALESCED : c10d::OpType::ALLGATHER;
  const char* const title = is_coalesced ? "herring:all_gather_coalesced" : "herring:all_gather";
  return stage(device, type, title, options.timeout, joined(outputs), [&](Mirror& mirror) {
    std::vector<Tensors> targets;
    for (const Tensors& list : outputs) targets.push_back(mirror.write(list));
    return [targets = std::move(targets), sources = mirror.read(inputs), own = in_background(options),
            is_coalesced](Backend& group) mutable {
      return is_coalesced ? group.allgather_coalesced(targets, sources, own) : group.allgather(targets, sources, own);
    };
  });
}

Backend::WorkPtr Backend::staged_allgather_into(c10::Device device, const Tensors& outputs, const Tensors& inputs,
                                                const c10d::AllgatherOptions& options, bool is_coalesced) {
  const auto type = is_coalesced ? c10d::OpType::COALESCED : c10d::OpType::_ALLGATHER_BASE;
  const char* const title = is_coalesced ? "herring:all_gather_into_tensor_coalesced" : "herring:_all_gather_base";
  return stage(device, type, title, options.timeout, outputs, [&](Mirror& mirror) {
    return [targets = mirror.write(outputs), sources = mirror.read(inputs), own = in_background(options),
            is_coalesced](Backend& group) mutable {
      return is_coalesced ? group.allgather_into_tensor_coalesced(targets, sources, own)
                          : group._allgather_base(targets[0], sources[0], own);
    };
  });
}

Backend::WorkPtr Backend::staged_reduce(c10::Device device, const Tensors& tensors,
                                        const c10d::ReduceOptions& options) {
  return stage(device, c10d::OpType::REDUCE, "herring:reduce", options.timeout, tensors, [&](Mirror& mirror) {
    // Only the root's tensor may change.
    Tensors host = options.rootRank == rank_ ? mirror.update(tensors) : mirror.read(tensors);
    return [host = std::move(host), own = in_background(options)](Backend& group) mutable {
      return group.reduce(host, own);
    };
  });
}

Backend::WorkPtr Backend::staged_reduce_scatter(c10::Device device, const Tensors& outputs,
                                                const std::vector<Tensors>& inputs,
                                                const c10d::ReduceScatterOptions& options) {
  return stage(device, c10d::OpType::REDUCE_SCATTER, "herring:reduce_scatter", options.timeout, outputs,
               [&](Mirror& mirror) {
                 std::vector<Tensors> sources;
                 for (const Tensors& list : inputs) sources.push_back(mirror.read(list));
                 return [targets = mirror.write(outputs), sources = std::move(sources), own = in_background(options)](
                            Backend& group) mutable { return group.reduce_scatter(targets, sources, own); };
               });
}

Backend::WorkPtr Backend::staged_reduce_scatter_tensor(c10::Device device, const Tensors& outputs,
                                                       const Tensors& inputs, const c10d::ReduceScatterOptions& options,
                                                       bool is_coalesced) {
  const char* const title = is_coalesced ? "herring:reduce_scatter_tensor_coalesced" : "herring:_reduce_scatter_base";
  return stage(device, c10d::OpType::_REDUCE_SCATTER_BASE, title, options.timeout, outputs, [&](Mirror& mirror) {
    return [targets = mirror.write(outputs), sources = mirror.read(inputs), own = in_background(options),
            is_coalesced](Backend& group) mutable {
      return is_coalesced ? group.reduce_scatter_tensor_coalesced(targets, sources, own)
                          : group._reduce_scatter_base(targets[0], sources[0], own);
    };
  });
}

Backend::WorkPtr Backend::staged_gather(c10::Device device, const std::vector<Tensors>& outputs, const Tensors& inputs,
                                        const c10d::GatherOptions& options) {
  return stage(device, c10d::OpType::GATHER, "herring:gather", options.timeout, joined(outputs), [&](Mirror& mirror) {
    std::vector<Tensors> targets;
    for (const Tensors& list : outputs) targets.push_back(mirror.write(list));
    return [targets = std::move(targets), sources = mirror.read(inputs),
            own = in_background(options)](Backend& group) mutable { return group.gather(targets, sources, own); };
  });
}

Backend::WorkPtr Backend::staged_scatter(c10::Device device, const Tensors& outputs, const std::vector<Tensors>& inputs,
                                         const c10d::ScatterOptions& options) {
  return stage(device, c10d::OpType::SCATTER, "herring:scatter", options.timeout, outputs, [&](Mirror& mirror) {
    std::vector<Tensors> sources;
    for (const Tensors& list : inputs) sources.push_back(mirror.read(list));
    return [targets = mirror.write(outputs), sources = std::move(sources),
            own = in_background(options)](Backend& group) mutable { return group.scatter(targets, sources, own); };
  });
}

Backend::WorkPtr Backend::staged_alltoall_base(c10::Device device, const at::Tensor& output, const at::Tensor& input,
                                               const std::vector<std::int64_t>& output_splits,
                                               const std::vector<std::int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options) {
  return stage(device, c10d::OpType::ALLTOALL_BASE, "herring:all_to_all", options.timeout, {output},
               [&](Mirror& mirror) {
                 return [target = mirror.write(output), source = mirror.read(input), receives = output_splits,
                         sends = input_splits, own = in_background(options)](Backend& group) mutable {
                   return group.alltoall_base(target, source, receives, sends, own);
                 };
               });
}

Backend::WorkPtr Backend::staged_alltoall(c10::Device device, const Tensors& outputs, const Tensors& inputs,
                                          const c10d::AllToAllOptions& options) {
  return stage(device, c10d::OpType::ALLTOALL, "herring:all_to_all", options.timeout, outputs, [&](Mirror& mirror) {
    return [targets = mirror.write(outputs), sources = mirror.read(inputs),
            own = in_background(options)](Backend& group) mutable { return group.alltoall(targets, sources, own); };
  });
}

Backend::WorkPtr Backend::staged_send(c10::Device device, const Tensors& tensors, int destination, int tag) {
  return stage(device, c10d::OpType::SEND, "herring:send", Millis(0), tensors, [&](Mirror& mirror) {
    return [host = mirror.read(tensors), destination, tag](Backend& group) mutable {
      return group.send(host, destination, tag);
    };
  });
}

Backend::WorkPtr Backend::staged_receive(c10::Device device, const Tensors& tensors, std::optional<int> source,
                                         int tag) {
  const auto type = source ? c10d::OpType::RECV : c10d::OpType::RECVANYSOURCE;
  return stage(device, type, source ? "herring:recv" : "herring:recvAnySource", Millis(0), tensors,
               [&](Mirror& mirror) {
                 // What the message does not reach stays as it is.
                 return [host = mirror.update(tensors), source, tag](Backend& group) mutable {
                   return source ? group.recv(host, *source, tag) : group.recvAnysource(host, tag);
                 };
               });
}

}  // namespace herring::torch_binding
