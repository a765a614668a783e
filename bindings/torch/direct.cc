// GPUDirect RDMA (docs/adr/0035-gpudirect.md): the tensor is copied inside the GPU to memory that the network card
// knows; the servers get it from there, and the results come there. No byte of it comes to the host.
#include "direct.h"

#include <ATen/Functions.h>
#include <c10/util/Exception.h>

#include <span>
#include <utility>

#include "backend.h"
#include "core/status.h"
#include "device.h"

namespace herring::torch_binding {
namespace {

constexpr std::size_t kPage = 64 << 10;  // Of a GPU.

}  // namespace

DirectMemory::DirectMemory(std::weak_ptr<runtime::Communicator> runtime, DirectSettings settings)
    : runtime_(std::move(runtime)), settings_(settings) {}

DirectMemory::~DirectMemory() = default;

void DirectMemory::refuse(const std::string& who, const std::string& why) const {
  TORCH_CHECK(settings_.mode != DirectSettings::Mode::kOn, "herring: HERRING_GPUDIRECT=on, but ", who,
              " cannot use GPUDirect: ", why, ". HERRING_GPUDIRECT=auto or off sends tensors by way of host memory");
  TORCH_WARN("herring: ", who, " sends tensors by way of host memory, without GPUDirect: ", why);
}

bool DirectMemory::takes(GroupId group, const std::string& name, std::size_t bytes, runtime::DeviceMemoryUse& use) {
  if (settings_.mode == DirectSettings::Mode::kOff || is_refused_ || bytes <= settings_.least_bytes) return false;
  const auto runtime = runtime_.lock();
  if (!runtime) return false;
  use = runtime->device_memory(group);
  if (use.status.is_ok()) return true;
  {
    const std::lock_guard lock(mutex_);
    if (settings_.mode == DirectSettings::Mode::kAuto && !told_.insert(group.value).second) return false;
  }
  refuse(c10::str("rank ", runtime->rank(), " in process group '", name, "'"), use.status.message());
  return false;
}

std::shared_ptr<DirectMemory::Block> DirectMemory::take(const at::Tensor& tensor) {
  const std::size_t bytes = pooled_bytes(tensor.nbytes(), kPage);
  std::unique_ptr<Block> block = pool_.find(bytes, [&](const Block& idle) { return idle.device() == tensor.device(); });
  if (!block) block = make(bytes, tensor.device());
  if (!block) return nullptr;
  pool_.lend(*block);
  return {block.release(), [home = weak_from_this()](Block* held) {
            std::unique_ptr<Block> back(held);
            if (const auto self = home.lock()) self->pool_.give_back(std::move(back));
          }};
}

at::Tensor DirectMemory::like(const at::Tensor& tensor, const Block& block) {
  const at::Tensor empty = at::empty({0}, tensor.options());
  return empty.set_(block.memory_.storage(), 0, tensor.sizes(), tensor.strides());
}

std::unique_ptr<DirectMemory::Block> DirectMemory::make(std::size_t bytes, c10::Device device) {
  const auto runtime = runtime_.lock();
  if (!runtime) return nullptr;
  const OnDevice on_device(device);
  const at::Tensor memory =
      at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  const std::span<std::byte> span(static_cast<std::byte*>(memory.data_ptr()), memory.nbytes());
  try {
    auto registration = runtime->register_device_memory(span, static_cast<std::uint32_t>(device.index()), nullptr);
    return std::make_unique<Block>(memory, std::move(registration));
  } catch (const Error& error) {
    if (!is_refused_.exchange(settings_.mode == DirectSettings::Mode::kAuto)) {
      refuse(c10::str("rank ", runtime->rank()), error.status().message());
    }
    return nullptr;
  }
}

void Mirror::update_there(const at::Tensor& tensor, const at::Tensor& input, const at::Tensor& output,
                          std::shared_ptr<void> owner) {
  owner_ = std::move(owner);
  reads_.push_back({tensor.detach(), input});
  writes_.push_back({tensor.detach(), output});
}

namespace {

/// What the network touches of an operation.
struct Blocks {
  std::shared_ptr<DirectMemory::Block> input;
  std::shared_ptr<DirectMemory::Block> output;
};

}  // namespace

Backend::WorkPtr Backend::direct_allreduce(c10::Device device, const Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  constexpr const char* kTitle = "herring:all_reduce";
  check_accelerator(device, kTitle);
  if (tensors.size() != 1 || !is_reduced_as_it_is(tensors[0], options.reduceOp)) return nullptr;
  const at::Tensor& tensor = tensors[0];
  runtime::DeviceMemoryUse use;
  if (!process_->direct->takes(options_.id, options_.name, tensor.nbytes(), use)) return nullptr;
  static_cast<void>(current_stream(device, kTitle));  // Refuses a capture.
  // Before the mirror looks at the current stream: what torch had there comes first.
  const auto blocks = std::make_shared<Blocks>();
  blocks->input = process_->direct->take(tensor);
  blocks->output = use.is_apart && blocks->input ? process_->direct->take(tensor) : blocks->input;
  if (!blocks->input || !blocks->output) return nullptr;
  const at::Tensor input = DirectMemory::like(tensor, *blocks->input);
  const at::Tensor output = use.is_apart ? DirectMemory::like(tensor, *blocks->output) : input;
  auto mirror = std::make_unique<Mirror>(device, kTitle, process_->host_memory);
  mirror->update_there(tensor, input, output, blocks);
  auto call = on_this_group(kTitle, [input, output, blocks, own = options](Backend& group) {
    return group.allreduce_on_device(input, output, blocks, own);
  });
  mirror->seal();
  return hand_to_stager(c10::make_intrusive<StagedWork>(process_->runtime, rank_, c10d::OpType::ALLREDUCE, kTitle,
                                                        std::move(mirror), tensors, time_limit(options.timeout),
                                                        std::move(call), take_ticket()));
}

Backend::WorkPtr Backend::allreduce_on_device(const at::Tensor& input, const at::Tensor& output,
                                              std::shared_ptr<const void> memory,
                                              const c10d::AllreduceOptions& options) {
  WorkInfo info = open(c10d::OpType::ALLREDUCE, "herring:all_reduce", true, options.timeout);
  OpDescriptor descriptor = describe(Collective::kAllReduce, input, info.title);
  descriptor.reduce = reduce_op(options.reduceOp);
  Step step;
  step.requests.push_back(request(info, descriptor, bytes_of(input), bytes_of(output)));
  step.requests.back().device_memory = std::move(memory);
  return start(std::move(info), std::move(step));
}

}  // namespace herring::torch_binding
