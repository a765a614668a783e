#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device.h"
#include "handed.h"
#include "pack.h"

namespace herring::torch_binding {

/// Small device tensors of calls that follow each other, which are copied to the host together and are reduced there
/// each by itself: add() them; hosts() are there when they have been read; write_back() those whose reduction has
/// ended. It closes by itself where nobody adds for a moment, when it is full, and when somebody waits. Safe from any
/// thread.
class Batch final : public Staged, public std::enable_shared_from_this<Batch> {
 public:
  /// `call` stands in messages; `timeout` is that of the copies out.
  Batch(const std::shared_ptr<Stager>& stager, std::shared_ptr<HostMemory> memory, c10::Device device, std::string call,
        std::chrono::milliseconds timeout);

  /// Its index; nothing where this one takes no more, or not from the caller's current stream. What `source` is when
  /// that stream has come so far is read. `target` may be `source`; both are as Pack::takes() wants them. Throws where
  /// the stream is being captured into a graph.
  std::optional<std::size_t> add(const at::Tensor& source, const at::Tensor& target);
  /// Takes no more.
  void close();
  Arrival& arrival() { return arrival_; }
  /// The host tensors, once they have been read.
  std::vector<at::Tensor> hosts() const;

  /// Puts the copies back to these targets on their stream. Not twice for one.
  void write_back(std::span<const std::size_t> which);
  /// The target is as it will be.
  bool is_written(std::size_t index) const;
  /// The caller's current stream goes on after the copy back, which has been put on its stream.
  void block_current_stream(std::size_t index);

  bool try_start(std::chrono::steady_clock::time_point now) override;
  bool is_urgent() const override;
  bool is_over() override;

 private:
  using Clock = std::chrono::steady_clock;
  bool is_closed_at(Clock::time_point now) const;
  void read();

  const std::weak_ptr<Stager> stager_;  ///< As Handed has it.
  const c10::Device device_;
  const std::string call_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point begun_;
  const CopyStreams streams_;
  const std::shared_ptr<HostMemory> memory_;
  Arrival arrival_;
  mutable std::mutex mutex_;           // guards all below
  std::optional<c10::Stream> stream_;  ///< That all tensors come from.
  c10::Event ready_;                   ///< What it had at the last call.
  Clock::time_point last_;             ///< When that was.
  bool is_closed_ = false;
  bool is_wanted_ = false;  ///< By somebody who waits.
  Pack pack_;
  std::optional<c10::Event> read_;
  std::vector<std::optional<std::size_t>> written_by_;  ///< For each tensor: which of the events.
  std::vector<c10::Event> written_;
  std::vector<std::pair<std::size_t, c10::Stream>> blocked_;  ///< These streams wait for these events already.
};

}  // namespace herring::torch_binding
