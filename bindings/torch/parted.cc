#include "parted.h"

#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "tensors.h"

namespace herring::torch_binding {
namespace {

Status not_here() { return {Code::kUnavailable, "not asked of a tensor's copies"}; }

at::Tensor whole_parts(const Mirror& mirror, const at::Tensor& tensor, std::uint64_t part_bytes) {
  const auto parts = static_cast<std::int64_t>((tensor.nbytes() + part_bytes - 1) / part_bytes);
  const auto elements = static_cast<std::int64_t>(part_bytes / tensor.element_size());
  return mirror.host_memory({parts * elements}, tensor.scalar_type());
}

}  // namespace

TensorDevice::TensorDevice(at::Tensor tensor, at::Tensor host, CopyStreams streams)
    : tensor_(std::move(tensor)), host_(std::move(host)), streams_(streams) {}

DeviceSpan TensorDevice::memory() const {
  return {reinterpret_cast<std::uint64_t>(tensor_.data_ptr()), tensor_.nbytes()};
}

DeviceId TensorDevice::id() const { return DeviceId{static_cast<std::uint32_t>(tensor_.device().index())}; }
std::string TensorDevice::description() const { return tensor_.device().str(); }
StreamHandle TensorDevice::create_stream() { return kOut; }
StreamHandle TensorDevice::adopt_stream(ForeignStream) { return kOut; }
Status TensorDevice::allocate(std::size_t, DeviceSpan&) { return not_here(); }
Status TensorDevice::allocate_shared(std::size_t, DeviceSpan&, int&) { return not_here(); }
Status TensorDevice::import_shared(int, std::size_t, DeviceSpan&) { return not_here(); }
Status TensorDevice::release(DeviceSpan) { return not_here(); }
Status TensorDevice::pin(std::span<std::byte>) { return not_here(); }
Status TensorDevice::unpin(std::span<std::byte>) { return not_here(); }
Status TensorDevice::wait_event(StreamHandle, ForeignEvent) { return not_here(); }
Status TensorDevice::wait_ticket(StreamHandle, Ticket) { return not_here(); }
Status TensorDevice::copy_inside(StreamHandle, DeviceSpan, DeviceSpan) { return not_here(); }
Status TensorDevice::launch(StreamHandle, KernelId, std::span<const std::byte>, std::uint32_t) { return not_here(); }
Status TensorDevice::is_capturing(ForeignStream, bool&) { return not_here(); }
PointerKind TensorDevice::kind_of(std::uint64_t) { return PointerKind::kUnknown; }

Status TensorDevice::copy_to_host(StreamHandle stream, std::span<std::byte> to, DeviceSpan from) {
  return copy(stream, true, from.address - memory().address, to.size());
}

Status TensorDevice::copy_to_device(StreamHandle stream, DeviceSpan to, std::span<const std::byte> from) {
  return copy(stream, false, to.address - memory().address, from.size());
}

Status TensorDevice::copy(StreamHandle stream, bool is_to_host, std::uint64_t offset, std::size_t bytes) {
  if (!health_.is_ok()) return health_;
  const std::size_t element = tensor_.element_size();
  const auto first = static_cast<std::int64_t>(offset / element);
  const auto count = static_cast<std::int64_t>(bytes / element);
  try {
    const c10::StreamGuard on_stream(stream_of(stream));
    const at::Tensor there = tensor_.narrow(0, first, count), here = host_.narrow(0, first, count);
    is_to_host ? here.copy_(there, true) : there.copy_(here, true);
  } catch (const std::exception& error) {
    health_ = {Code::kTransport, c10::str("a copy on ", tensor_.device(), " failed: ", error.what())};
  }
  return health_;
}

Status TensorDevice::record(StreamHandle stream, Ticket& ticket) {
  if (!health_.is_ok()) return health_;
  try {
    c10::Event event(tensor_.device().type());
    event.record(stream_of(stream));
    ticket = {++last_ticket_};
    (stream == kOut ? out_ : back_).emplace_back(ticket, std::move(event));
  } catch (const std::exception& error) {
    health_ = {Code::kTransport, c10::str("an event on ", tensor_.device(), " failed: ", error.what())};
  }
  return health_;
}

std::size_t TensorDevice::poll(std::span<TicketDone> done) {
  std::size_t count = 0;
  for (auto* const tickets : {&out_, &back_}) {
    while (!tickets->empty() && count < done.size()) {
      try {
        if (health_.is_ok() && !tickets->front().second.query()) break;
      } catch (const std::exception& error) {
        health_ = {Code::kTransport, c10::str(tensor_.device(), " failed: ", error.what())};
      }
      done[count++] = {tickets->front().first, health_};
      tickets->pop_front();
    }
  }
  return count;
}

PartedCopies::PartedCopies(std::shared_ptr<runtime::Communicator> runtime, const Mirror& mirror,
                           const at::Tensor& tensor, std::uint64_t part_bytes, std::chrono::milliseconds timeout)
    : runtime_(std::move(runtime)),
      memory_(whole_parts(mirror, tensor, part_bytes)),
      host_(memory_.narrow(0, 0, tensor.numel()).view(tensor.sizes())),
      device_(tensor.detach().view({-1}), memory_, mirror.streams()) {
  runtime::DeviceParts::Options options;
  options.out = TensorDevice::kOut;  // Goes on after the mirror's ready event.
  options.back = TensorDevice::kBack;
  options.tensor = device_.memory();
  options.host = bytes_of(memory_);
  options.part_bytes = part_bytes;
  const auto now = std::chrono::steady_clock::now();
  options.deadline = now + timeout;
  parts_ = runtime::DeviceParts::start(now, device_, options);
}

bool PartedCopies::turn(std::chrono::steady_clock::time_point now) {
  const runtime::DeviceParts::Turn turn = parts_->run(now);
  if (turn.has_news) runtime_->look_at_late_memory();
  return turn.has_moved;
}

}  // namespace herring::torch_binding
