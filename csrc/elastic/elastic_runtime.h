#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "elastic/generation.h"
#include "runtime/communicator.h"

namespace herring::elastic {

/// The job has others in it than before.
struct Change {
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;  ///< Of this worker, from now on.
  std::uint32_t size = 0;
  std::uint32_t lost = 0;    ///< Workers that were here and are not any more.
  std::uint32_t joined = 0;  ///< Workers that are new.
  std::string reason;        ///< "worker 2 (pid 71 on b) is lost: connection closed"
};

/// A worker of a job whose processes may change: a Communicator over one Runtime after the other (a generation each).
///
/// In an elastic job (Config::elastic) a lost worker costs no operation that those left can do: what was under way is
/// finished by all of them, each operation with one set of contributors and its divisor, and no error is seen. Of what
/// can not be had any more (a broadcast whose root died, an all_gather of a group that shrank, messages under way) the
/// callers are told with kPeerLost, on all ranks alike. In other jobs only servers may come.
class ElasticRuntime final : public runtime::Communicator {
 public:
  /// Enters the rendezvous and waits for the first generation that this worker is in. Throws Error.
  ElasticRuntime(const Home& home, Instant deadline);
  ~ElasticRuntime() override;  ///< shutdown()
  ElasticRuntime(const ElasticRuntime&) = delete;
  ElasticRuntime& operator=(const ElasticRuntime&) = delete;

  std::uint32_t rank() const override;
  std::uint32_t size() const override;
  std::uint32_t local_rank() const override;
  std::uint32_t local_size() const override;
  std::uint32_t servers() const override;
  std::string description() const override;
  /// `ranks` as they are now. A group shrinks to those of its members that are left, in their order.
  void add_group(GroupId id, std::span<const std::uint32_t> ranks) override;
  void leave_group(GroupId id) override;
  void remove_group(GroupId id) override;
  /// Elastic: blocks while Config::journal_bytes of results are not known to be everywhere.
  std::shared_ptr<runtime::Work> submit(const runtime::Request& request) override;
  std::shared_ptr<runtime::Work> send(const runtime::Send& message) override;
  std::shared_ptr<runtime::ReceiveWork> receive(const runtime::Receive& message) override;
  std::optional<std::uint64_t> take_number(GroupId group) override;
  std::shared_ptr<std::byte> allocate(std::size_t bytes) override;
  void abort(const std::string& reason) override;
  void abort_group(GroupId id, const std::string& reason) override;
  void give_up_pending(GroupId id, const std::string& reason) override;
  void shutdown() override;
  runtime::RuntimeStats stats() const override;
  std::vector<runtime::Straggler> stragglers() override;
  std::vector<runtime::ServerCounters> server_counters() override;

  std::uint64_t generation() const;
  std::uint64_t job_id() const;                  ///< Of the generation.
  std::vector<control::Member> members() const;  ///< Its workers, by rank.
  std::vector<control::Member> server_processes() const;
  std::uint32_t group_size(GroupId id) const;  ///< 0: there is no such group.
  std::uint32_t waiting() const;               ///< Workers that would come in at a step boundary.
  /// Collective, at a step boundary. Where workers wait to come in and nothing is under way on any rank, takes them in
  /// and returns true, on all ranks. Throws Error, kTimeout at the deadline.
  bool let_in(Instant deadline);
  /// Collective, for callers who go back to an earlier state together: what is under way is given up (kCancelled), also
  /// where ranks had got to different calls, and the next ones match again. Lets in as well. Throws Error.
  void start_again(Instant deadline);
  /// Runs after each change, on a thread that may block. One; empty takes it away.
  void on_change(std::function<void(const Change&)> callback);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// A server process of such a job: serves one generation after the other, until the job ends or stop() is called.
class ElasticServer final {
 public:
  ElasticServer(const Home& home, Instant deadline);
  ~ElasticServer();
  ElasticServer(const ElasticServer&) = delete;
  ElasticServer& operator=(const ElasticServer&) = delete;
  Status run();
  void stop();                               ///< Any thread.
  runtime::ServerCounters counters() const;  ///< Of all generations.

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace herring::elastic
