#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/config.h"
#include "core/status.h"
#include "core/types.h"
#include "memory/domain.h"
#include "runtime/communicator.h"
#include "transport/transport.h"

namespace herring::control {
class HubClient;
}

/// The composition root's face: what the bindings use. Everything below it (engines, transports, threads) is hidden.
namespace herring::runtime {

using control::HubClient;

/// Puts something around each endpoint that is opened on the process's memory; for tests.
using EndpointWrapper =
    std::function<std::unique_ptr<transport::Endpoint>(std::unique_ptr<transport::Endpoint>, memory::Domain&)>;

struct RuntimeOptions {
  Config config;
  std::shared_ptr<HubClient> hub;  ///< Joined already.
  std::uint32_t rank = 0;
  std::vector<std::string> fabric_search;  ///< efa::FabricOptions::search
  EndpointWrapper wrap_endpoint = {};
  bool is_generation = false;  ///< One of several of its job: who leaves it may go on in the next.
};

/// A worker process's runtime: one progress thread, one callback thread, embedded lanes where the plan has them.
class Runtime final : public Communicator {
 public:
  /// Opens what the placement needs, exchanges addresses, connects. Throws Error. Every worker and server of the job
  /// constructs one at the same time.
  Runtime(RuntimeOptions options, Instant deadline);
  ~Runtime() override;  ///< shutdown()
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  std::uint32_t rank() const override;
  std::uint32_t size() const override;
  std::uint32_t local_rank() const override;
  std::uint32_t local_size() const override;
  std::uint32_t servers() const override;
  std::string description() const override;
  std::vector<std::uint32_t> worker_hosts() const override;
  void add_group(GroupId id, std::span<const std::uint32_t> ranks) override;
  void leave_group(GroupId id) override;
  /// The same for who numbers its operations itself (Request::key): those from `calls` on end for the others.
  void leave_group(GroupId id, std::uint64_t calls);
  void remove_group(GroupId id) override;
  std::shared_ptr<void> will_call() override;
  std::shared_ptr<void> block(std::function<Awaited()> ask, bool from_pool) override;
  void set_background_caller(GroupId id, std::weak_ptr<const BackgroundCaller> caller) override;
  std::shared_ptr<Work> submit(const Request& request) override;
  std::shared_ptr<Work> run(const Request& request, Status& status) override;
  std::uint64_t late_part_bytes(GroupId group) const override;
  void look_at_late_memory() override;
  DeviceMemoryUse device_memory(GroupId group) const override;
  std::shared_ptr<void> register_device_memory(std::span<std::byte> memory, std::uint32_t device,
                                               std::shared_ptr<void> owner) override;
  std::optional<std::uint64_t> take_number(GroupId group) override;
  std::shared_ptr<Work> send(const Send& message) override;
  std::shared_ptr<ReceiveWork> receive(const Receive& message) override;
  Status lend(std::string_view name, std::span<const std::byte> reads, std::span<const std::byte> writes,
              std::shared_ptr<void>& lease) override;
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  void abort(const std::string& reason) override;
  void abort_group(GroupId id, const std::string& reason) override;
  void give_up_pending(GroupId id, const std::string& reason) override;
  /// Why nothing can be called in the group any more, on this rank, or why not this numbered operation; else Ok.
  Status group_end(GroupId id, std::optional<std::uint64_t> op = std::nullopt) const;
  /// What this rank did in a generation before this one with a group that it does not bring along.
  void report_left_before(GroupId id, std::uint64_t calls);
  void report_aborted_before(GroupId id, const std::string& reason);
  /// Why nothing at all goes any more; else Ok. What was said while nothing is pending here is heard soon after.
  Status failure() const;
  void shutdown() override;
  RuntimeStats stats() const override;
  std::vector<Straggler> stragglers() override;
  std::vector<ServerCounters> server_counters() override;

  /// Fails everything pending, and what comes later, with this; the others are not told. For who knows that they know.
  void give_up(const Status& status);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// A server process: serves until all workers have left (returns Ok), stop() is called, or the job failed.
class ServerProcess final {
 public:
  struct Options {
    Config config;
    std::shared_ptr<HubClient> hub;
    std::uint32_t rank = 0;
    std::vector<std::string> fabric_search;
    EndpointWrapper wrap_endpoint = {};
  };
  ServerProcess(Options options, Instant deadline);
  ~ServerProcess();
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;
  Status run();
  void stop();  ///< Any thread, also a signal handler's.
  ServerCounters counters() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::runtime
