#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "elastic/elastic_runtime.h"
#include "elastic/rendezvous_server.h"
#include "runtime/job.h"

/// A job with a rendezvous, all of it threads of this process: real sockets, real hubs, the real libfabric.
namespace herring::elastic::testing {

using runtime::testing::all_reduce;
using runtime::testing::fabric_search;
using runtime::testing::finish;
using runtime::testing::has_fabric;
using runtime::testing::in_seconds;

class ElasticJob {
 public:
  struct Shape {
    std::uint32_t workers = 2;
    std::uint32_t servers = 0;
    bool is_elastic = false;
    Config config = {};
    std::uint32_t hosts = 1;  ///< Of the workers, who fill one after the other.
  };

  explicit ElasticJob(Shape shape) : shape_(std::move(shape)) {
    RendezvousServerOptions options;
    options.listen_host = "127.0.0.1";
    options.secret = "secret";
    options.job.workers = shape_.workers;
    options.job.servers = shape_.servers;
    options.job.dead_after = std::chrono::seconds(20);
    rendezvous_ = std::make_unique<RendezvousServer>(options);
    for (std::uint32_t rank = 0; rank < shape_.servers; ++rank) add_server();
  }
  ~ElasticJob() {
    while (!servers_.empty()) kill_server(0);
  }

  Home home(control::Role role, std::uint32_t rank) const {
    Home home;
    home.config = shape_.config;
    home.config.secret = "secret";
    home.config.interface = "lo";
    home.config.elastic = shape_.is_elastic ? Toggle::kOn : Toggle::kOff;
    home.host = "127.0.0.1";
    home.port = rendezvous_->port();
    const std::string place = std::to_string(rank * shape_.hosts / shape_.workers);
    const std::string host = role == control::Role::kWorker ? "workers" + place : "servers";
    home.self = {role, rank, 1000 + rank, intra_node::host_identity() + "-" + host, host};
    home.fabric_search = fabric_search();
    return home;
  }

  /// One more server process: it is taken in as soon as it can be.
  void add_server() {
    auto& place = servers_.emplace_back();
    place.server =
        std::make_unique<ElasticServer>(home(control::Role::kServer, shape_.servers + started_++), in_seconds(30));
    place.thread = std::thread([server = place.server.get()] { static_cast<void>(server->run()); });
  }
  /// The oldest, the second oldest, ... of those that live goes away without a goodbye.
  void kill_server(std::size_t index) {
    servers_[index].server->stop();
    servers_[index].thread.join();
    servers_.erase(servers_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  /// Runs `body` as each worker; returns each one's exception text ("" for none).
  template <class Body>
  std::vector<std::string> run(const Body& body) {
    std::vector<std::string> errors(shape_.workers);
    std::vector<std::thread> threads;
    for (std::uint32_t rank = 0; rank < shape_.workers; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          ElasticRuntime runtime(home(control::Role::kWorker, rank), in_seconds(30));
          body(runtime);
          runtime.shutdown();
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  RendezvousServer& rendezvous() { return *rendezvous_; }

 private:
  struct Server {
    std::unique_ptr<ElasticServer> server;
    std::thread thread;
  };
  const Shape shape_;
  std::unique_ptr<RendezvousServer> rendezvous_;
  std::vector<Server> servers_;
  std::uint32_t started_ = 0;
};

/// Polls until `is_true`, a minute at most.
template <class Condition>
bool eventually(const Condition& is_true) {
  const Instant deadline = in_seconds(60);
  while (!is_true()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

}  // namespace herring::elastic::testing
