#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collectives/message_plan.h"
#include "device.h"
#include "direct.h"
#include "peers.h"
#include "runtime/communicator.h"
#include "tensors.h"
#include "work.h"

namespace herring::torch_binding {

/// What all groups of a process share.
struct Process {
  Process(std::shared_ptr<runtime::Communicator> shared_runtime, bool with_accelerators, PeerSettings peer_settings,
          DirectSettings direct_settings);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  std::shared_ptr<runtime::Communicator> runtime;
  std::shared_ptr<HostMemory> host_memory;  ///< For tensors on accelerators, and what looks after their copies.
  std::shared_ptr<DirectMemory> direct;     ///< Of accelerators, for the network cards.
  std::unique_ptr<Stager> stager;
  const bool takes_accelerators;  ///< HERRING_CUDA is not off.
  const PeerSettings peers;
  pid_t pid = 0;  ///< Of the process that joined the job; a forked child has the memory but not the threads.
};

struct GroupOptions {
  GroupId id;        ///< The same on all members, unlike any other living group's.
  std::string name;  ///< torch's name of the group, for messages.
  int rank = 0;
  int size = 1;
  std::vector<std::uint32_t> job_ranks;  ///< Worker rank of each member, in group order.
  std::chrono::milliseconds timeout{0};
  bool is_world = false;           ///< torch's default group: its abort is the job's.
  std::function<void()> released;  ///< Called once, when the group is destroyed.
};

/// torch.distributed's backend "herring": turns each call into runtime operations; tensors on an accelerator go through
/// host memory (staged.cc). One per process group. As c10d asks, every member calls the collectives of a group in the
/// same order; calls never block on other ranks.
class Backend final : public c10d::Backend {
 public:
  /// Throws herring::Error where the runtime does not take the group.
  Backend(std::shared_ptr<Process> process, GroupOptions options);
  ~Backend() override;

  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  const std::string getBackendName() const override { return "herring"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return sequence_.load(); }
  /// Buckets that DDP allocates here are shared, registered memory: no copy between autograd and the wire.
  /// For the CPU alone, whose index is -1: a bucket on a GPU is torch's own memory.
  bool supportsTensorAlloc(c10::DeviceIndex index) override { return index < 0; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  /// What is started between the two is waited for through the Work that the second gives. Nothing is held back: calls
  /// on the same thread go out at once, together.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  /// Ends everything pending in the whole process, not in this group alone: the runtime has one fate.
  void abort() override;
  /// Waits briefly for what is pending, then gives the group up. Idempotent.
  void shutdown() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;

  // composed.cc: made of the above.
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;

  // messages.cc: straight from rank to rank.
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<std::int64_t>& output_splits,
                        std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int destination, int tag) override;
  WorkPtr recv(Tensors& tensors, int source, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  /// Blocks; throws on rank 0 with the ranks that did not come within the time-out (the first of them only, unless
  /// `wait_all_ranks`), and on those that came. Messages read as gloo's do.
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  /// Operations that have not ended, so that shutdown() can wait for them.
  struct Pending;
  using Millis = std::chrono::milliseconds;

  /// Throws where the group is destroyed or the process forked; else starts the description of a call.
  template <class CallOptions>
  WorkInfo open(c10d::OpType type, const char* title, const CallOptions& call) {
    return open(type, title, call.asyncOp, call.timeout);
  }
  WorkInfo open(c10d::OpType type, const char* title, bool is_async, std::chrono::milliseconds timeout);
  void check_open(const char* title) const;
  /// Of a call that asks for `asked`; 0: the group's.
  Millis time_limit(Millis asked) const;
  /// The same for what is not called by all members: takes no number.
  WorkInfo open_message(c10d::OpType type, const char* title) const;
  /// From that rank of the group, or from any.
  WorkPtr receive(WorkInfo info, const Tensors& tensors, std::optional<int> source, int tag);
  WorkPtr start(WorkInfo info, Step step);
  runtime::Request request(const WorkInfo& info, const OpDescriptor& descriptor, std::span<const std::byte> input,
                           std::span<std::byte> output) const;
  /// In place on `memory` (contiguous, wire dtype), which PREMUL_SUM multiplies now.
  /// `collective`: what the caller calls it (reduces()).
  runtime::Request all_reduce_request(const WorkInfo& info, const at::Tensor& memory, const c10d::ReduceOp& op,
                                      Collective collective = Collective::kAllReduce, std::int64_t root = 0) const;
  runtime::Request broadcast_request(const WorkInfo& info, const at::Tensor& memory, std::int64_t root) const;
  /// `output` has room for every member's block, in group order.
  runtime::Request all_gather_request(const WorkInfo& info, const at::Tensor& output, const at::Tensor& input) const;
  /// One all_gather whose blocks end in `outputs` (each of input's shape and dtype).
  void add_all_gather(const WorkInfo& info, const Tensors& outputs, const at::Tensor& input, Step& step);
  void add_all_gather_into(const WorkInfo& info, const at::Tensor& output, const at::Tensor& input, Step& step) const;
  void add_reduce_scatter(const WorkInfo& info, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op, Step& step) const;
  /// A collective made of messages has a tag of its own. `memory`: some that it moves.
  collectives::MessageCall next_collective(const WorkInfo& info, Collective kind, const at::Tensor& memory,
                                           std::int64_t root = 0);
  /// `memory` is contiguous and of a wire dtype.
  void add_send(const WorkInfo& info, int member, std::uint64_t tag, const at::Tensor& memory, Step& step) const;
  void add_receive(const WorkInfo& info, std::optional<int> member, std::uint64_t tag, const at::Tensor& memory,
                   Step& step) const;
  /// sparse.cc
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  /// monitored.cc: one byte to or from `member`.
  WorkPtr post_word(const WorkInfo& call, int member, std::uint64_t tag, const at::Tensor& word, bool is_send);
  void await_members(const WorkInfo& info, std::uint64_t tag, bool wait_all_ranks);
  void report_to_first(const WorkInfo& info, std::uint64_t tag);
  /// all_gather where the ranks bring different sizes.
  void add_uneven_all_gather(const WorkInfo& info, const Tensors& outputs, const at::Tensor& input, Step& step);
  /// Held until an operation's end: shutdown() waits for it.
  std::shared_ptr<void> take_ticket();
  /// `late`: of the one tensor, whose memory is the request's.
  WorkPtr allreduce_on_host(const Tensors& tensors, const c10d::AllreduceOptions& options,
                            std::shared_ptr<runtime::LateMemory> late);
  /// staged.cc: the same calls on tensors of `device`.
  void check_accelerator(c10::Device device, const char* title) const;
  StagedWork::HostCall on_this_group(const char* title, std::function<WorkPtr(Backend&)> call);
  WorkPtr hand_to_stager(c10::intrusive_ptr<DeviceWork> work);
  /// peers.cc: on the devices themselves; null where it goes through the host.
  WorkPtr peer_allreduce(c10::Device device, const Tensors& tensors, const c10d::AllreduceOptions& options);
  /// direct.cc: the network card reads and writes the device; null where it goes through the host.
  WorkPtr direct_allreduce(c10::Device device, const Tensors& tensors, const c10d::AllreduceOptions& options);
  /// The operation itself; `memory` keeps both.
  WorkPtr allreduce_on_device(const at::Tensor& input, const at::Tensor& output, std::shared_ptr<const void> memory,
                              const c10d::AllreduceOptions& options);
  /// In parts, where it is worth it (docs/adr/0021-device-parts.md); null: it is not.
  WorkPtr parted_allreduce(c10::Device device, const Tensors& tensors, const c10d::AllreduceOptions& options);
  template <class Prepare>
  WorkPtr stage(c10::Device device, c10d::OpType type, const char* title, Millis timeout, Tensors outputs,
                Prepare prepare);
  WorkPtr staged_allreduce(c10::Device device, const Tensors& tensors, const c10d::AllreduceOptions& options);
  WorkPtr staged_allreduce_coalesced(c10::Device device, const Tensors& tensors,
                                     const c10d::AllreduceCoalescedOptions& options);
  WorkPtr staged_broadcast(c10::Device device, const Tensors& tensors, const c10d::BroadcastOptions& options);
  WorkPtr staged_allgather(c10::Device device, const std::vector<Tensors>& outputs, const Tensors& inputs,
                           const c10d::AllgatherOptions& options, bool is_coalesced);
  WorkPtr staged_allgather_into(c10::Device device, const Tensors& outputs, const Tensors& inputs,
                                const c10d::AllgatherOptions& options, bool is_coalesced);
  WorkPtr staged_reduce(c10::Device device, const Tensors& tensors, const c10d::ReduceOptions& options);
  WorkPtr staged_reduce_scatter(c10::Device device, const Tensors& outputs, const std::vector<Tensors>& inputs,
                                const c10d::ReduceScatterOptions& options);
  WorkPtr staged_reduce_scatter_tensor(c10::Device device, const Tensors& outputs, const Tensors& inputs,
                                       const c10d::ReduceScatterOptions& options, bool is_coalesced);
  WorkPtr staged_gather(c10::Device device, const std::vector<Tensors>& outputs, const Tensors& inputs,
                        const c10d::GatherOptions& options);
  WorkPtr staged_scatter(c10::Device device, const Tensors& outputs, const std::vector<Tensors>& inputs,
                         const c10d::ScatterOptions& options);
  WorkPtr staged_alltoall_base(c10::Device device, const at::Tensor& output, const at::Tensor& input,
                               const std::vector<std::int64_t>& output_splits,
                               const std::vector<std::int64_t>& input_splits, const c10d::AllToAllOptions& options);
  WorkPtr staged_alltoall(c10::Device device, const Tensors& outputs, const Tensors& inputs,
                          const c10d::AllToAllOptions& options);
  WorkPtr staged_send(c10::Device device, const Tensors& tensors, int destination, int tag);
  WorkPtr staged_receive(c10::Device device, const Tensors& tensors, std::optional<int> source, int tag);
  void check_message(const Tensors& tensors, int peer, int tag, const char* title) const;
  void check_root(std::int64_t root, const char* title) const;
  /// `member` of this group, as messages call it: "rank 2" (its worker rank where that differs).
  std::string describe_rank(int member) const;

  const std::shared_ptr<Process> process_;
  GroupOptions options_;
  std::atomic<std::int64_t> timeout_ms_;
  std::atomic<std::uint64_t> sequence_{0};
  std::atomic<std::uint64_t> collective_tag_{0};
  std::atomic<std::uint64_t> monitored_barriers_{0};
  const std::shared_ptr<Pending> pending_;
  const std::shared_ptr<PeerSeat> peers_;
  std::mutex coalescing_mutex_;
  std::optional<std::vector<WorkPtr>> coalescing_;  // guarded by coalescing_mutex_
  std::atomic<bool> closed_{false};
};

/// Adds `then` after what `step` already does at its end.
void append(Step& step, std::function<void()> then);
/// What members keep of their own is copied at the step's end, whose own `then` holds the memory.
void add_messages(collectives::MessagePlan plan, Step& step);
/// inputs[i] goes to member i, whose tensor for this rank comes into outputs[i]. Contiguous, of wire dtypes.
void add_exchange(const collectives::MessageCall& call, const std::vector<at::Tensor>& outputs,
                  const std::vector<at::Tensor>& inputs, Step& step);

}  // namespace herring::torch_binding
