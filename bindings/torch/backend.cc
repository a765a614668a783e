#include "backend.h"

#include <ATen/Functions.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "gil.h"

namespace herring::torch_binding {
namespace {

/// How long destroying a group waits for its pending operations.
constexpr std::chrono::seconds kDrain{5};
/// Longer time-outs mean "for ever" and would overflow a nanosecond clock.
constexpr std::chrono::hours kLongest{24 * 365};

std::chrono::milliseconds clamp_timeout(std::chrono::milliseconds timeout) {
  return std::min<std::chrono::milliseconds>(timeout, kLongest);
}

}  // namespace

struct Backend::Pending {
  std::mutex mutex;
  std::condition_variable none_left;
  std::size_t count = 0;

  /// Counts from construction to destruction; held by the Work until it ends.
  class Ticket final {
   public:
    explicit Ticket(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {
      const std::lock_guard lock(pending_->mutex);
      ++pending_->count;
    }
    ~Ticket() {
      const std::lock_guard lock(pending_->mutex);
      if (--pending_->count == 0) pending_->none_left.notify_all();
    }
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;

   private:
    const std::shared_ptr<Pending> pending_;
  };
};

Process::Process(std::shared_ptr<runtime::Communicator> shared_runtime, bool with_accelerators,
                 PeerSettings peer_settings, DirectSettings direct_settings)
    : runtime(std::move(shared_runtime)),
      host_memory(std::make_shared<HostMemory>(runtime)),
      direct(std::make_shared<DirectMemory>(runtime, direct_settings)),
      stager(std::make_unique<Stager>()),
      takes_accelerators(with_accelerators),
      peers(peer_settings),
      pid(getpid()) {}

Process::~Process() {
  const GilRelease no_gil;
  if (getpid() == pid) {
    stager.reset();
    host_memory.reset();
    direct.reset();
    runtime.reset();
    return;
  }
  // A forked child: the threads that destructors would wait for exist in the parent only. Leaked on purpose.
  static_cast<void>(new std::shared_ptr<runtime::Communicator>(std::move(runtime)));
  static_cast<void>(new std::shared_ptr<HostMemory>(std::move(host_memory)));
  static_cast<void>(new std::shared_ptr<DirectMemory>(std::move(direct)));
  static_cast<void>(stager.release());
}

void append(Step& step, std::function<void()> then) {
  step.then = [before = std::move(step.then), after = std::move(then)]() -> Step {
    Step next = before ? before() : Step{};
    TORCH_INTERNAL_ASSERT(!next.then && next.requests.empty(), "append() to a step that has a next one");
    after();
    return {};
  };
}

Backend::Backend(std::shared_ptr<Process> process, GroupOptions options)
    : c10d::Backend(options.rank, options.size),
      process_(std::move(process)),
      options_(std::move(options)),
      timeout_ms_(clamp_timeout(options_.timeout).count()),
      pending_(std::make_shared<Pending>()),
      peers_(std::make_shared<PeerSeat>(process_->runtime, process_->host_memory, process_->peers, options_.id,
                                        options_.name, options_.job_ranks)) {
  process_->runtime->add_group(options_.id, options_.job_ranks);
  init();
}

Backend::~Backend() {
  const GilRelease no_gil;
  shutdown();
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  auto options = c10::make_intrusive<Options>("herring", Millis(timeout_ms_.load()));
  options->group_name = options_.name;
  options->global_ranks_in_group.assign(options_.job_ranks.begin(), options_.job_ranks.end());
  return options;
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  TORCH_CHECK_VALUE(timeout.count() > 0, "herring: a timeout must be positive, got ", timeout.count(), " ms");
  timeout_ms_.store(clamp_timeout(timeout).count());
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  TORCH_CHECK_VALUE(size >= 0, "herring: allocateTensor of ", size, " elements");
  TORCH_CHECK_VALUE(options.device().is_cpu(), "herring: allocateTensor on ", options.device(), "; only CPU memory");
  const std::size_t bytes = static_cast<std::size_t>(size) * options.dtype().itemsize();
  std::shared_ptr<std::byte> memory;
  if (bytes > 0 && !closed_ && getpid() == process_->pid) memory = process_->runtime->allocate(bytes);
  if (!memory) return at::empty({size}, options);  // Arena full: such a bucket is copied, not refused.
  // Resizable, as hooks may resize a bucket (batched PowerSGD does): the new memory is then torch's own.
  using Memory = std::shared_ptr<std::byte>;
  void* const data = memory.get();
  c10::DataPtr owner(
      data, new Memory(std::move(memory)), [](void* held) { delete static_cast<Memory*>(held); }, at::kCPU);
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(owner), c10::GetCPUAllocator(), true);
  return at::empty({0}, options).set_(storage, 0, {size}, {1});
}

void Backend::abort() {
  if (getpid() != process_->pid) return;
  const std::string reason = c10::str("process group '", options_.name, "' was aborted");
  if (options_.is_world) {
    process_->runtime->abort(reason);
  } else {
    process_->runtime->abort_group(options_.id, reason);
  }
  peers_->close({Code::kCancelled, reason});
}

void Backend::shutdown() {
  if (closed_.exchange(true)) return;
  if (getpid() != process_->pid) return;
  process_->runtime->leave_group(options_.id);
  {
    std::unique_lock lock(pending_->mutex);
    pending_->none_left.wait_for(lock, kDrain, [&] { return pending_->count == 0; });
  }
  process_->runtime->remove_group(options_.id);
  peers_->leave();
  if (options_.released) std::exchange(options_.released, nullptr)();
}

void Backend::check_open(const char* title) const {
  TORCH_CHECK(getpid() == process_->pid, title, ": this is a forked child (pid ", getpid(), ") of the process ",
              process_->pid, " that joined the job; start workers with spawn, or communicate from the parent");
  TORCH_CHECK(!closed_, title, ": process group '", options_.name, "' was destroyed");
}

Backend::Millis Backend::time_limit(Millis asked) const {
  return asked.count() > 0 ? clamp_timeout(asked) : Millis(timeout_ms_.load());
}

WorkInfo Backend::open(c10d::OpType type, const char* title, bool is_async, std::chrono::milliseconds timeout) {
  check_open(title);
  // All ranks count a group's operations alike: what is still being copied from an accelerator was called before.
  process_->stager->wait_until_started();
  WorkInfo info;
  info.rank = rank_;
  info.op_type = type;
  info.title = title;
  info.sequence = ++sequence_;
  info.is_async = is_async;
  info.timeout = time_limit(timeout);
  return info;
}

std::shared_ptr<void> Backend::take_ticket() { return std::make_shared<Pending::Ticket>(pending_); }

Backend::WorkPtr Backend::start(WorkInfo info, Step step) {
  // A receive that nobody waits for has no end that shutdown() could wait for.
  const bool receives = info.op_type == c10d::OpType::RECV || info.op_type == c10d::OpType::RECVANYSOURCE;
  if (!receives) info.ticket = take_ticket();
  const c10::intrusive_ptr<Work> work = Work::start(std::move(info), std::move(step), process_->runtime);
  const std::lock_guard lock(coalescing_mutex_);
  if (coalescing_) coalescing_->push_back(work);
  return work;
}

void Backend::startCoalescing() {
  check_open("herring: startCoalescing");
  const std::lock_guard lock(coalescing_mutex_);
  TORCH_CHECK(!coalescing_, "herring: startCoalescing twice without endCoalescing on process group '", options_.name,
              "'");
  coalescing_.emplace();
}

Backend::WorkPtr Backend::endCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  TORCH_CHECK(coalescing_, "herring: endCoalescing without startCoalescing on process group '", options_.name, "'");
  return c10::make_intrusive<CoalescedWork>(*std::exchange(coalescing_, std::nullopt));
}

runtime::Request Backend::request(const WorkInfo& info, const OpDescriptor& descriptor,
                                  std::span<const std::byte> input, std::span<std::byte> output) const {
  runtime::Request request;
  request.group = options_.id;
  request.descriptor = descriptor;
  request.input = input;
  request.output = output;
  request.timeout = info.timeout;
  request.is_waited_for = !info.is_async;
  return request;
}

runtime::Request Backend::all_reduce_request(const WorkInfo& info, const at::Tensor& memory, const c10d::ReduceOp& op,
                                             Collective collective, std::int64_t root) const {
  OpDescriptor descriptor = describe(collective, memory, info.title);
  descriptor.root = static_cast<std::uint32_t>(root);
  descriptor.reduce = reduce_op(op);
  prescale(memory, op);
  return request(info, descriptor, bytes_of(memory), bytes_of(memory));
}

runtime::Request Backend::broadcast_request(const WorkInfo& info, const at::Tensor& memory, std::int64_t root) const {
  OpDescriptor descriptor = describe(Collective::kBroadcast, memory, info.title);
  descriptor.root = static_cast<std::uint32_t>(root);
  return request(info, descriptor, bytes_of(memory), bytes_of(memory));
}

runtime::Request Backend::all_gather_request(const WorkInfo& info, const at::Tensor& output,
                                             const at::Tensor& input) const {
  return request(info, describe(Collective::kAllGather, input, info.title), bytes_of(input), bytes_of(output));
}

void Backend::check_root(std::int64_t root, const char* title) const {
  TORCH_CHECK_VALUE(root >= 0 && root < size_, title, ": root rank ", root, " is not in the group '", options_.name,
                    "' of ", size_, " rank(s)");
}

std::string Backend::describe_rank(int member) const {
  const std::uint32_t job_rank = options_.job_ranks.at(static_cast<std::size_t>(member));
  if (job_rank == static_cast<std::uint32_t>(member)) return c10::str("rank ", member);
  return c10::str("group rank ", member, " (worker ", job_rank, ")");
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (!tensors.empty() && tensors[0].defined() && tensors[0].is_sparse()) return allreduce_sparse(tensors, options);
  if (const auto device = accelerator_of(tensors)) return staged_allreduce(*device, tensors, options);
  return allreduce_on_host(tensors, options, nullptr);
}

Backend::WorkPtr Backend::allreduce_on_host(const Tensors& tensors, const c10d::AllreduceOptions& options,
                                            std::shared_ptr<runtime::LateMemory> late) {
  WorkInfo info = open(c10d::OpType::ALLREDUCE, "herring:all_reduce", options);
  check_tensors(tensors, 0, info.title);
  std::vector<Dense> dense;
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(dense_for_reduction(tensor, options.reduceOp, info.title));
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors[0].scalar_type() && tensor.sizes() == tensors[0].sizes(),
                      info.title, ": several tensors in one call are reduced together and must be alike, got ",
                      tensors[0].scalar_type(), tensors[0].sizes(), " and ", tensor.scalar_type(), tensor.sizes());
  }
  // Several tensors of one rank count as so many contributions, and all of them get the result, as with gloo.
  const at::Tensor memory = dense[0].memory;
  for (std::size_t i = 1; i < dense.size(); ++i) {
    combine_locally(memory, dense[i].memory, options.reduceOp, info.title);
  }
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  step.requests.push_back(all_reduce_request(info, memory, options.reduceOp));
  step.requests.back().late = std::move(late);
  append(step, [dense = std::move(dense)] {
    for (const Dense& each : dense) {
      if (&each != &dense.front()) each.memory.copy_(dense.front().memory);
      each.copy_back();
    }
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (const auto device = accelerator_of(tensors)) return staged_allreduce_coalesced(*device, tensors, options);
  WorkInfo info = open(c10d::OpType::ALLREDUCE_COALESCED, "herring:all_reduce_coalesced", options);
  check_tensors(tensors, 0, info.title);
  std::vector<Dense> dense;
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(dense_for_reduction(tensor, options.reduceOp, info.title));
  }
  part_overlaps(dense);
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  for (const Dense& each : dense) step.requests.push_back(all_reduce_request(info, each.memory, options.reduceOp));
  append(step, [dense = std::move(dense)] {
    for (const Dense& each : dense) each.copy_back();
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (const auto device = accelerator_of(tensors)) return staged_broadcast(*device, tensors, options);
  WorkInfo info = open(c10d::OpType::BROADCAST, "herring:broadcast", options);
  check_tensors(tensors, 0, info.title);
  check_root(options.rootRank, info.title);
  const auto root_tensor = static_cast<std::size_t>(options.rootTensor);
  TORCH_CHECK_VALUE(root_tensor < tensors.size(), info.title, ": root tensor ", options.rootTensor, " of ",
                    tensors.size());
  Dense dense = dense_for_move(tensors[root_tensor], info.title);
  info.inputs = tensors;
  info.outputs = tensors;
  Step step;
  step.requests.push_back(broadcast_request(info, dense.memory, options.rootRank));
  append(step, [dense = std::move(dense), tensors, root_tensor, is_root = options.rootRank == rank_] {
    if (!is_root) dense.copy_back();
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      if (i != root_tensor) tensors[i].detach().copy_(tensors[root_tensor].detach());
    }
  });
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  WorkInfo info = open(c10d::OpType::BARRIER, "herring:barrier", options);
  OpDescriptor descriptor;
  descriptor.collective = Collective::kBarrier;
  Step step;
  step.requests.push_back(request(info, descriptor, {}, {}));
  return start(std::move(info), std::move(step));
}

void Backend::add_all_gather(const WorkInfo& info, const Tensors& outputs, const at::Tensor& input, Step& step) {
  check_tensors(outputs, static_cast<std::size_t>(size_), info.title);
  // All ranks see the same outputs, so all go the same way.
  const bool is_even = std::all_of(outputs.begin(), outputs.end(),
                                   [&](const at::Tensor& each) { return each.numel() == outputs[0].numel(); });
  if (!is_even) return add_uneven_all_gather(info, outputs, input, step);
  Dense dense = dense_for_move(input, info.title);
  for (const at::Tensor& output : outputs) {
    TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel(), info.title,
                      ": every output must match the input ", input.scalar_type(), input.sizes(), ", got ",
                      output.scalar_type(), output.sizes());
  }
  std::vector<std::int64_t> shape{size_};
  shape.insert(shape.end(), dense.memory.sizes().begin(), dense.memory.sizes().end());
  at::Tensor gathered = at::empty(shape, dense.memory.options());
  step.requests.push_back(all_gather_request(info, gathered, dense.memory));
  append(step, [outputs, gathered = std::move(gathered), source = std::move(dense)] {
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      const at::Tensor block = gathered.select(0, static_cast<std::int64_t>(i));
      Dense target{outputs[i], block, true};
      // An output may have another shape of as many elements, as with gloo.
      if (outputs[i].scalar_type() == block.scalar_type()) target.memory = block.view(outputs[i].sizes());
      target.copy_back();
    }
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  if (const auto device = accelerator_of(inputs)) return staged_allgather(*device, outputs, inputs, options, false);
  WorkInfo info = open(c10d::OpType::ALLGATHER, "herring:all_gather", options);
  check_tensors(inputs, 1, info.title);
  TORCH_CHECK_VALUE(outputs.size() == 1, info.title, ": needs one list of outputs, got ", outputs.size());
  info.inputs = inputs;
  info.outputs = outputs[0];
  Step step;
  add_all_gather(info, outputs[0], inputs[0], step);
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  if (const auto device = accelerator_of(inputs)) return staged_allgather(*device, outputs, inputs, options, true);
  WorkInfo info = open(c10d::OpType::ALLGATHER_COALESCED, "herring:all_gather_coalesced", options);
  check_tensors(inputs, 0, info.title);
  TORCH_CHECK_VALUE(outputs.size() == static_cast<std::size_t>(size_), info.title, ": needs ", size_,
                    " lists of outputs, one a rank, got ", outputs.size());
  info.inputs = inputs;
  Step step;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    Tensors blocks;
    for (const Tensors& of_rank : outputs) {
      TORCH_CHECK_VALUE(of_rank.size() == inputs.size(), info.title, ": got ", inputs.size(), " inputs and a list of ",
                        of_rank.size(), " outputs");
      blocks.push_back(of_rank[i]);
    }
    add_all_gather(info, blocks, inputs[i], step);
  }
  for (const Tensors& of_rank : outputs) info.outputs.insert(info.outputs.end(), of_rank.begin(), of_rank.end());
  return start(std::move(info), std::move(step));
}

void Backend::add_all_gather_into(const WorkInfo& info, const at::Tensor& output, const at::Tensor& input,
                                  Step& step) const {
  check_tensor(output, info.title);
  check_tensor(input, info.title);
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type() && output.numel() == input.numel() * size_, info.title,
                    ": the output must hold ", size_, " times the input ", input.scalar_type(), input.sizes(), ", got ",
                    output.scalar_type(), output.sizes());
  Dense source = dense_for_move(input, info.title);
  Dense target = dense_for_move(output, info.title);
  step.requests.push_back(all_gather_request(info, target.memory, source.memory));
  append(step, [source = std::move(source), target = std::move(target)] { target.copy_back(); });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  if (const auto device = accelerator_of(input))
    return staged_allgather_into(*device, {output}, {input}, options, false);
  WorkInfo info = open(c10d::OpType::_ALLGATHER_BASE, "herring:_all_gather_base", options);
  info.inputs = {input};
  info.outputs = {output};
  Step step;
  add_all_gather_into(info, output, input, step);
  return start(std::move(info), std::move(step));
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  if (const auto device = accelerator_of(inputs)) return staged_allgather_into(*device, outputs, inputs, options, true);
  WorkInfo info = open(c10d::OpType::COALESCED, "herring:all_gather_into_tensor_coalesced", options);
  check_tensors(inputs, 0, info.title);
  check_tensors(outputs, inputs.size(), info.title);
  info.inputs = inputs;
  info.outputs = outputs;
  Step step;
  for (std::size_t i = 0; i < inputs.size(); ++i) add_all_gather_into(info, outputs[i], inputs[i], step);
  return start(std::move(info), std::move(step));
}

}  // namespace herring::torch_binding
