#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/status.h"
#include "efa/fabric.h"
#include "intra_node/neighborhood.h"
#include "runtime/control.h"
#include "runtime/runtime.h"
#include "transport/strict_endpoint.h"

/// A job, its workers and servers as threads of this process, over the real hub, the real shared memory and (where
/// there is one) the real libfabric.
namespace herring::runtime::testing {

inline Instant in_seconds(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

/// Ends the program where the work does not end: it holds memory of the test.
inline void wait_to_the_end(Work& work) {
  if (work.wait(in_seconds(30))) return;
  ADD_FAILURE() << "it never ended";
  std::abort();
}

inline std::vector<std::string> fabric_search() {
  const char* library = std::getenv("HERRING_TEST_LIBFABRIC");
  return library == nullptr ? std::vector<std::string>{} : std::vector<std::string>{library};
}

inline bool has_fabric() {
  efa::FabricOptions options;
  options.search = fabric_search();
  return efa::probe(options).chosen >= 0;
}

struct JobShape {
  std::uint32_t workers = 2;
  std::uint32_t servers = 0;
  std::uint32_t hosts = 1;
  Config config = {};
  bool is_cyclic = false;  ///< Neighbouring ranks are on neighbouring hosts, as with --map-by node.
  /// On network cards that want memory registered; as HERRING_TEST_STRICT does for all jobs. May throw for a rank's
  /// registration of so many bytes.
  bool strict = std::getenv("HERRING_TEST_STRICT") != nullptr;
  std::function<void(std::uint32_t rank, std::size_t bytes)> on_register = {};
};

/// For worker `rank`; servers have no rank here.
inline EndpointWrapper strict_wrapper(const JobShape& shape, std::optional<std::uint32_t> rank) {
  if (!shape.strict) return {};
  transport::StrictOptions options;
  if (shape.on_register && rank) options.on_register = [&shape, rank](std::size_t b) { shape.on_register(*rank, b); };
  return [options](std::unique_ptr<transport::Endpoint> inner,
                   memory::Domain& domain) -> std::unique_ptr<transport::Endpoint> {
    return std::make_unique<transport::StrictEndpoint>(std::move(inner), domain, options);
  };
}

using Body = std::function<void(Runtime&)>;

/// Runs `body` as every worker of a job; returns each worker's exception text ("" for none).
inline std::vector<std::string> run_job(JobShape shape, const Body& body) {
  shape.config.servers = shape.servers;
  shape.config.interface = "lo";
  // The other way round than what a small machine does by itself, so that both are run.
  if (shape.strict && shape.config.lane_threads == Switch::kAuto) shape.config.lane_threads = Switch::kOn;
  HubOptions hub_options;
  hub_options.listen_host = "127.0.0.1";
  hub_options.workers = shape.workers;
  hub_options.servers = shape.servers;
  hub_options.job_id = static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  hub_options.secret = "secret";
  hub_options.heartbeat = std::chrono::seconds(1);
  hub_options.dead_after = std::chrono::seconds(20);
  Hub hub(hub_options);
  const auto join = [&](Role role, std::uint32_t rank) {
    HubClientOptions options;
    options.host = "127.0.0.1";
    options.ports = {hub.port()};
    options.secret = "secret";
    const std::uint32_t place = shape.is_cyclic ? rank % shape.hosts : rank * shape.hosts / shape.workers;
    const std::string host = role == Role::kWorker ? std::to_string(place) : "servers";
    options.self = {role, rank, 1000 + rank, intra_node::host_identity() + "-" + host, "host" + host};
    options.workers = shape.workers;
    options.servers = shape.servers;
    return std::make_shared<HubClient>(options, in_seconds(30));
  };
  std::vector<std::string> errors(shape.workers);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < shape.workers; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        Runtime runtime({shape.config, join(Role::kWorker, rank), rank, fabric_search(), strict_wrapper(shape, rank)},
                        in_seconds(30));
        body(runtime);
        runtime.shutdown();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (std::uint32_t rank = 0; rank < shape.servers; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ServerProcess server(
            {shape.config, join(Role::kServer, rank), rank, fabric_search(), strict_wrapper(shape, {})},
            in_seconds(30));
        EXPECT_TRUE(server.run().is_ok());
      } catch (const std::exception& error) {
        ADD_FAILURE() << "server " << rank << ": " << error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline Request all_reduce(std::span<float> values, ReduceOp op = ReduceOp::kSum) {
  Request request;
  request.descriptor.reduce = op;
  request.descriptor.dims = 1;
  request.descriptor.shape[0] = values.size();
  request.output = std::as_writable_bytes(values);
  request.input = request.output;
  request.timeout = std::chrono::seconds(60);
  return request;
}

inline void finish(const std::shared_ptr<Work>& work) {
  ASSERT_TRUE(work->wait(in_seconds(60))) << "an operation never ended";
  work->status().or_throw();
}

inline void expect_clean(const std::vector<std::string>& errors) {
  for (std::size_t rank = 0; rank < errors.size(); ++rank) EXPECT_EQ(errors[rank], "") << "rank " << rank;
}

}  // namespace herring::runtime::testing
