#include "batch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace herring::torch_binding {
namespace {

/// More do not go faster.
constexpr std::size_t kFullBytes = 4 << 20;
/// Calls of a loop follow each other faster than that, those of a backward pass mostly do not.
constexpr std::chrono::microseconds kPause{50};
/// Other ranks may be waiting for the first one.
constexpr std::chrono::microseconds kLongestOpen{1000};

}  // namespace

Batch::Batch(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory, c10::Device device,
             std::string call, std::chrono::milliseconds timeout)
    : stager_(stager),
      device_(device),
      call_(std::move(call)),
      timeout_(timeout),
      begun_(Clock::now()),
      streams_(CopyStreams::of(device)),
      memory_(std::move(memory)),
      ready_(device.type()),
      last_(begun_),
      pack_(device) {}

std::optional<std::size_t> Batch::add(const at::Tensor& source, const at::Tensor& target) {
  const c10::Stream current = current_stream(device_, call_);
  std::size_t index = 0;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_ || (stream_ && *stream_ != current) || !pack_.has_room(source)) return std::nullopt;
    ready_.record(current);
    stream_ = current;
    last_ = Clock::now();
    index = pack_.add(source, target);
    written_by_.emplace_back();
  }
  if (index == 0) {
    const std::shared_ptr<Stager> stager = stager_.lock();
    TORCH_CHECK(stager, "herring: the stager has gone");
    stager->add(shared_from_this());
  }
  return index;
}

void Batch::close() {
  {
    const std::lock_guard lock(mutex_);
    if (is_wanted_) return;
    is_closed_ = is_wanted_ = true;
  }
  if (const std::shared_ptr<Stager> stager = stager_.lock()) stager->wake();
}

bool Batch::is_closed_at(Clock::time_point now) const {
  return is_closed_ || pack_.bytes() >= kFullBytes || now - last_ >= kPause || now - begun_ >= kLongestOpen;
}

bool Batch::try_start(Clock::time_point now) {
  return arrival_.try_come(device_, now, begun_ + timeout_, timeout_, [this, now] {
    const std::lock_guard lock(mutex_);
    if (!read_) {
      if (!is_closed_at(now)) return false;
      is_closed_ = true;
      read();
    }
    return read_->query();
  });
}

void Batch::read() {
  pack_.lay(host_memory_of(*memory_, {static_cast<std::int64_t>(pack_.bytes())}, at::kByte, device_));
  ready_.block(streams_.out);
  try {
    pack_.copy_out(streams_.out);
    read_.emplace(device_.type());
    read_->record(streams_.out);
  } catch (...) {
    end_copies(streams_.out);
    throw;
  }
}

std::vector<at::Tensor> Batch::hosts() const {
  const std::lock_guard lock(mutex_);
  std::vector<at::Tensor> hosts;
  for (std::size_t i = 0; i < pack_.size(); ++i) hosts.push_back(pack_.host(i));
  return hosts;
}

void Batch::write_back(std::span<const std::size_t> which) {
  if (which.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    try {
      pack_.copy_back(streams_.back, which);
      written_.emplace_back(device_.type());
      written_.back().record(streams_.back);
    } catch (...) {
      end_copies(streams_.back);
      throw;
    }
    for (const std::size_t index : which) written_by_[index] = written_.size() - 1;
  }
  Stager::keep(stager_, shared_from_this(), streams_.back);
}

bool Batch::is_written(std::size_t index) const {
  const OnDevice on_device(device_);
  const std::lock_guard lock(mutex_);
  return written_by_[index] && written_[*written_by_[index]].query();
}

void Batch::block_current_stream(std::size_t index) {
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const std::lock_guard lock(mutex_);
  if (!written_by_[index]) return;
  const std::pair wait(*written_by_[index], current);
  if (std::ranges::find(blocked_, wait) != blocked_.end()) return;
  written_[wait.first].block(current);
  blocked_.push_back(wait);
}

bool Batch::is_urgent() const {
  const std::lock_guard lock(mutex_);
  return is_wanted_;
}

bool Batch::is_over() {
  const OnDevice on_device(device_);
  const std::lock_guard lock(mutex_);
  try {
    return (!read_ || read_->query()) && (written_.empty() || written_.back().query());
  } catch (...) {
    return true;  // The device failed: nothing is copied any more.
  }
}

}  // namespace herring::torch_binding
